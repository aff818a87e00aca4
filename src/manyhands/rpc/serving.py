"""Serves the calls of another peer over one control connection."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from manyhands.base.deadline import time_limit
from manyhands.base.errors import ManyhandsError, PeerLost, Refused, Timeout
from manyhands.base.identity import PeerId
from manyhands.base.rate import Buckets
from manyhands.rpc.calling import SMALL_BYTES
from manyhands.rpc.frames import MAX_TEXT, UNREADABLE, CallFailure, Request, Response, encode_frame
from manyhands.rpc.method import Method
from manyhands.runtime.tasks import TaskOwner
from manyhands.transport.api import ControlStream

logger = logging.getLogger(__name__)

Handler = Callable[[PeerId, Any], Awaitable[msgspec.Struct] | msgspec.Struct]


Guard = Callable[[PeerId], None]
"""A function that raises ``Refused`` if a peer may not call."""


class Served(NamedTuple):
    """A method and its handler; a *prompt* handler does not wait, and returns the response itself.

    The guard is called before a request is decoded.
    """

    method: Method[Any, Any]
    handler: Handler
    is_prompt: bool
    guard: Guard | None = None


MAX_CALLS_PER_S = 2000.0
"""Calls of one peer, with bursts of five seconds' worth; the busiest leader of a round gets a tenth of that."""

MAX_SERVING_S = 3600.0
"""Longest time for one call, even if its caller would wait longer."""

MAX_WAITING_BYTES = 8 << 20
"""Bytes of answers that one peer has not read yet; above that, large answers are refused."""

SEND_TIMEOUT_S = 60.0
"""A connection is aborted if the peer reads none of its answers for this time."""

MAX_REQUEST_BYTES = 8 << 20
"""Bytes of all concurrent requests on one connection; above that, more are refused."""


class Serving:
    """The requests of one remote peer; each runs in its own task, unless its handler is prompt.

    Args:
        handlers: what this peer serves, by method name.
        max_requests: concurrent requests; more are refused.
        call_rate: limit of each peer, over all of its connections; calls above it are refused.
        on_served: called after each request.
    """

    def __init__(
        self,
        stream: ControlStream,
        handlers: Mapping[str, Served],
        max_requests: int,
        counters: Counter[str],
        call_rate: Buckets,
        on_served: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._handlers = handlers
        self._max_requests = max_requests
        self._counters = counters
        self._call_rate = call_rate
        self._on_served = on_served
        self._num_waiting_bytes = 0
        self._num_request_bytes = 0
        self._cancelled: set[int] = set()
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._tasks = TaskOwner(f"serving peer {stream.remote}")

    def __len__(self) -> int:
        return len(self._serving)

    def begin(self, request: Request) -> None:
        """Serve a request, or refuse it."""
        if not self._call_rate.take(self._stream.remote, asyncio.get_running_loop().time()):
            self._counters["refused_calls"] += 1
            self._send_now(_failure(request, "busy", f"more than {self._call_rate.rate:g} calls a second"))
            return
        is_full = self._num_request_bytes + _size_of(request) > MAX_REQUEST_BYTES
        if len(self._serving) >= self._max_requests or is_full or request.id in self._serving:
            self._counters["refused_busy"] += 1
            self._send_now(_failure(request, "busy", "too many calls at once"))
            return
        if not request.timeout_s > 0:  # also excludes NaN, which would disorder the timers of the loop
            self._send_now(_failure(request, "bad_request", f"a timeout of {request.timeout_s} s; it must be above 0"))
            return
        served = self._handlers.get(request.method)
        if served is not None and served.is_prompt:
            self._answer_at_once(request, served)
        else:
            self._spawn(request, self._answer(request))

    def cancel(self, call_id: int) -> None:
        """Cancel a call whose caller has given up."""
        if (task := self._serving.get(call_id)) is not None:
            self._cancelled.add(call_id)
            self._tasks.cancel(task)

    def end(self) -> None:
        """Cancel all calls, as the connection is lost."""
        for call_id in list(self._serving):
            self.cancel(call_id)

    async def close(self) -> None:
        """Stop all running handlers, which may take time to clean up."""
        await self._tasks.close()

    def _spawn(self, request: Request, answering: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.spawn(answering, name=request.method[:80])
        self._serving[request.id] = task
        num_bytes = _size_of(request)
        self._num_request_bytes += num_bytes
        task.add_done_callback(functools.partial(self._served, request.id, num_bytes))

    def _served(self, call_id: int, num_bytes: int, _: asyncio.Task[None]) -> None:
        self._num_request_bytes -= num_bytes
        self._cancelled.discard(call_id)
        del self._serving[call_id]
        self._on_served()

    def _answer_at_once(self, request: Request, served: Served) -> None:
        try:
            frame = _response(request, served.handler(self._stream.remote, self._body_of(request, served)))
        except Exception as error:  # noqa: BLE001 (as below)
            frame = self._report_failure(request, error)
        if len(frame) > SMALL_BYTES:
            self._spawn(request, self._deliver(request, frame))
        else:
            self._send_now(frame)
            self._on_served()

    async def _answer(self, request: Request) -> None:
        try:
            async with time_limit(min(request.timeout_s, MAX_SERVING_S), f"serving {request.method[:80]}"):
                frame = await self._handle(request)
        except asyncio.CancelledError as error:
            if request.id in self._cancelled or self._tasks.is_closed:
                raise
            frame = self._report_failure(
                request, RuntimeError(f"the handler was cancelled, but not by the caller: {error}")
            )
        except Exception as error:  # noqa: BLE001 (the caller learns that the call failed, but no internals)
            if isinstance(error, PeerLost) and error.peer_id == self._stream.remote:
                return
            frame = self._report_failure(request, error)
        await self._deliver(request, frame)

    def _report_failure(self, request: Request, error: Exception) -> bytes:
        if isinstance(error, Refused):
            return _failure(request, error.code, error.message)
        if isinstance(error, Timeout):  # the caller's deadline, or a wait of the handler itself
            return _failure(request, "timeout", str(error))
        if isinstance(error, ManyhandsError):
            return _failure(request, "unavailable", str(error))
        self._counters["handler_errors"] += 1
        logger.error("Serving %s for peer %s failed", request.method, self._stream.remote, exc_info=error)
        return _failure(request, "internal", "the call failed inside the peer; its log says why")

    async def _deliver(self, request: Request, frame: bytes) -> None:
        try:
            await self._send(frame)
        except Refused as error:
            self._send_now(_failure(request, error.code, error.message))
        except (PeerLost, Timeout) as error:
            logger.debug("peer %s did not get the answer of %s: %s", self._stream.remote, request.method, error)

    async def _handle(self, request: Request) -> bytes:
        served = self._handlers.get(request.method)
        if served is None:
            raise Refused(self._stream.remote, "unknown_method", f"no method {request.method[:80]!r} here")
        outcome = served.handler(self._stream.remote, self._body_of(request, served))
        return _response(request, await outcome if isinstance(outcome, Awaitable) else outcome)

    def _body_of(self, request: Request, served: Served) -> msgspec.Struct:
        if served.guard is not None:
            served.guard(self._stream.remote)
        try:
            body: msgspec.Struct = msgspec.msgpack.decode(request.body, type=served.method.request)
        except UNREADABLE as error:
            self._counters["protocol_violations"] += 1
            raise Refused(self._stream.remote, "bad_request", f"the request cannot be read: {error}") from error
        return body

    async def _send(self, frame: bytes) -> None:
        if len(frame) <= SMALL_BYTES:
            self._stream.send_now(frame)
            return
        if self._num_waiting_bytes + len(frame) > MAX_WAITING_BYTES:
            self._counters["refused_busy"] += 1
            raise Refused(self._stream.remote, "busy", "too many unread answers")
        self._num_waiting_bytes += len(frame)
        try:
            async with time_limit(SEND_TIMEOUT_S, f"for peer {self._stream.remote} to read its answers"):
                await self._stream.send_message(frame)
        except Timeout:
            self._stream.abort()
            raise
        finally:
            self._num_waiting_bytes -= len(frame)

    def _send_now(self, frame: bytes) -> None:
        with suppress(PeerLost):  # the connection handles it
            self._stream.send_now(frame)


def _size_of(request: Request) -> int:
    return memoryview(request.body).nbytes


def _response(request: Request, outcome: object) -> bytes:
    return encode_frame(Response(request.id, msgspec.Raw(msgspec.msgpack.encode(outcome))))


def _failure(request: Request, code: str, message: str) -> bytes:
    return encode_frame(CallFailure(request.id, code[:MAX_TEXT], message[:MAX_TEXT]))
