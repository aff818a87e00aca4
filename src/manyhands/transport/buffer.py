"""Received bytes that were not read yet, and the one reader that waits for more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from manyhands.base.errors import PeerLost

SCRATCH_BYTES = 16 * 1024
"""Most bytes that are received in one call while no reader waits."""


class ReceiveBuffer:
    """Receives directly into the memory of a waiting reader, else into a bounded backlog.

    Args:
        limit_bytes: size of the backlog from which :attr:`is_full` asks the sender to pause.
        on_room: called when a full backlog was read below the limit.
    """

    def __init__(self, limit_bytes: int, on_room: Callable[[], None]) -> None:
        self._limit_bytes = limit_bytes
        self._on_room = on_room
        self._backlog = bytearray()
        self._scratch = bytearray()  # only while it is written: hundreds of idle streams would each keep one
        self._target: memoryview | None = None
        self._filled: asyncio.Future[None] | None = None
        self._error: PeerLost | None = None

    @property
    def is_full(self) -> bool:
        return len(self._backlog) >= self._limit_bytes

    @property
    def num_waiting(self) -> int:
        """Bytes in the backlog."""
        return len(self._backlog)

    def get_buffer(self) -> memoryview:
        """Return memory to receive into; call :meth:`updated` with the number of bytes written."""
        if self._target is not None:
            return self._target
        self._scratch = bytearray(SCRATCH_BYTES)
        return memoryview(self._scratch)

    def updated(self, num_bytes: int) -> None:
        """Note that the first ``num_bytes`` of the last :meth:`get_buffer` were written."""
        if self._target is None:
            self._backlog += memoryview(self._scratch)[:num_bytes]
            self._scratch = bytearray()
            if self._filled is not None and not self._filled.done():  # a reader waits in take()
                self._filled.set_result(None)
            return
        self._target = self._target[num_bytes:]
        if len(self._target) == 0:
            self._target = None
            if self._filled is not None and not self._filled.done():
                self._filled.set_result(None)

    def feed(self, data: memoryview) -> None:
        """Add a copy of ``data``."""
        while len(data):
            room = self.get_buffer()
            num_bytes = min(len(room), len(data))
            room[:num_bytes] = data[:num_bytes]
            self.updated(num_bytes)
            data = data[num_bytes:]

    def end(self, error: PeerLost) -> None:
        """Note that no more bytes will arrive; the backlog can still be read."""
        if self._error is None:
            self._error = error
            if self._filled is not None and not self._filled.done():
                self._filled.set_exception(error)

    async def take(self) -> bytes:
        """Return the whole backlog; waits until it is not empty. Cancelling it loses nothing."""
        self._check_alone()
        if not self._backlog:
            if self._error is not None:
                raise PeerLost(self._error.peer_id, self._error.reason)
            self._filled = asyncio.get_running_loop().create_future()
            try:
                await self._filled
            finally:
                self._filled = None
        was_full = self.is_full
        taken = bytes(self._backlog)
        self._backlog.clear()
        if was_full:
            self._on_room()
        return taken

    async def fill(self, view: memoryview) -> None:
        """Wait until ``view`` is full.

        Cancelling it leaves the stream in the middle of a message; the caller must then drop the stream.
        """
        view = self.take_into(view)
        if len(view) == 0:
            return
        if self._error is not None:
            raise PeerLost(self._error.peer_id, self._error.reason)
        self._target = view
        self._filled = asyncio.get_running_loop().create_future()
        try:
            await self._filled
        finally:
            self._filled = None
            self._target = None

    def _check_alone(self) -> None:
        if self._filled is not None:
            raise RuntimeError("two tasks receive from one stream")

    def take_into(self, view: memoryview) -> memoryview:
        """Fill ``view`` from the backlog without waiting; return the unfilled rest."""
        self._check_alone()
        was_full = self.is_full
        num_bytes = min(len(self._backlog), len(view))
        with memoryview(self._backlog) as backlog:
            view[:num_bytes] = backlog[:num_bytes]
        del self._backlog[:num_bytes]
        if was_full and not self.is_full:
            self._on_room()
        return view[num_bytes:]
