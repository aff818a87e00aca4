"""A limit on what one peer sends, shared by its bulk streams: each kind of them gets the same."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

from manyhands.transport.api import Stream
from manyhands.transport.passing import PassingStream
from manyhands.transport.piecewise import Piecewise

PIECE_BYTES = 1 << 16
"""Kinds of streams, and the streams of one kind, take turns with pieces of this size."""

BURST_S = 0.05
"""What was not sent in this time is not made up for."""


class UploadCap:
    """Bytes per second over all bulk streams of one endpoint, before encryption; control messages are not held up.

    Of two runs that average at once each gets half, however many streams it has.

    Args:
        mbit_s: megabits per second.
    """

    def __init__(self, mbit_s: float) -> None:
        self._bytes_per_s = mbit_s * 125_000
        self._free_at = 0.0
        self._turn = asyncio.Lock()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def turn_of(self, kind: str) -> asyncio.Lock:
        """Held by one stream of a kind while it waits for that kind's turn."""
        return self._turns.setdefault(kind, asyncio.Lock())

    async def wait_for(self, num_bytes: int, turn: asyncio.Lock) -> None:
        """Wait until ``num_bytes`` more may be sent, and count them; first come, first served, kind by kind."""
        loop = asyncio.get_running_loop()
        async with turn, self._turn:
            if (wait_s := self._free_at - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            self._free_at = max(self._free_at, loop.time() - BURST_S) + num_bytes / self._bytes_per_s


class CappedStream(PassingStream, Piecewise):
    """A bulk stream of some kind that sends no faster than its endpoint may."""

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
            except asyncio.CancelledError:  # nobody could tell where the next message begins
                self._stream.abort()
                raise
