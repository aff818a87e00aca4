"""Memory for large vectors."""

from __future__ import annotations

import mmap
from weakref import WeakSet

import pytest
import torch

from manyhands.averaging.memory import HUGE_PAGE_BYTES, Memory, empty_vector, whole_lines


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


NUMEL = 1 << 21


def test_memory_is_used_again_when_nobody_holds_a_part_of_it() -> None:
    memory = Memory()
    first = memory.vector(NUMEL, torch.float32).fill_(1)
    address, part = first.data_ptr(), first.view(torch.uint8)[-8:]
    del first
    second = memory.vector(NUMEL, torch.float32).fill_(2)
    assert second.data_ptr() != address
    assert part.view(torch.float32).tolist() == [1, 1], "somebody may still read it"
    del part
    assert memory.vector(NUMEL - 1000, torch.float32).data_ptr() == address
    assert second.sum() == 2 * NUMEL


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("numel", [0, 1, 1000, 5_000_001])
def test_memory_of_any_size_can_be_written(numel: int, dtype: torch.dtype) -> None:
    memory = Memory()
    for _ in range(3):
        vector = memory.vector(numel, dtype).fill_(3)
        assert (vector.shape, vector.dtype, vector.is_contiguous()) == ((numel,), dtype, True)
        assert vector.sum(dtype=torch.float64) == 3 * numel


def test_memory_that_fits_nobody_any_more_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    maps: WeakSet[mmap.mmap] = WeakSet()

    class NotedMap(mmap.mmap):
        def __new__(cls, *arguments: int, **options: int) -> NotedMap:
            maps.add(made := super().__new__(cls, *arguments, **options))
            return made

    monkeypatch.setattr(mmap, "mmap", NotedMap)
    memory = Memory()
    del_me = [memory.vector(NUMEL, torch.float32) for _ in range(3)]
    del_me.clear()
    assert len(maps) == 3
    larger = memory.vector(4 * NUMEL, torch.float32)
    (of_larger,) = map(len, maps)
    assert of_larger > 4 * NUMEL
    del larger
    assert list(map(len, maps)) == [of_larger]
    memory.vector(NUMEL, torch.float32)
    (of_smaller,) = map(len, maps)
    assert of_smaller < of_larger, "a vector that is far too small for it does not get it"


def test_sizes_are_rounded_up_to_whole_cache_lines() -> None:
    assert list(map(whole_lines, [0, 1, 64, 65])) == [0, 64, 64, 128]
