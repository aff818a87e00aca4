from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from manyhands.averaging.spans import chunks_of, owned_spans, reducer_shares
from manyhands.base.errors import ConfigError

SHARES = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=12).filter(any)
NUMEL = st.integers(0, 100_000)


@given(NUMEL, SHARES)
@example(1, [1.0, 1.0, 1.0])
@example(0, [1.0])
def test_spans_cover_the_vector_without_overlap(numel: int, shares: list[float]) -> None:
    spans = owned_spans(numel, shares)
    assert len(spans) == len(shares)
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == numel
    assert all(span.start <= span.stop for span in spans)


@given(NUMEL, SHARES)
def test_each_span_is_its_share_to_within_one_element(numel: int, shares: list[float]) -> None:
    for span, share in zip(owned_spans(numel, shares), shares, strict=True):
        exact = numel * share / math.fsum(shares)
        assert abs((span.stop - span.start) - exact) < 1 + 1e-6 * numel
        if share == 0:
            assert span.start == span.stop, "who has no bandwidth owns nothing"


@given(NUMEL, st.integers(1, 12))
def test_ties_go_to_the_lower_rank(numel: int, num_members: int) -> None:
    sizes = [span.stop - span.start for span in owned_spans(numel, [1.0] * num_members)]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("shares", [[], [0.0, 0.0], [1.0, -1.0], [math.nan, 1.0], [math.inf]])
def test_shares_that_say_nothing_are_refused(shares: list[float]) -> None:
    with pytest.raises(ConfigError, match="shares"):
        owned_spans(10, shares)


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 300))
def test_chunks_cover_their_span_in_order(start: int, numel: int, chunk_numel: int) -> None:
    chunks = chunks_of(slice(start, start + numel), chunk_numel)
    assert [index for chunk in chunks for index in range(chunk.start, chunk.stop)] == list(range(start, start + numel))
    assert all(0 < chunk.stop - chunk.start <= chunk_numel for chunk in chunks)


@given(NUMEL, SHARES, st.integers(1, 5000), st.binary(max_size=16))
@example(8, [1.0] * 16, 4096, b"seed")
def test_nobody_reduces_less_than_the_minimum_unless_alone(
    numel: int, shares: list[float], min_span_numel: int, seed: bytes
) -> None:
    chosen = reducer_shares(numel, shares, min_span_numel, seed)
    num_able, num_chosen = sum(share > 0 for share in shares), sum(share > 0 for share in chosen)
    assert num_chosen == max(1, min(num_able, numel // min_span_numel))
    assert all(share in (0.0, before) for share, before in zip(chosen, shares, strict=True))
    if len(set(shares) - {0.0}) == 1 and num_chosen > 1:
        sizes = [span.stop - span.start for span in owned_spans(numel, chosen)]
        assert all(size == 0 or size >= min_span_numel for size in sizes)


def test_who_reduces_a_small_vector_changes_from_round_to_round() -> None:
    drawn = [reducer_shares(8, [1.0] * 16, 4096, number.to_bytes(16, "big")).index(1.0) for number in range(400)]
    assert set(drawn) == set(range(16))
    assert max(drawn.count(rank) for rank in range(16)) < 3 * 400 / 16


def test_a_large_vector_is_reduced_by_all() -> None:
    assert reducer_shares(10_000, [1.0, 0.0, 2.0], 5_000, b"seed") == [1.0, 0.0, 2.0]
