from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from manyhands.averaging.allreduce.partition import SAME, balanced_shares, leveled

BANDWIDTHS = st.lists(st.one_of(st.just(0), st.integers(1, 100), st.integers(1, 10**12)), min_size=1, max_size=12)


def fractions_of(bandwidths: Sequence[int], min_fraction: Fraction = Fraction(0)) -> list[Fraction]:
    able = [rank for rank, bandwidth in enumerate(bandwidths) if bandwidth > 0]
    shares = balanced_shares(bandwidths, able, min_fraction)
    assert all(share >= 0 for share in shares)
    assert all(share == 0 for share, bandwidth in zip(shares, bandwidths, strict=True) if bandwidth == 0)
    return [Fraction(share, sum(shares)) for share in shares]


def slowest(bandwidths: Sequence[int], fractions: Sequence[Fraction]) -> Fraction:
    """The time of the slowest member that is not a client, for a vector of 1."""
    load = len(bandwidths) - 2
    return max((1 + load * w) / b for w, b in zip(fractions, bandwidths, strict=True) if b > 0)


def is_feasible(bandwidths: Sequence[int], seconds: Fraction) -> bool:
    """Whether the whole vector can be reduced with nobody at work for longer than this."""
    load = len(bandwidths) - 2
    able = [bandwidth for bandwidth in bandwidths if bandwidth > 0]
    if any(seconds * bandwidth < 1 for bandwidth in able):
        return False
    return load <= 0 or sum((seconds * bandwidth - 1) / load for bandwidth in able) >= 1


@given(BANDWIDTHS.filter(lambda bandwidths: any(bandwidths) and len(bandwidths) > 1))
@example([1, 1, 1])
@example([10**12, 1, 1])
@example([10**12, 10**12, 1])
@example([10**12 - 1, 10**12, 10**12 + 1, 0])
@example([1, 0, 0, 0, 0, 0])
@example([5, 7])
def test_no_split_makes_the_slowest_member_faster(bandwidths: list[int]) -> None:
    seconds = slowest(bandwidths, fractions_of(bandwidths))
    assert is_feasible(bandwidths, seconds)
    assert not is_feasible(bandwidths, seconds * (1 - Fraction(1, 10**15)))


@given(st.lists(st.integers(0, 9), min_size=3, max_size=4).filter(any))
def test_the_best_of_a_grid_of_all_splits_is_no_better(bandwidths: list[int]) -> None:
    steps = 12
    grid = itertools.product(range(steps + 1), repeat=len(bandwidths) - 1)
    splits = ([*split, steps - sum(split)] for split in grid if sum(split) <= steps)
    best = min(
        slowest(bandwidths, [Fraction(part, steps) for part in split])
        for split in splits
        if not any(part and not bandwidth for part, bandwidth in zip(split, bandwidths, strict=True))
    )
    ours = slowest(bandwidths, fractions_of(bandwidths))
    assert ours <= best
    load = len(bandwidths) - 2
    assert best <= ours + Fraction(load * len(bandwidths), steps * min(b for b in bandwidths if b > 0))


@given(st.lists(st.integers(1, 10**6), min_size=3, max_size=10))
def test_all_reducers_end_at_the_same_time_and_the_other_members_are_slower(bandwidths: list[int]) -> None:
    fractions = fractions_of(bandwidths)
    load = len(bandwidths) - 2
    times = {(1 + load * w) / b for w, b in zip(fractions, bandwidths, strict=True) if w > 0}
    assert len(times) == 1
    assert all(Fraction(1, b) >= max(times) for w, b in zip(fractions, bandwidths, strict=True) if w == 0)


@given(st.integers(1, 40), st.integers(1, 10**12))
def test_equal_members_reduce_equal_parts(num_members: int, bandwidth: int) -> None:
    assert set(fractions_of([bandwidth] * num_members)) == {Fraction(1, num_members)}


@pytest.mark.parametrize(
    ("bandwidths", "expected"),
    [
        ([7], [1]),
        ([1, 1000], [Fraction(1, 2), Fraction(1, 2)]),
        ([0, 3], [0, 1]),
        ([1, 1000, 1000], [0, Fraction(1, 2), Fraction(1, 2)]),
        ([2, 1, 1], [1, 0, 0]),  # the others send their own values for as long as it takes the first
        ([4, 4, 3], [Fraction(5, 11), Fraction(5, 11), Fraction(1, 11)]),
        ([3, 3, 0], [Fraction(1, 2), Fraction(1, 2), 0]),
    ],
)
def test_shares_of_example_bandwidths_are_the_best(bandwidths: list[int], expected: list[Fraction]) -> None:
    assert fractions_of(bandwidths) == expected


@given(BANDWIDTHS.filter(any), st.fractions(0, 1))
def test_nobody_reduces_less_than_the_minimum_unless_alone(bandwidths: list[int], min_fraction: Fraction) -> None:
    fractions = fractions_of(bandwidths, min_fraction)
    reducing = [fraction for fraction in fractions if fraction > 0]
    assert reducing
    assert len(reducing) == 1 or min(reducing) >= min_fraction
    unbound = sum(fraction > 0 for fraction in fractions_of(bandwidths))
    assert len(reducing) <= unbound


def test_a_minimum_that_nobody_falls_below_changes_nothing() -> None:
    bandwidths = [40, 30, 50, 35]
    fractions = fractions_of(bandwidths)
    assert fractions_of(bandwidths, min(fractions)) == fractions
    assert fractions_of(bandwidths, min(fractions) + Fraction(1, 10**9))[1] == 0, "the slowest leaves its part"


@pytest.mark.parametrize(
    ("bandwidths", "expected"),
    [
        ([], []),
        ([0, 0], [0, 0]),
        ([100, 125], [112, 112]),
        ([100, 126], [100, 126]),
        ([126, 0, 100, 112], [126, 0, 106, 106]),
        ([40, 200, 190, 210, 50], [45, 200, 200, 200, 45]),
    ],
)
def test_bandwidths_that_hardly_differ_are_the_same(bandwidths: list[int], expected: list[int]) -> None:
    assert leveled(bandwidths) == expected


@given(BANDWIDTHS)
def test_levels_keep_the_order_and_change_nothing_by_much(bandwidths: list[int]) -> None:
    levels = leveled(bandwidths)
    for (before, level), (other, other_level) in itertools.product(zip(bandwidths, levels, strict=True), repeat=2):
        assert level <= other_level or before > other
        assert (level == 0) == (before == 0)
        assert before <= level * (1 + SAME) + 1
        assert level <= before * (1 + SAME)


@given(BANDWIDTHS.filter(any))
def test_leveling_makes_the_slowest_member_slower_by_no_more_than_bandwidths_differ(bandwidths: list[int]) -> None:
    best = slowest(bandwidths, fractions_of(bandwidths))
    assert slowest(bandwidths, fractions_of(leveled(bandwidths))) <= best * (1 + SAME) ** 2
