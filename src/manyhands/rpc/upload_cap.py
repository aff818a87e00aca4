"""An upload limit for one peer, shared equally by the kinds of its bulk streams."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

from manyhands.transport.api import Stream
from manyhands.transport.passing import PassingStream
from manyhands.transport.piecewise import Piecewise

PIECE_BYTES = 1 << 16
"""Kinds of streams, and the streams of one kind, take turns with pieces of this size."""

BURST_S = 0.05
"""Seconds for which unused capacity is kept: a burst after a pause is no longer than this."""


class UploadCap:
    """Limits the bytes per second over all bulk streams of one endpoint, before encryption.

    Control messages are not limited. Each of two concurrent runs gets half, however many streams it has.

    Args:
        mbit_s: megabits per second.
    """

    def __init__(self, mbit_s: float) -> None:
        self._bytes_per_s = mbit_s * 125_000
        self._free_at = 0.0
        self._turn = asyncio.Lock()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def turn_of(self, kind: str) -> asyncio.Lock:
        """Return the lock that streams of a kind hold while they wait for that kind's turn."""
        return self._turns.setdefault(kind, asyncio.Lock())

    async def wait_for(self, num_bytes: int, turn: asyncio.Lock) -> None:
        """Wait until ``num_bytes`` more may be sent, and count them; kinds take turns, each in FIFO order."""
        loop = asyncio.get_running_loop()
        async with turn, self._turn:
            if (wait_s := self._free_at - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            self._free_at = max(self._free_at, loop.time() - BURST_S) + num_bytes / self._bytes_per_s


class CappedStream(PassingStream, Piecewise):
    """A bulk stream limited by the upload cap of its endpoint."""

    def __init__(self, stream: Stream, cap: UploadCap, kind: str) -> None:
        super().__init__(stream)
        self._cap = cap
        self._turn = cap.turn_of(kind)
        self._sending = asyncio.Lock()

    send_each = Piecewise.send_each  # piece by piece through the cap

    async def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        async with self._sending:
            try:
                for buffer in buffers:
                    view = memoryview(buffer).cast("B")
                    for start in range(0, len(view), PIECE_BYTES):
                        piece = view[start : start + PIECE_BYTES]
                        await self._cap.wait_for(len(piece), self._turn)
                        await self._stream.send(piece)
            except asyncio.CancelledError:  # the receiver could not find the start of the next message
                self._stream.abort()
                raise
