"""Outgoing calls over one control connection."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from manyhands.base.errors import ManyhandsError, PeerError, PeerLost, ProtocolViolation, Refused, Timeout, Unavailable
from manyhands.rpc.frames import (
    UNREADABLE,
    CallFailure,
    Cancel,
    Request,
    Response,
    encode_frame,
    readable,
)
from manyhands.rpc.method import Method, RequestT, ResponseT
from manyhands.transport.api import ControlStream

SMALL_BYTES = 1 << 16
"""Messages of up to this size are sent without waiting."""

Answer = Response | CallFailure | PeerLost | Timeout
Body = TypeVar("Body", bound=msgspec.Struct)


class Calls:
    """Calls that wait for their answers.

    Args:
        on_sent: called when a large request was sent or cancelled.

    Attributes:
        num_sending: large requests not completely sent.
    """

    def __init__(self, stream: ControlStream, counters: Counter[str], on_sent: Callable[[], None]) -> None:
        self.num_sending = 0
        self._on_sent = on_sent
        self._stream = stream
        self._counters = counters
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_unanswered(self) -> int:
        """Calls without an answer; callers may still have to take answers that have arrived."""
        return sum(not answered.done() for answered in self._waiting.values())

    async def call(self, method: Method[RequestT, ResponseT], request: RequestT, timeout_s: float) -> ResponseT:
        """See :meth:`manyhands.rpc.Endpoint.call`."""
        loop = asyncio.get_running_loop()
        call_id = next(self._ids)
        frame = Request(call_id, method.name, timeout_s, msgspec.Raw(msgspec.msgpack.encode(request)))
        answered = self._waiting[call_id] = loop.create_future()
        timer = self._deadline(answered, method.name, timeout_s)
        try:
            await self._send(frame, answered)
            answer = await answered
        except asyncio.CancelledError:
            self._send_soon(Cancel(call_id))
            raise
        finally:
            timer.cancel()
            del self._waiting[call_id]
        if isinstance(answer, Timeout):
            self._send_soon(Cancel(call_id))
        if not isinstance(answer, Response):
            raise self._error_of(answer)
        return self._decoded(answer.body, method.response, method.name)

    def answered(self, frame: Response | CallFailure) -> None:
        """Handle the end of a call; ignored if its caller has given up."""
        answered = self._waiting.get(frame.id)
        if answered is not None and not answered.done():
            answered.set_result(frame)

    def end(self, error: PeerLost) -> None:
        """Fail all calls, as the connection is lost."""
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_result(error)

    async def _send(self, frame: Request, answered: asyncio.Future[Answer]) -> None:
        """Send a request within the deadline of the call."""
        encoded = encode_frame(frame)
        if len(encoded) <= SMALL_BYTES:
            self._stream.send_now(encoded)
            return
        sending = asyncio.get_running_loop().create_task(self._stream.send_message(encoded))
        self.num_sending += 1
        try:
            waited: list[asyncio.Future[Any]] = [sending, answered]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not sending.done():
                sending.cancel()
                await asyncio.wait([sending])
            self.num_sending -= 1
            self._on_sent()
        if not sending.cancelled():
            sending.result()

    def _send_soon(self, frame: Cancel) -> None:
        with suppress(PeerLost):  # the connection handles it
            self._stream.send_now(encode_frame(frame))

    def _deadline(self, answered: asyncio.Future[Answer], name: str, timeout_s: float) -> asyncio.TimerHandle:
        def expire() -> None:
            if not answered.done():
                answered.set_result(Timeout(f"waiting for {name} of peer {self._stream.remote}", timeout_s))

        return asyncio.get_running_loop().call_later(timeout_s, expire)

    def _decoded(self, body: msgspec.Raw, kind: type[Body], name: str) -> Body:
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except UNREADABLE as error:
            self._counters["protocol_violations"] += 1
            text = f"the answer of {name} cannot be read: {readable(str(error))}"
            raise ProtocolViolation(self._stream.remote, text) from error

    def _error_of(self, answer: CallFailure | PeerLost | Timeout) -> ManyhandsError:
        if isinstance(answer, Timeout):
            return answer
        if isinstance(answer, PeerLost):
            return PeerLost(answer.peer_id, answer.reason)
        remote = self._stream.remote
        message = readable(answer.message)
        if answer.code in ("timeout", "unavailable"):
            return Unavailable(f"peer {remote}: {message}")
        if answer.code == "internal":
            return PeerError(remote, message)
        return Refused(remote, readable(answer.code), message)
