"""Memory for large vectors that are made anew in each round.

The system gives new memory page by page as it is first written. With pages of 4 KiB that cost more than half a second
for each GB here, as much as sending it; with huge pages a sixth (docs/dev/log.md).
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

HUGE_PAGE_BYTES = 2 << 20


def empty_vector(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of shape [numel] on the CPU with any values, on huge pages where the system has them."""
    num_bytes = numel * dtype.itemsize
    if num_bytes < 2 * HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(numel, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=-address % HUGE_PAGE_BYTES)
