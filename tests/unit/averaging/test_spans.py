from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from manyhands.averaging.allreduce.partition import (
    LEAST_UNITS,
    Partition,
    balanced_shares,
    chunks_of,
    in_whole_units,
    owned_spans,
    whole_units,
)
from manyhands.averaging.codecs import NONE, plan_of
from manyhands.base.errors import ConfigError
from tests.smaller import smaller
from tests.unit.averaging.groups import group_of

BANDWIDTHS = st.lists(st.one_of(st.just(0), st.integers(1, 10**12)), min_size=1, max_size=12).filter(any)
NUMEL = st.integers(0, 100_000)
MIN_SPAN_NUMEL = st.integers(1, 5000)


def sizes_of(numel: int, bandwidths: list[int], min_span_numel: int = 1, seed: bytes = b"seed") -> list[int]:
    return [span.stop - span.start for span in owned_spans(numel, bandwidths, min_span_numel, seed)]


@given(NUMEL, BANDWIDTHS, MIN_SPAN_NUMEL, st.binary(max_size=16))
@example(1, [1, 1, 1], 1, b"")
@example(0, [1], 1, b"")
@example(10**11, [10**12, 10**12 - 1, 1], 1, b"")
def test_spans_cover_the_vector_without_overlap(
    numel: int, bandwidths: list[int], min_span_numel: int, seed: bytes
) -> None:
    spans = owned_spans(numel, bandwidths, min_span_numel, seed)
    assert len(spans) == len(bandwidths)
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == numel
    assert all(span.start <= span.stop for span in spans)
    assert all(span.start == span.stop for span, b in zip(spans, bandwidths, strict=True) if b == 0)


@given(st.integers(1000, 10**9), st.lists(st.integers(1, 10**12), min_size=1, max_size=12))
def test_each_span_is_its_share_to_within_one_element(numel: int, bandwidths: list[int]) -> None:
    shares = balanced_shares(bandwidths, range(len(bandwidths)), Fraction(1, numel))
    for size, share in zip(sizes_of(numel, bandwidths), shares, strict=True):
        assert abs(size - Fraction(numel * share, sum(shares))) < 1


@given(st.integers(12, 100_000), st.integers(1, 12))
def test_ties_go_to_the_lower_rank(numel: int, num_members: int) -> None:
    sizes = sizes_of(numel, [1] * num_members)
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(NUMEL, BANDWIDTHS, MIN_SPAN_NUMEL, st.binary(max_size=16))
@example(8, [1] * 16, 4096, b"seed")
def test_nobody_reduces_less_than_the_minimum_unless_alone(
    numel: int, bandwidths: list[int], min_span_numel: int, seed: bytes
) -> None:
    sizes = sizes_of(numel, bandwidths, min_span_numel, seed)
    reducing = [size for size in sizes if size > 0]
    assert len(reducing) <= 1 or min(reducing) >= min_span_numel
    num_able = sum(bandwidth > 0 for bandwidth in bandwidths)
    if len(set(bandwidths) - {0}) == 1 and numel:
        assert len(reducing) == max(1, min(num_able, numel // min_span_numel)), "as many as the vector is worth"


def test_the_reducer_of_a_small_vector_changes_from_round_to_round() -> None:
    drawn = [sizes_of(8, [1] * 16, 4096, number.to_bytes(16, "big")).index(8) for number in range(400)]
    assert set(drawn) == set(range(16))
    assert max(drawn.count(rank) for rank in range(16)) < 3 * 400 / 16


def test_a_small_vector_is_reduced_by_any_of_the_faster_half() -> None:
    bandwidths = [90, 1, 100, 10**12, 2, 3]
    drawn = [sizes_of(8, bandwidths, 4096, number.to_bytes(16, "big")).index(8) for number in range(100)]
    assert set(drawn) == {0, 2, 3}


def test_a_large_vector_is_reduced_by_all_that_are_fast_enough() -> None:
    assert sizes_of(11_000, [4, 3, 4], 500) == [5000, 1000, 5000]
    assert sizes_of(11_000, [4, 3, 4], 1001) == [5500, 0, 5500]


@pytest.mark.parametrize("bandwidths", [[], [0, 0], [1, -1]])
def test_bandwidths_that_say_nothing_are_refused(bandwidths: list[int]) -> None:
    with pytest.raises(ConfigError, match="bandwidths"):
        owned_spans(10, bandwidths, 1, b"")


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 300))
def test_chunks_cover_their_span_in_order(start: int, numel: int, chunk_numel: int) -> None:
    chunks = chunks_of(slice(start, start + numel), chunk_numel)
    assert [index for chunk in chunks for index in range(chunk.start, chunk.stop)] == list(range(start, start + numel))
    assert all(0 < chunk.stop - chunk.start <= chunk_numel for chunk in chunks)


@given(NUMEL, BANDWIDTHS, st.integers(1, 300))
def test_spans_of_whole_units_cover_the_vector_and_are_hardly_longer(
    numel: int, bandwidths: list[int], unit: int
) -> None:
    spans = owned_spans(numel, bandwidths, 1, b"seed")
    rounded = in_whole_units(spans, unit, LEAST_UNITS)
    assert [span.start for span in rounded[1:]] == [span.stop for span in rounded[:-1]]
    assert (rounded[0].start, rounded[-1].stop) == (0, numel)
    for before, after in zip(spans, rounded, strict=True):
        size, rounded_size = before.stop - before.start, after.stop - after.start
        assert (size > 0) == (rounded_size > 0)
        assert abs(size - rounded_size) <= size / LEAST_UNITS
    if rounded != spans:
        assert all(span.stop % unit == 0 or span.stop == numel for span in rounded)


@pytest.mark.parametrize(
    ("numel", "unit", "most", "expected"),
    [
        (1000, 216, 2000, 1080),
        (1000, 216, 1000, 864),
        (1000, 216, 100, 1000),
        (1000, 1, 1000, 1000),
        (5, 216, 400, 216),
    ],
)
def test_a_chunk_has_whole_units(numel: int, unit: int, most: int, expected: int) -> None:
    assert whole_units(numel, unit, most) == expected


@pytest.mark.parametrize(
    ("num_members", "num_reducers", "numel", "most"),
    [
        (16, 16, 1 << 22, 1 << 18),
        (128, 16, 1 << 22, 1 << 18),
        (256, 16, 1 << 22, 1 << 17),
        (17, 1, 1 << 22, 246_724),
        (257, 1, 1 << 22, 16_321),
        (257, 1, 100_000, 8160),
    ],
)
def test_one_reducer_of_many_members_holds_little_of_each(
    num_members: int, num_reducers: int, numel: int, most: int
) -> None:
    group = group_of(num_members, clients=range(num_reducers, num_members))
    partition = Partition(group, range(num_members), plan_of([(numel,)], NONE))
    chunks = [chunk for of_one in partition.chunks for chunk in of_one]
    assert max(chunk.stop - chunk.start for chunk in chunks) == most
    assert sum(chunk.stop - chunk.start for chunk in chunks) == numel


@pytest.mark.parametrize("num_members", [2, 3, 4])
@pytest.mark.parametrize("bandwidth", [0, 10**6])
def test_a_blamed_member_has_no_span_unless_the_others_are_gone(num_members: int, bandwidth: int) -> None:
    group = group_of(num_members, bandwidths=[bandwidth] * num_members, not_reducing=[0])
    plan = plan_of([(10_000,)], NONE)
    with smaller(span_numel=1):
        assert Partition(group, range(num_members), plan).reducers == set(range(1, num_members))
        assert Partition(group, [0], plan).reducers == {0}
