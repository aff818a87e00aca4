"""Where tensors lie in memory, and whether they get in each other's way there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two values may have the same address; never said of what slicing and transposing make."""
    if not tensor.numel():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def end_of(tensor: torch.Tensor) -> int:
    """Where the last value ends, in bytes from the begin of the storage; the tensor is not empty."""
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return int(tensor.storage_offset() + reach + 1) * tensor.element_size()


def overlapping(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """The numbers of two dense tensors that share memory, or lie across each other in it; None if there are none."""
    ranges = []
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            base = tensor.untyped_storage().data_ptr()
            begin = base + tensor.storage_offset() * tensor.element_size()
            ranges.append((str(tensor.device), begin, base + end_of(tensor), number))
    ranges.sort()
    for (device, _, end, number), (other_device, begin, _, other) in itertools.pairwise(ranges):
        if device == other_device and begin < end:
            return min(number, other), max(number, other)
    return None
