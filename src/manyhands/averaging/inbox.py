"""What one sender has sent to a reducer, until it is averaged."""

from __future__ import annotations

from collections import deque

import torch

QUEUED_CHUNKS = 3
"""Chunks of one sender in memory: one that comes in, one that is reduced, and one between them."""


class Inbox:
    """The chunks of one sender on their way to the reducer, in memory that is used again and again.

    One thread puts, another may take.

    Args:
        rooms: uint8, shape [``QUEUED_CHUNKS``, bytes of the largest chunk].

    Attributes:
        num_received: chunks that have come in.
        is_ended: whether nothing comes after those.
    """

    def __init__(self, rooms: torch.Tensor) -> None:
        self.num_received = 0
        self.is_ended = False
        self._free = list(rooms)
        self._lent: deque[torch.Tensor] = deque()
        self._full: deque[torch.Tensor] = deque()

    @property
    def has_room(self) -> bool:
        """Whether the sender is not too far ahead."""
        return bool(self._free)

    def room(self, num_bytes: int) -> torch.Tensor:
        """Memory for the next chunk, uint8, shape [num_bytes]; call it when there is room."""
        self._lent.append(self._free.pop())  # what was used last is in the processor's cache
        return self._lent[-1][:num_bytes]

    def put(self, encoded: torch.Tensor) -> None:
        """A chunk has come in."""
        self._full.append(encoded)
        self.num_received += 1

    @property
    def is_ready(self) -> bool:
        """Whether it is known what the next chunk is: it has come, or never will."""
        return bool(self._full) or self.is_ended

    def take(self) -> torch.Tensor | None:
        """The next chunk, when it is ready; None if it never comes."""
        return self._full.popleft() if self._full else None

    def give_back(self) -> None:
        """The chunk that was taken last is not needed any more."""
        self._free.append(self._lent.popleft())
