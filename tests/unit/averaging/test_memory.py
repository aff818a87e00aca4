"""Memory for large vectors."""

from __future__ import annotations

import mmap

import pytest
import torch

from manyhands.averaging.memory import HUGE_PAGE_BYTES, empty_vector


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("numel", [0, 1, 1000, 5_000_001])
def test_a_vector_of_any_size_can_be_written(numel: int, dtype: torch.dtype) -> None:
    vector = empty_vector(numel, dtype).fill_(3)
    assert (vector.shape, vector.dtype, vector.is_contiguous()) == ((numel,), dtype, True)
    assert vector.sum(dtype=torch.float64) == 3 * numel


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no huge pages")
def test_large_vectors_begin_with_a_huge_page() -> None:
    assert empty_vector(1 << 24, torch.float32).data_ptr() % HUGE_PAGE_BYTES == 0


def test_a_view_keeps_the_memory() -> None:
    part = empty_vector(1 << 22, torch.float32).fill_(1)[-1000:].view(torch.uint8)
    others = [empty_vector(1 << 22, torch.float32).fill_(2) for _ in range(3)]
    assert part.view(torch.float32).sum() == 1000
    del others
