"""Reusable memory for large vectors, on huge pages.

To map new small pages for a vector takes as long as sending the vector (docs/dev/log.md).
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

HUGE_PAGE_BYTES = 2 << 20

LINE_BYTES = 64
"""Bytes of a line in the processor's caches; numbers of any dtype are aligned at a multiple of it."""


def empty_vector(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor of shape [numel], on huge pages where the system has them."""
    num_bytes = numel * dtype.itemsize
    if num_bytes < 2 * HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(numel, dtype=dtype)
    return _begin_of(np.frombuffer(_huge_pages(num_bytes), dtype=np.uint8), num_bytes).view(dtype)


class Memory:
    """Allocates vectors in memory that earlier ones have released, once the last tensor in it is gone."""

    def __init__(self) -> None:
        self._idle: deque[mmap.mmap] = deque()

    def vector(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Like :func:`empty_vector`; any thread may call it."""
        num_bytes = numel * dtype.itemsize
        if num_bytes < HUGE_PAGE_BYTES:
            return torch.empty(numel, dtype=dtype)
        memory = self._take(num_bytes)
        if memory is None:
            self._idle.clear()  # the vectors have another size now
            memory = _huge_pages(-(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
        whole = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(whole, self._idle.append, memory).atexit = False
        return _begin_of(whole, num_bytes).view(dtype)

    def free_idle(self) -> None:
        """Free the memory that no vector uses; any thread may call it."""
        self._idle.clear()

    def _take(self, num_bytes: int) -> mmap.mmap | None:
        """Idle memory of at least this size, but at most about twice as much; None if there is none."""
        for memory in list(self._idle):
            if num_bytes <= len(memory) - HUGE_PAGE_BYTES <= 2 * num_bytes:
                with suppress(ValueError):  # another thread was faster
                    self._idle.remove(memory)
                    return memory
        return None


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, for sending from it or receiving into it."""
    return tensor.numpy().data.cast("B")


def whole_lines(num_bytes: int) -> int:
    """Round up to a multiple of a cache line."""
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


def _huge_pages(num_bytes: int) -> mmap.mmap:
    """Memory that contains a huge page boundary with this many bytes after it."""
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, **flags)
    with suppress(OSError, AttributeError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _begin_of(memory: npt.NDArray[np.uint8], num_bytes: int) -> torch.Tensor:
    """The first ``num_bytes`` bytes after a huge page boundary."""
    offset = -memory.ctypes.data % HUGE_PAGE_BYTES
    return torch.from_numpy(memory[offset : offset + num_bytes])
