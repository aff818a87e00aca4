"""Answers the requests for the addresses of the page (docs/reference/web.md). All of them only read."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manyhands.base.errors import ConfigError
from manyhands.base.text import reason_of, rough
from manyhands.monitor.picture import SCHEMA_VERSION, PeerRow, Point, RunPicture
from manyhands.monitor.web.page_files import TYPES, PageFiles
from manyhands.monitor.web.prometheus import as_metrics
from manyhands.monitor.web.source import Fill, Source
from manyhands.monitor.web.tables import as_csv
from manyhands.monitor.web.update_stream import UpdateStream
from manyhands.monitor.web.updates import head_of

logger = logging.getLogger(__name__)

MAX_STREAMS = 1000
HEALTHY_S = 60.0
DEFAULT_POINTS = 1000
MAX_POINTS = 10_000
DEFAULT_EVENTS = 50
MAX_EVENTS = 1000
CSV_POINTS = 500
"""Points that are read and sent at a time: those of a year are a large file."""
MAX_ANSWERS = 8
"""Most encoded answers that are kept: a thousand pages that connect again at once ask for the same points."""
MAX_FILL_LENGTH = 500

CSV = "text/csv; charset=utf-8"
FOREVER = "public, max-age=31536000, immutable"
SECURITY = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class BadQuery(Exception):
    """A parameter of a request is out of bounds; the message is the answer."""


class Api:
    """The answers of all addresses.

    Args:
        fill: fills masks; None if there is no model here.
    """

    def __init__(self, source: Source, stream: UpdateStream, page: PageFiles, fill: Fill | None) -> None:
        self._source = source
        self._stream = stream
        self._fill = fill
        self._failure = ""  # the last one that was logged
        self._filling = threading.Lock()
        self._encoding = threading.Lock()
        self._encoded_of: RunPicture | None = None  # the picture to which the answers belong
        self._encoded: dict[Hashable, bytes] = {}
        self._page = page

    def app(self, *, is_loopback: bool) -> ASGIApp:
        """The ASGI application.

        Args:
            is_loopback: whether only this machine can connect. Then the name of the host is checked, against DNS
                rebinding: otherwise a web page whose name resolves to this machine could read the run.
        """
        addresses = {
            "/": self.index,
            "/static/{path:path}": self.static,
            "/events": self.events,
            "/api/run.json": self.run_json,
            "/api/peers.json": self.peers_json,
            "/api/leaders.json": self.leaders_json,
            "/api/leader.json": self.leader_json,
            "/api/events.json": self.events_json,
            "/api/points.json": self.points_json,
            "/api/points.csv": self.points_csv,
            "/api/peers.csv": self.peers_csv,
            "/api/fill.json": self.fill_json,
            "/metrics": self.metrics,
            "/healthz": self.healthz,
        }
        app = Starlette(
            routes=[Route(path, answer, methods=["GET"]) for path, answer in addresses.items()],
            exception_handlers={BadQuery: _bad_query, Exception: self.failed},
        )
        app.router.redirect_slashes = False
        return _Guarded(app, is_loopback=is_loopback)

    async def index(self, request: Request) -> Response:
        etag = _etag(self._page.index)
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers={"ETag": etag})
        return Response(self._page.index, media_type=TYPES["html"], headers={"Cache-Control": "no-cache", "ETag": etag})

    async def static(self, request: Request) -> Response:
        found = self._page.static.get(request.path_params["path"])
        if found is None:
            return PlainTextResponse("not found\n", 404)
        kind = request.path_params["path"].rpartition(".")[2]
        return Response(found, media_type=TYPES[kind], headers={"Cache-Control": FOREVER})

    async def events(self, request: Request) -> Response:
        """The stream of updates."""
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # nginx would hold the updates back
        if request.method == "HEAD":
            return Response(media_type="text/event-stream", headers=headers)
        if self._stream.num_pages >= MAX_STREAMS:
            return PlainTextResponse("too many open pages\n", 503, headers={"Retry-After": "30"})
        return StreamingResponse(self._stream.messages(), media_type="text/event-stream", headers=headers)

    async def run_json(self, request: Request) -> Response:
        return _json(head_of(self._source.picture()))

    def peers_json(self, request: Request) -> Response:
        return self._once("peers", "peers", lambda picture: picture.peers)

    def leaders_json(self, request: Request) -> Response:
        return self._once("leaders", "leaders", lambda picture: picture.leaders)

    def leader_json(self, request: Request) -> Response:
        """The place of one peer, whatever its rank."""
        return self._listed("leader", self._source.leader_of(request.query_params.get("peer", "")))

    def events_json(self, request: Request) -> Response:
        limit = int(_number(request, "limit", DEFAULT_EVENTS, 1, MAX_EVENTS))
        return self._listed("events", self._source.events(limit))

    def points_json(self, request: Request) -> Response:
        since = _number(request, "since", 0.0, 0.0, math.inf)
        limit = int(_number(request, "limit", DEFAULT_POINTS, 1, MAX_POINTS))
        return self._once((since, limit), "points", lambda _: self._source.points(since, limit))

    def points_csv(self, request: Request) -> Response:
        since = _number(request, "since", 0.0, 0.0, math.inf)
        return _csv(request, "points.csv", as_csv(Point, self._all_points(since), self._source.picture().unit))

    def _all_points(self, since: float) -> Iterator[list[Point]]:
        step = -1
        while points := self._source.points_after(step, since, CSV_POINTS):
            yield points
            step = points[-1].step

    def peers_csv(self, request: Request) -> Response:
        picture = self._source.picture()
        return _csv(request, "peers.csv", as_csv(PeerRow, [picture.peers], picture.unit))

    def fill_json(self, request: Request) -> Response:
        """The best guesses for the masks of a text; one request at a time, as each computes."""
        text = request.query_params.get("text", "")
        if self._fill is None:
            return _json({"error": "this monitor has no model: start it with --checkpoint-dir and --playground"}, 404)
        if not 0 < len(text) <= MAX_FILL_LENGTH:
            return _json({"error": f"text has {len(text)} characters; it must have 1 to {MAX_FILL_LENGTH}"}, 400)
        if not self._filling.acquire(blocking=False):
            return _json({"error": "the model is computing for another page; try again"}, 503)
        try:
            return _json(msgspec.to_builtins(self._fill(text)))
        except ConfigError as error:
            return _json({"error": str(error)}, 400)
        finally:
            self._filling.release()

    async def metrics(self, request: Request) -> Response:
        text = as_metrics(
            self._source.picture(), num_aborted=self._source.num_aborted, num_pages=self._stream.num_pages
        )
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def failed(self, request: Request, error: Exception) -> Response:
        """Answer that the server has failed, and log why: only once, as each page may ask again."""
        reason = f"{request.url.path}: {reason_of(error)}"
        if reason != self._failure:
            self._failure = reason
            logger.error("The page cannot answer %s", reason)
        return PlainTextResponse("the server has a problem; its log says which\n", 500)

    async def healthz(self, request: Request) -> Response:
        """200 if the monitor has looked at the run within a minute, else 503; for supervisors."""
        silent_s = time.time() - self._source.picture().time
        if silent_s <= HEALTHY_S:
            return PlainTextResponse("ok\n")
        since = rough(silent_s) if silent_s < 1e9 else "its start"
        return PlainTextResponse(f"the monitor has not read the records of the run for {since}\n", 503)

    def _once(self, key: Hashable, name: str, content: Callable[[RunPicture], Any]) -> Response:
        """An answer that is encoded once, and kept until the next picture.

        Args:
            key: equal for requests with the same answer.
        """
        picture = self._source.picture()
        with self._encoding:
            if picture is not self._encoded_of or len(self._encoded) >= MAX_ANSWERS:
                self._encoded_of = picture
                self._encoded = {}
            if key not in self._encoded:
                self._encoded[key] = _bytes_of(picture, name, content(picture))
            return _encoded(self._encoded[key])

    def _listed(self, name: str, content: Any) -> Response:
        return _encoded(_bytes_of(self._source.picture(), name, content))


class _Guarded:
    """Adds the security headers to all answers, and refuses names of other hosts."""

    def __init__(self, app: ASGIApp, *, is_loopback: bool) -> None:
        self._app = app
        self._is_loopback = is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY)
            await send(message)

        app = self._app
        if self._is_loopback and not _is_loopback(Headers(scope=scope).get("host", "")):
            app = PlainTextResponse("this page is for this machine alone: open it as 127.0.0.1 or localhost\n", 421)
        await app(scope, receive, send_guarded)


def _is_loopback(header: str) -> bool:
    """Whether a Host header names this machine."""
    name, separator, port = header.rpartition(":")
    host = name if separator and port.isdecimal() else header
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _number(request: Request, name: str, default: float, least: float, most: float) -> float:
    text = request.query_params.get(name)
    if text is None or text == "":
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise BadQuery(f"{name} must be a number from {least:g} to {most:g}")
    return value


async def _bad_query(request: Request, error: Exception) -> Response:
    return _json({"error": str(error)}, 400)


def _json(content: Any, status: int = 200) -> Response:
    return _encoded(msgspec.json.encode(content), status)


def _bytes_of(picture: RunPicture, name: str, content: Any) -> bytes:
    return msgspec.json.encode(
        {"version": SCHEMA_VERSION, "run_id": picture.run_id, "time": picture.time, "unit": picture.unit, name: content}
    )


def _encoded(content: bytes, status: int = 200) -> Response:
    return Response(content, status, media_type="application/json", headers={"Cache-Control": "no-store"})


def _csv(request: Request, name: str, pieces: Iterator[str]) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
    if request.method == "HEAD":
        pieces = iter(())
    return StreamingResponse(pieces, media_type=CSV, headers=headers)


def _etag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'
