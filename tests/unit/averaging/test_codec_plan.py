from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from manyhands.averaging.codecs import (
    CODECS,
    FP16,
    INT4,
    INT8,
    NONE,
    BadEncoding,
    Codec,
    ErrorFeedback,
    NotFinite,
    Plan,
    Segment,
    plan_of,
)
from manyhands.base.errors import ConfigError
from tests.unit.averaging.groups import plan_in

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


# error feedback


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A vector this small is not worth waiting for a second one, on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def vector(numel: int) -> torch.Tensor:
    """Values of several magnitudes; most are too small for a 4-bit step."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(numel, generator=generator) ** 3


def send(feedback: ErrorFeedback, plan: Plan, values: torch.Tensor, start: int = 0) -> torch.Tensor:
    out = torch.empty(plan.num_bytes(start, start + values.numel()), dtype=torch.uint8)
    returned = feedback.encode(values, start, out)
    decoded = torch.empty_like(values)
    plan.decode(out, start, decoded)
    assert torch.equal(returned, decoded)
    return decoded


@pytest.mark.parametrize("codec", [FP16, INT8, INT4], ids=lambda codec: codec.name)
def test_a_thousand_rounds_are_unbiased_with_feedback(codec: Codec) -> None:
    rounds = 1000
    plan = plan_in(codec, 1080)
    feedback = ErrorFeedback(plan)
    gradient = vector(plan.numel)
    out = torch.empty(plan.num_bytes(0, plan.numel), dtype=torch.uint8)
    plan.encode(gradient, 0, out)
    plain = torch.empty_like(gradient)
    plan.decode(out, 0, plain)
    total = torch.zeros(plan.numel, dtype=torch.float64)
    for _ in range(rounds):
        total += feedback.encode(gradient, 0, out)
        feedback.commit()
    without = (plain - gradient).abs().max().item()
    remaining = (total / rounds - gradient).abs().max().item()
    assert without > 0
    # without feedback the mean is as far off as one round; with it, what is left is the last residual by the rounds
    assert remaining < max(without * 4 / rounds, 2e-7)


def test_an_aborted_round_changes_nothing() -> None:
    plan = plan_in(INT4, 1000)
    feedback, undisturbed = ErrorFeedback(plan), ErrorFeedback(plan)
    for seed in range(5):
        values = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
        send(feedback, plan, values * 100)
        feedback.abort()
        assert torch.equal(send(feedback, plan, values), send(undisturbed, plan, values))
        feedback.commit()
        undisturbed.commit()


def test_a_slice_that_was_not_sent_keeps_its_residual() -> None:
    plan = plan_in(INT4, 1000)
    feedback = ErrorFeedback(plan)
    values = vector(1000)
    send(feedback, plan, values)
    feedback.commit()
    second = torch.cat([send(feedback, plan, values[:320]), send(feedback, plan, values[640:], 640)])
    feedback.commit()
    middle = send(feedback, plan, values[320:640], 320)
    expected = ErrorFeedback(plan)
    send(expected, plan, values)
    expected.commit()
    both = send(expected, plan, values)
    assert torch.equal(torch.cat([second[:320], middle, second[320:]]), both)


def test_error_feedback_counts_by_the_share_of_the_vector_in_its_round() -> None:
    """Over many rounds of any shares the sum of share times decoded is that of share times values."""
    plan = plan_in(INT4, 1000)
    feedback = ErrorFeedback(plan)
    generator = torch.Generator().manual_seed(1)
    error, largest = torch.zeros(1000, dtype=torch.float64), 0.0
    for share in [0.5, 0.01, 0.9, 0.2, 0.03] * 20:
        feedback.share = share
        values = torch.randn(1000, generator=generator)
        error += share * (send(feedback, plan, values).double() - values)
        largest = max(largest, share)
        feedback.commit()
    assert error.abs().max().item() < 1.0 * largest, "not more than one round loses"
    without = torch.zeros(1000, dtype=torch.float64)
    generator.manual_seed(1)
    for share in [0.5, 0.01, 0.9, 0.2, 0.03] * 20:
        values = torch.randn(1000, generator=generator)
        without += share * (send(ErrorFeedback(plan), plan, values).double() - values)
    assert without.norm() > 5 * error.norm()


def test_a_tiny_share_does_not_blow_up_the_residual() -> None:
    plan = plan_in(INT4, 1000)
    feedback = ErrorFeedback(plan)
    send(feedback, plan, vector(1000))
    feedback.commit()
    feedback.share = 1e-38
    assert send(feedback, plan, vector(1000)).abs().max().item() < 2048 * vector(1000).abs().max().item()
    feedback.commit()
    feedback.share = 1.0
    assert (send(feedback, plan, vector(1000)) - vector(1000)).abs().max() < vector(1000).abs().max()


def test_bad_values_leave_the_residual_as_it_was() -> None:
    plan = plan_in(INT4, 1000)
    feedback, undisturbed = ErrorFeedback(plan), ErrorFeedback(plan)
    with pytest.raises(NotFinite):
        send(feedback, plan, vector(1000).log())
    feedback.commit()
    assert torch.equal(send(feedback, plan, vector(1000)), send(undisturbed, plan, vector(1000)))
