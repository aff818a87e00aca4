"""What one sender has sent to a reducer, until it is averaged."""

from __future__ import annotations

import asyncio
from collections import deque

import torch

QUEUED_CHUNKS = 3
"""Chunks of one sender in memory: one that comes in, one that is reduced, and one between them."""


class Inbox:
    """The chunks of one sender on their way to the reducer, in memory that is used again and again.

    Args:
        chunk_bytes: of the largest chunk.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._free: asyncio.Queue[torch.Tensor] = asyncio.Queue()
        self._full: asyncio.Queue[torch.Tensor] = asyncio.Queue()
        self._lent: deque[torch.Tensor] = deque()
        self._num_made = 0

    async def room(self, num_bytes: int) -> torch.Tensor:
        """Memory for a chunk, uint8, shape [num_bytes]; waits while the sender is too far ahead."""
        if self._free.empty() and self._num_made < QUEUED_CHUNKS:
            self._num_made += 1
            buffer = torch.empty(self._chunk_bytes, dtype=torch.uint8)
        else:
            buffer = await self._free.get()
        self._lent.append(buffer)
        return buffer[:num_bytes]

    def put(self, encoded: torch.Tensor) -> None:
        """A chunk has come in."""
        self._full.put_nowait(encoded)

    async def take(self) -> torch.Tensor:
        """The next chunk."""
        return await self._full.get()

    def give_back(self) -> None:
        """The chunk that was taken last is not needed any more."""
        self._free.put_nowait(self._lent.popleft())
