"""Memory for large vectors that each round needs.

The system gives new memory page by page as it is first written. With pages of 4 KiB that cost more than half a second
for each GB here, as much as sending it; with huge pages a sixth (docs/dev/log.md).
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
"""Of the processor's caches; numbers of any dtype may lie at a multiple of it."""


def empty_vector(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of shape [numel] on the CPU with any values, on huge pages where the system has them."""
    num_bytes = numel * dtype.itemsize
    if num_bytes < 2 * HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(numel, dtype=dtype)
    return _begin_of(np.frombuffer(_huge_pages(num_bytes), dtype=np.uint8), num_bytes).view(dtype)


class Memory:
    """Gives vectors in memory that earlier ones do not need any more.

    A vector's memory comes back when the last tensor that lies in it is gone, so nobody who still holds a part of it
    ever sees something else there.
    """

    def __init__(self) -> None:
        self._idle: deque[mmap.mmap] = deque()

    def vector(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """As :func:`empty_vector`; any thread may call it."""
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
        """Give the system back what no vector needs now; any thread may call it."""
        self._idle.clear()

    def _take(self, num_bytes: int) -> mmap.mmap | None:
        """Idle memory with room for so many bytes, and not for many more."""
        for memory in list(self._idle):
            if num_bytes <= len(memory) - HUGE_PAGE_BYTES <= 2 * num_bytes:
                with suppress(ValueError):  # another thread was faster
                    self._idle.remove(memory)
                    return memory
        return None


def whole_lines(num_bytes: int) -> int:
    """The next multiple of a cache line."""
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


def _huge_pages(num_bytes: int) -> mmap.mmap:
    """Memory in which a huge page begins early enough for so many bytes after it."""
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, **flags)
    with suppress(OSError, AttributeError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _begin_of(memory: npt.NDArray[np.uint8], num_bytes: int) -> torch.Tensor:
    """The first bytes that begin with a huge page."""
    offset = -memory.ctypes.data % HUGE_PAGE_BYTES
    return torch.from_numpy(memory[offset : offset + num_bytes])
