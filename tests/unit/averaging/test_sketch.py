"""How far apart peers say that they are."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.averaging.sketch import MAX_SKETCH_BYTES, NUM_VALUES, disagreement_of, packed, sketched_indices


def test_disagreement_is_the_rms_distance_as_a_fraction_of_the_mean() -> None:
    assert disagreement_of([packed([3.0, 4.0])] * 3) == 0.0
    assert disagreement_of([packed([9.0]), packed([11.0])]) == pytest.approx(0.1)
    assert disagreement_of([packed([2.0, 5.0]), packed([4.0, 3.0])]) == pytest.approx(math.sqrt(2) / 5)


@pytest.mark.parametrize("sketches", [[], [b""], [b"abc", b"abc"], [packed([1.0])], [packed([1.0]), packed([-1.0])]])
def test_no_disagreement_is_told_for_too_few_or_malformed_sketches(sketches: list[bytes]) -> None:
    assert disagreement_of(sketches) is None


def test_sketches_that_are_malformed_or_not_finite_are_left_out() -> None:
    fine = [packed([9.0]), packed([11.0])]
    for strange in (packed([math.nan]), packed([1e300]), packed([1.0, 1.0]), b"", b"x"):
        assert disagreement_of([*fine, strange]) == pytest.approx(0.1)


@given(st.lists(st.binary(max_size=MAX_SKETCH_BYTES), max_size=5))
def test_arbitrary_sketches_give_a_disagreement_or_none(sketches: list[bytes]) -> None:
    told = disagreement_of(sketches)
    assert told is None or told >= 0


@given(st.integers(1, 10**9), st.integers(0, 2**48))
def test_all_peers_sketch_the_same_values(numel: int, number: int) -> None:
    indices = sketched_indices(numel, number)
    assert indices == sketched_indices(numel, number)
    assert len(indices) == NUM_VALUES
    assert all(0 <= index < numel for index in indices)
    assert sketched_indices(0, number) == []
