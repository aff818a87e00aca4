"""One control connection: calls in both directions, and heartbeats."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from manyhands.base.deadline import time_limit
from manyhands.base.errors import (
    ManyhandsError,
    PeerError,
    PeerLost,
    ProtocolViolation,
    Refused,
    Timeout,
    Unavailable,
)
from manyhands.base.identity import PeerId
from manyhands.rpc.config import RpcConfig
from manyhands.rpc.frames import (
    MAX_TEXT,
    UNREADABLE,
    Cancel,
    Failure,
    Frame,
    Goodbye,
    Ping,
    Pong,
    Request,
    Response,
    encode_frame,
    readable,
    receive_frame,
    send_frame,
)
from manyhands.rpc.method import Method
from manyhands.rpc.method import Request as RequestBody
from manyhands.rpc.method import Response as ResponseBody
from manyhands.runtime.tasks import TaskOwner
from manyhands.transport.api import Stream

logger = logging.getLogger(__name__)

Handler = Callable[[PeerId, Any], Awaitable[msgspec.Struct]]

MAX_SERVING_S = 3600.0
"""No call is served for longer, whatever its caller would wait."""


class ControlConnection:
    """Calls, answers and heartbeats over one stream.

    Args:
        stream: after its hello.
        addresses: where the remote peer can be dialled, as it said; none means client mode.
        handlers: what this peer serves, by method name.
        counters: counts of what went wrong, shared by the connections of one endpoint.
    """

    def __init__(
        self,
        stream: Stream,
        addresses: list[str],
        handlers: Mapping[str, tuple[Method[Any, Any], Handler]],
        config: RpcConfig,
        counters: Counter[str],
    ) -> None:
        self.remote = stream.remote
        self.addresses = addresses
        self.lost: PeerLost | None = None
        self._stream = stream
        self._handlers = handlers
        self._config = config
        self._counters = counters
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Response | Failure | PeerLost]] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._tasks = TaskOwner(f"connection to {stream.remote}")

    async def run(self) -> PeerLost:
        """Serve the connection until it ends; returns why it did. Then call :meth:`close`."""
        self._tasks.spawn(self._heartbeat(), name="heartbeat")
        try:
            while True:
                self._dispatch(await receive_frame(self._stream))
        except PeerLost as error:
            self._end(error)
        except ProtocolViolation as error:
            self._counters["protocol_violations"] += 1
            logger.warning("%s; its connection is dropped", error)
            self._end(PeerLost(self.remote, str(error)))
        finally:
            self._end(PeerLost(self.remote, "the connection was closed here"))
        assert self.lost is not None
        return self.lost

    async def call(
        self, method: Method[RequestBody, ResponseBody], request: RequestBody, timeout_s: float
    ) -> ResponseBody:
        """Call a method of the remote peer.

        Raises:
            PeerLost, Timeout: no answer came.
            Refused: the peer said no.
            ProtocolViolation: the answer cannot be read.
        """
        if self.lost is not None:
            raise PeerLost(self.remote, self.lost.reason)
        call_id = next(self._ids)
        answered = self._calls[call_id] = asyncio.get_running_loop().create_future()
        frame = Request(call_id, method.name, timeout_s, msgspec.Raw(msgspec.msgpack.encode(request)))
        try:
            async with time_limit(timeout_s, f"waiting for {method.name} of peer {self.remote}"):
                await send_frame(self._stream, frame)
                answer = await answered
        except (Timeout, asyncio.CancelledError):
            self._send_soon(Cancel(call_id))
            raise
        finally:
            del self._calls[call_id]
        if not isinstance(answer, Response):
            raise self._error_of(answer)
        try:
            return msgspec.msgpack.decode(answer.body, type=method.response)
        except UNREADABLE as error:
            self._counters["protocol_violations"] += 1
            text = f"the answer of {method.name} cannot be read: {readable(str(error))}"
            raise ProtocolViolation(self.remote, text) from error

    async def goodbye(self, reason: str) -> None:
        """Tell the peer that this connection is closed on purpose, and close it."""
        if self.lost is None:
            try:
                async with time_limit(0.5, "saying goodbye"):
                    await send_frame(self._stream, Goodbye(reason))
            except (PeerLost, Timeout):
                pass
        await self._stream.close(0.5)

    async def close(self) -> None:
        """End what still runs for this connection, once it has ended: handlers take their time to tidy up."""
        await self._tasks.close()

    def _end(self, error: PeerLost) -> None:
        if self.lost is not None:
            return
        self.lost = error
        self._stream.abort()
        for call_id in self._calls:
            self._answered(call_id, error)
        for task in self._serving.values():
            task.cancel()

    def _dispatch(self, frame: Frame) -> None:
        if isinstance(frame, Request):
            self._serve(frame)
        elif isinstance(frame, (Response, Failure)):
            self._answered(frame.id, frame)
        elif isinstance(frame, Cancel):
            if (task := self._serving.get(frame.id)) is not None:
                task.cancel()
        elif isinstance(frame, Ping):
            self._send_soon(Pong())
        elif isinstance(frame, Goodbye):
            raise PeerLost(self.remote, f"it said goodbye: {readable(frame.reason)}")
        elif not isinstance(frame, Pong):
            raise ProtocolViolation(self.remote, f"an unexpected {type(frame).__name__} frame")

    def _answered(self, call_id: int, answer: Response | Failure | PeerLost) -> None:
        answered = self._calls.get(call_id)
        if answered is not None and not answered.done():  # else nobody waits for it any more
            answered.set_result(answer)

    def _error_of(self, answer: Failure | PeerLost) -> ManyhandsError:
        if isinstance(answer, PeerLost):
            return PeerLost(answer.peer_id, answer.reason)
        message = readable(answer.message)
        if answer.code in ("timeout", "unavailable"):
            return Unavailable(f"peer {self.remote}: {message}")
        if answer.code == "internal":
            return PeerError(self.remote, message)
        return Refused(self.remote, readable(answer.code), message)

    def _serve(self, request: Request) -> None:
        if len(self._serving) >= self._config.max_requests_per_connection or request.id in self._serving:
            self._counters["refused_busy"] += 1
            self._send_soon(Failure(request.id, "busy", "too many calls at once"))
            return
        if not request.timeout_s > 0:  # not a number is not above 0 either; it would disorder the timers of the loop
            self._send_soon(Failure(request.id, "bad_request", f"a deadline of {request.timeout_s} s"))
            return
        task = self._tasks.spawn(self._answer(request), name=f"serving {request.method[:80]}")
        self._serving[request.id] = task
        task.add_done_callback(lambda _: self._serving.pop(request.id, None))

    async def _answer(self, request: Request) -> None:
        try:
            async with time_limit(min(request.timeout_s, MAX_SERVING_S), f"serving {request.method[:80]}"):
                frame = encode_frame(Response(request.id, await self._handle(request)))
        except Refused as error:
            frame = _failure(request, error.code, error.message)
        except Timeout as error:  # the caller's deadline, or a wait of the handler itself
            frame = _failure(request, "timeout", str(error))
        except ManyhandsError as error:
            frame = _failure(request, "unavailable", str(error))
        except Exception:  # the caller learns that it failed, not how we look inside
            self._counters["handler_errors"] += 1
            logger.exception("serving %s for peer %s failed", request.method, self.remote)
            frame = _failure(request, "internal", "the call failed inside the peer; its log says why")
        try:
            await self._stream.send(frame)
        except PeerLost:
            logger.debug("peer %s left before the answer of %s", self.remote, request.method)

    async def _handle(self, request: Request) -> msgspec.Raw:
        if request.method not in self._handlers:
            raise Refused(self.remote, "unknown_method", f"no method {request.method[:80]!r} here")
        method, handler = self._handlers[request.method]
        try:
            body = msgspec.msgpack.decode(request.body, type=method.request)
        except UNREADABLE as error:
            self._counters["protocol_violations"] += 1
            raise Refused(self.remote, "bad_request", f"the request cannot be read: {error}") from error
        return msgspec.Raw(msgspec.msgpack.encode(await handler(self.remote, body)))

    async def _heartbeat(self) -> None:
        loop = asyncio.get_running_loop()
        period_s = self._config.heartbeat_period_s
        heard = loop.time()
        while self.lost is None:
            due = loop.time() + period_s
            await asyncio.sleep(period_s)
            is_held_up = loop.time() > due + period_s  # this loop was, so what came meanwhile is not read yet
            heard = loop.time() if is_held_up else max(heard, self._stream.last_received)
            silence_s = loop.time() - heard
            if silence_s > self._config.heartbeat_timeout_s:
                self._end(PeerLost(self.remote, f"silent for {silence_s:.1f} s"))
                return
            self._send_soon(Ping())

    def _send_soon(self, frame: Frame) -> None:
        if self.lost is None and len(self._tasks) < 4 * self._config.max_requests_per_connection:
            self._tasks.spawn(self._send(frame), name="sending")

    async def _send(self, frame: Frame) -> None:
        try:
            async with time_limit(self._config.heartbeat_timeout_s, "sending"):
                await self._stream.send(encode_frame(frame))
        except (PeerLost, Timeout):
            pass  # the reader and the heartbeat see to it


def _failure(request: Request, code: str, message: str) -> bytes:
    return encode_frame(Failure(request.id, code[:MAX_TEXT], message[:MAX_TEXT]))
