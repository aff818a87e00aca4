"""The sums that stand for all parameters."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch

from manyhands.averaging.sketch import NUM_VALUES, packed, unpacked
from manyhands.optim.run.drift import ROW, SUMMED_NUMEL, sketch_of


def sums_of(tensors: list[torch.Tensor], step: int) -> list[float]:
    numbers = unpacked(sketch_of(tensors, step).sums)
    assert numbers is not None
    return list(numbers)


def length(values: list[float]) -> float:
    return math.hypot(*values)


def some(*sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for size in sizes]


def as_documented(tensors: list[list[float]], step: int) -> list[float]:
    """By docs/reference/wire.md, number by number."""
    rows = [tensor[first : first + 1024] for tensor in tensors for first in range(0, len(tensor), 1024)]
    drawn = hashlib.shake_256(f"sketch after step {step}".encode()).digest(128 + len(rows) // 8 + 1)
    signs = [1 if drawn[number // 8] >> number % 8 & 1 else -1 for number in range(1024 + len(rows))]
    sums = [0.0] * 16
    for number, row in enumerate(rows):
        for column, value in enumerate(row):
            sums[column % 16] += signs[column] * signs[1024 + number] * value
    return sums


def test_sketch_sums_are_as_documented() -> None:
    tensors = [torch.arange(SUMMED_NUMEL + 2500.0) % 97, torch.tensor([[3.0]]), torch.full((2, 1100), 0.5)]
    for step in (0, 7):
        expected = as_documented([tensor.flatten().tolist() for tensor in tensors], step)
        assert sums_of(tensors, step) == expected, "whole numbers and halves are exact"


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (0, 5, 0), (ROW,), (ROW - 1, ROW + 1), (SUMMED_NUMEL + ROW + 1, 3)])
def test_each_value_is_in_one_sum_with_a_sign(sizes: tuple[int, ...]) -> None:
    tensors = [torch.zeros(size) for size in sizes]
    assert sketch_of(tensors, 1) == (packed([0.0] * NUM_VALUES), 0.0)
    for tensor in tensors:
        for index in {0, tensor.numel() // 2, tensor.numel() - 1} if tensor.numel() else ():
            tensor[index] = 3.0
            assert sketch_of(tensors, 1).size == 3.0
            assert sorted(map(abs, sums_of(tensors, 1))) == [0.0] * (NUM_VALUES - 1) + [3.0]
            tensor[index] = 0.0


def test_sketch_sums_are_as_long_as_the_vector_on_average() -> None:
    tensors = some(5000, 300, 70)
    squares = [length(sums_of(tensors, step)) ** 2 for step in range(200)]
    assert sum(squares) / 200 == pytest.approx(float(torch.cat(tensors).square().sum()), rel=0.1)


def test_the_norm_is_that_of_all_values() -> None:
    tensors = some(SUMMED_NUMEL + 5000, 300, 70)
    norm = float(torch.cat(tensors).double().square().sum().sqrt())
    assert sketch_of(tensors, 1).size == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_values_that_are_not_finite_show_in_the_sketch(value: float) -> None:
    tensors = some(5000)
    tensors[0][77] = value
    sketch = sketch_of(tensors, 1)
    assert unpacked(sketch.sums) is None
    assert not math.isfinite(sketch.size)


def test_a_change_of_one_value_of_many_shows_by_its_size() -> None:
    tensors = some(200_000)
    before = sums_of(tensors, 3)
    tensors[0][123_456] += 100.0
    after = sums_of(tensors, 3)
    assert math.dist(before, after) == pytest.approx(100.0, rel=1e-3)


def test_the_signs_are_others_in_each_step() -> None:
    tensors = some(5000)
    assert sketch_of(tensors, 1) == sketch_of(tensors, 1) != sketch_of(tensors, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_sketches_do_not_depend_on_layout_and_take_any_precision(dtype: torch.dtype) -> None:
    values = torch.randn(40, 50).to(dtype)
    assert sums_of([values.t()], 1) == pytest.approx(sums_of([values.t().contiguous().float()], 1))
    assert sketch_of([values.t()], 1).size == pytest.approx(float(values.double().square().sum().sqrt()), rel=1e-6)
