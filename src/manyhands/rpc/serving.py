"""The calls of another peer that are served over one control connection."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from manyhands.base.deadline import time_limit
from manyhands.base.errors import ManyhandsError, PeerLost, Refused, Timeout
from manyhands.base.identity import PeerId
from manyhands.rpc.calling import SMALL_BYTES
from manyhands.rpc.frames import MAX_TEXT, MAX_WINDOW, UNREADABLE, Failure, Item, Request, Response, encode_frame
from manyhands.rpc.method import Method, StreamMethod
from manyhands.runtime.tasks import TaskOwner
from manyhands.transport.api import ControlStream

logger = logging.getLogger(__name__)

Handler = Callable[[PeerId, Any], Awaitable[msgspec.Struct]]
StreamHandler = Callable[[PeerId, Any], AsyncIterator[msgspec.Struct]]
Served = tuple[Method[Any, Any], Handler] | tuple[StreamMethod[Any, Any], StreamHandler]

MAX_SERVING_S = 3600.0
"""No call is served for longer, whatever its caller would wait."""

NIL = msgspec.Raw(b"\xc0")


class Serving:
    """The requests of one remote peer, each in a task of its own.

    Args:
        handlers: what this peer serves, by method name.
        max_requests: that are served at once; more are refused.
        on_served: called after each.
    """

    def __init__(
        self,
        stream: ControlStream,
        handlers: Mapping[str, Served],
        max_requests: int,
        counters: Counter[str],
        on_served: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._handlers = handlers
        self._max_requests = max_requests
        self._counters = counters
        self._on_served = on_served
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._windows: dict[int, _Window] = {}
        self._tasks = TaskOwner(f"serving peer {stream.remote}")

    def __len__(self) -> int:
        return len(self._serving)

    def begin(self, request: Request) -> None:
        """Serve a request, or refuse it."""
        if len(self._serving) >= self._max_requests or request.id in self._serving:
            self._counters["refused_busy"] += 1
            self._send_now(_failure(request, "busy", "too many calls at once"))
            return
        if not request.timeout_s > 0:  # not a number is not above 0 either; it would disorder the timers of the loop
            self._send_now(_failure(request, "bad_request", f"a deadline of {request.timeout_s} s"))
            return
        task = self._tasks.spawn(self._answer(request), name=request.method[:80])
        self._serving[request.id] = task
        task.add_done_callback(lambda _: self._served(request.id))

    def cancel(self, call_id: int) -> None:
        """The caller no longer waits."""
        if (task := self._serving.get(call_id)) is not None:
            task.cancel()

    def credit(self, call_id: int, num_items: int) -> None:
        """The caller of a streaming call has room for more."""
        if (window := self._windows.get(call_id)) is not None:
            window.widen(num_items)

    def end(self) -> None:
        """The connection is lost: nobody waits for any answer."""
        for task in self._serving.values():
            task.cancel()

    async def close(self) -> None:
        """End what still runs: handlers take their time to tidy up."""
        await self._tasks.close()

    def _served(self, call_id: int) -> None:
        self._serving.pop(call_id, None)
        self._on_served()

    async def _answer(self, request: Request) -> None:
        try:
            async with time_limit(min(request.timeout_s, MAX_SERVING_S), f"serving {request.method[:80]}"):
                frame = encode_frame(Response(request.id, await self._handle(request)))
        except Refused as error:
            frame = _failure(request, error.code, error.message)
        except PeerLost as error:
            if error.peer_id == self._stream.remote:
                return
            frame = _failure(request, "unavailable", str(error))
        except Timeout as error:  # the caller's deadline, or a wait of the handler itself
            frame = _failure(request, "timeout", str(error))
        except ManyhandsError as error:
            frame = _failure(request, "unavailable", str(error))
        except Exception:  # the caller learns that it failed, not how we look inside
            self._counters["handler_errors"] += 1
            logger.exception("serving %s for peer %s failed", request.method, self._stream.remote)
            frame = _failure(request, "internal", "the call failed inside the peer; its log says why")
        try:
            await self._send(frame)
        except PeerLost:
            logger.debug("peer %s left before the answer of %s", self._stream.remote, request.method)

    async def _handle(self, request: Request) -> msgspec.Raw:
        served = self._handlers.get(request.method)
        is_streaming = request.window > 0
        if served is None or isinstance(served[0], StreamMethod) != is_streaming:
            raise Refused(self._stream.remote, "unknown_method", f"no method {request.method[:80]!r} here")
        method, handler = served
        try:
            body = msgspec.msgpack.decode(request.body, type=method.request)
        except UNREADABLE as error:
            self._counters["protocol_violations"] += 1
            raise Refused(self._stream.remote, "bad_request", f"the request cannot be read: {error}") from error
        outcome = handler(self._stream.remote, body)
        if isinstance(outcome, AsyncIterator):
            await self._send_items(request, outcome)
            return NIL
        return msgspec.Raw(msgspec.msgpack.encode(await outcome))

    async def _send_items(self, request: Request, items: AsyncIterator[msgspec.Struct]) -> None:
        window = self._windows[request.id] = _Window(request.window)
        try:
            async for item in items:
                await window.room()
                await self._send(encode_frame(Item(request.id, msgspec.Raw(msgspec.msgpack.encode(item)))))
        finally:
            del self._windows[request.id]
            if (close := getattr(items, "aclose", None)) is not None:
                await close()

    async def _send(self, frame: bytes) -> None:
        if len(frame) <= SMALL_BYTES:
            self._stream.send_now(frame)
        else:
            await self._stream.send_message(frame)

    def _send_now(self, frame: bytes) -> None:
        with suppress(PeerLost):  # the connection sees to it
            self._stream.send_now(frame)


class _Window:
    """How many more items may be sent."""

    def __init__(self, num_items: int) -> None:
        self._num_items = num_items
        self._widened = asyncio.Event()

    def widen(self, num_items: int) -> None:
        self._num_items = min(self._num_items + num_items, MAX_WINDOW)
        self._widened.set()

    async def room(self) -> None:
        """Wait until one more may be sent, and count it; the deadline of the call bounds it."""
        while self._num_items == 0:
            self._widened.clear()
            await self._widened.wait()
        self._num_items -= 1


def _failure(request: Request, code: str, message: str) -> bytes:
    return encode_frame(Failure(request.id, code[:MAX_TEXT], message[:MAX_TEXT]))
