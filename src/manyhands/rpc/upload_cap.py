"""A limit of the bytes per second over several streams, which is shared equally by groups of them."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

from manyhands.transport.api import Stream
from manyhands.transport.passing import PassingStream
from manyhands.transport.piecewise import Piecewise

PIECE_BYTES = 1 << 16
"""Groups of streams, and the streams of one group, take turns with pieces of this size."""

BURST_S = 0.05
"""Seconds for which unused capacity is kept: a burst after a pause is no longer than this."""


class UploadCap:
    """Limits the bytes per second of some streams together: those that an endpoint sends, or those that it relays.

    Groups of streams take turns, and so get equal parts, however many streams each has. The groups are kinds of bulk
    streams, so each of two concurrent runs gets half, and for a relay the IP addresses of the callers.

    Args:
        mbit_s: megabits per second.
    """

    def __init__(self, mbit_s: float) -> None:
        self._bytes_per_s = mbit_s * 125_000
        self._free_at = 0.0
        self._turn = asyncio.Lock()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def turn_of(self, group: str) -> asyncio.Lock:
        """Return the lock that the streams of a group hold while they wait for its turn."""
        return self._turns.setdefault(group, asyncio.Lock())

    async def wait_for(self, num_bytes: int, turn: asyncio.Lock) -> None:
        """Wait until ``num_bytes`` more may be sent, and count them; groups take turns, each in FIFO order."""
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
