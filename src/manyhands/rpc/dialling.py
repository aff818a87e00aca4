"""Reaching a peer that has several addresses, and saying what the stream is for."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from manyhands.base.address import Address
from manyhands.base.deadline import time_limit
from manyhands.base.errors import DialFailed, DialReason, PeerLost, ProtocolViolation, Refused, Timeout, Unavailable
from manyhands.rpc.frames import Hello, Reject, Welcome, readable, receive_frame, send_frame
from manyhands.rpc.streams import OpenStreams
from manyhands.runtime.tasks import TaskOwner
from manyhands.transport.api import Stream, Transport

Answer = tuple[Stream, Address]
Dial = asyncio.Task[Answer | DialFailed]


class Dialler:
    """Opens the streams of one endpoint; each of them is among ``streams``."""

    def __init__(self, transport: Transport, streams: OpenStreams) -> None:
        self._transport = transport
        self._streams = streams
        self._tasks = TaskOwner("dialler")
        self._is_closed = False

    def check_open(self) -> None:
        """Raises ``Unavailable`` once :meth:`close` was called."""
        if self._is_closed:
            raise Unavailable("this peer is closed")

    async def close(self) -> None:
        """End the dials that are under way; those who wait for them learn that this peer is closed."""
        self._is_closed = True
        await self._tasks.close()

    async def open(self, addresses: Sequence[Address], hello: Hello, timeout_s: float) -> tuple[Stream, Welcome]:
        """Dial one peer, and say what the stream is for.

        Raises:
            DialFailed: with the reason, if there is one address.
            Unavailable: likewise, if there are several.
            Refused: the peer does not take this stream.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        stream, address = await self._dial_first(addresses, timeout_s)
        try:
            async with time_limit(deadline - loop.time(), f"waiting for the welcome of {address}"):
                await send_frame(stream, hello)
                answer = await receive_frame(stream)
            if isinstance(answer, Reject):
                raise Refused(stream.remote, readable(answer.code), readable(answer.message))
            if not isinstance(answer, Welcome):
                raise ProtocolViolation(stream.remote, f"answered a hello with {type(answer).__name__}")
            self.check_open()
        except BaseException as error:
            self._streams.release(stream)
            if isinstance(error, Timeout):
                raise DialFailed(str(address), DialReason.TIMED_OUT, str(error)) from error
            if isinstance(error, (PeerLost, ProtocolViolation)):
                raise DialFailed(str(address), DialReason.REJECTED, str(error)) from error
            raise
        return stream, answer

    async def _dial_first(self, addresses: Sequence[Address], timeout_s: float) -> Answer:
        """Dial all addresses at once; the first that answers is kept, the others are closed before a word is said."""
        self.check_open()
        dials: list[Dial] = [self._tasks.spawn(self._dial(a, timeout_s), name=f"dial {a}") for a in addresses]
        kept: Answer | None = None
        try:
            first = await _first_answer(dials)
            self.check_open()
            kept = first
        finally:
            for dial in dials:
                dial.cancel()
                dial.add_done_callback(functools.partial(self._drop_unless, kept))
        if kept is not None:
            return kept
        failures = [failure for dial in dials if isinstance(failure := dial.result(), DialFailed)]
        if len(failures) == 1:
            raise failures[0]
        raise Unavailable("no address answers: " + "; ".join(str(failure) for failure in failures))

    async def _dial(self, address: Address, timeout_s: float) -> Answer | DialFailed:
        """A stream, or why there is none: as a value, since those who wanted it may have given up."""
        try:
            stream = await self._transport.dial(address, timeout_s)
        except DialFailed as failure:
            return failure
        self._streams.add(stream)
        return stream, address

    def _drop_unless(self, kept: Answer | None, dial: Dial) -> None:
        answer = _answer_of(dial)
        if answer is not None and answer is not kept:
            self._streams.release(answer[0])


async def _first_answer(dials: Sequence[Dial]) -> Answer | None:
    """What the first dial that works returns; None when none does."""
    waiting = set(dials)
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for dial in dials:
            if dial in done and (answer := _answer_of(dial)) is not None:
                return answer
    return None


def _answer_of(dial: Dial) -> Answer | None:
    if not dial.done() or dial.cancelled() or dial.exception() is not None:
        return None
    outcome = dial.result()
    return None if isinstance(outcome, DialFailed) else outcome
