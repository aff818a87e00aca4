from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from manyhands.averaging.codecs import (
    CODECS,
    INT8,
    NONE,
    BadEncoding,
    Plan,
    Segment,
    plan_of,
)
from manyhands.base.errors import ConfigError

SHAPES = [(100, 64), (100,), (100, 50), (50,), (5000,), (64, 64), (3, 3), (), (0, 7), (200, 200)]


def parts_of(plan: Plan) -> list[tuple[int, int, str]]:
    return [(segment.start, segment.stop, segment.codec.name) for segment in plan.segments]


def test_small_and_one_dimensional_tensors_stay_exact() -> None:
    assert parts_of(plan_of(SHAPES, INT8)) == [
        (0, 6400, "int8"),
        (6400, 6500, "none"),
        (6500, 11_500, "int8"),
        (11_500, 16_550, "none"),
        (16_550, 20_646, "int8"),
        (20_646, 20_656, "none"),
        (20_656, 60_656, "int8"),
    ]


def test_float64_values_travel_exactly_and_float16_ones_are_refused() -> None:
    assert parts_of(plan_of(SHAPES, NONE)) == [(0, 60_656, "none")]
    assert parts_of(plan_of(SHAPES, INT8, dtype=torch.float64)) == [(0, 60_656, "none_float64")]
    assert parts_of(plan_of([], INT8)) == []
    assert plan_of([(7, 0)], INT8).num_bytes(0, 0) == 0
    with pytest.raises(ConfigError, match=r"not in torch\.float16"):
        plan_of(SHAPES, INT8, dtype=torch.float16)


CODEC = st.sampled_from(list(CODECS.values()))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    segments = []
    start = 0
    for size, codec in draw(st.lists(st.tuples(st.integers(0, 700), CODEC), max_size=6)):
        segments.append(Segment(start, start + size, codec))
        start += size
    return Plan(segments)


@given(plan=plans(), ends=st.tuples(st.floats(0, 1), st.floats(0, 1)))
@example(plan=Plan([]), ends=(0.0, 1.0))
@example(plan=Plan([Segment(0, 5, INT8), Segment(5, 6, NONE)]), ends=(0.0, 1.0))
def test_any_slice_is_each_part_in_its_codec(plan: Plan, ends: tuple[float, float]) -> None:
    start, stop = sorted(round(end * plan.numel) for end in ends)
    values = torch.linspace(-1, 2, plan.numel)[start:stop]
    out = torch.empty(plan.num_bytes(start, stop), dtype=torch.uint8)
    plan.encode(values, start, out)
    decoded = torch.full_like(values, math.nan)
    plan.decode(out, start, decoded)
    parts = plan.cut(start, stop)
    assert [part.start for part in parts] == [start, *(part.stop for part in parts[:-1])][: len(parts)]
    assert (parts[-1].stop if parts else start) == stop
    assert all(before.codec is not after.codec for before, after in itertools.pairwise(parts))
    for part in parts:
        part_values = values[part.start - start : part.stop - start]
        alone = torch.empty(part.codec.num_bytes(part_values.numel()), dtype=torch.uint8)
        part.codec.encode(part_values, alone)
        expected = torch.empty_like(part_values)
        part.codec.decode(alone, expected)
        assert torch.equal(decoded[part.start - start : part.stop - start], expected)
    assert plan.is_exact(start, stop) == all(part.codec is NONE for part in parts)
    if plan.is_exact(start, stop):
        assert torch.equal(out, values.view(torch.uint8))


def test_a_plan_refuses_bytes_of_a_wrong_length() -> None:
    plan = plan_of([(100, 100), (10,)], INT8)
    size = plan.num_bytes(9_000, 10_010)
    assert size == 1000 + 5 * 8 + 10 * 4
    with pytest.raises(BadEncoding, match="take 1080 bytes, but there are 1079"):
        plan.decode(torch.zeros(size - 1, dtype=torch.uint8), 9_000, torch.empty(1010))
