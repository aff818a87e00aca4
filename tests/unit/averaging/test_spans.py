from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from manyhands.averaging.spans import chunks_of, owned_spans
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
