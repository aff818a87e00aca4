"""Which member reduces which part of the vector. Pure."""

from __future__ import annotations

import hashlib
import itertools
import statistics
from collections.abc import Sequence
from fractions import Fraction

from manyhands.averaging.balance import balanced_shares
from manyhands.base.errors import ConfigError

LEAST_UNITS = 16
"""A span of fewer units of the codec is not rounded to them: it would be a sixteenth longer or shorter, or more."""


def owned_spans(numel: int, bandwidths: Sequence[int], min_span_numel: int, seed: bytes) -> list[slice]:
    """Split a flat vector among the reducers of one group; see :mod:`manyhands.averaging.balance`.

    Reducer ``i`` averages ``flat_N[spans[i]]``. Rounding: largest remainder, ties to the lower rank. All in whole
    numbers, so that every member computes the same answer.

    Args:
        numel: N, in elements (not bytes).
        bandwidths: bytes per second, shape [P], not all zero; who has 0 never reduces.
        min_span_numel: elements, at least 1; nobody reduces less, unless it is the only one.
        seed: bytes that all members know, and nobody chooses.
    Raises:
        ConfigError: the bandwidths break the rule above.
    """
    if not any(bandwidths) or min(bandwidths) < 0:
        raise ConfigError(f"bandwidths {list(bandwidths)} must be >= 0 and not all zero; for example [1, 1]")
    candidates = _drawn(bandwidths, numel // min_span_numel, seed)
    min_fraction = Fraction(min_span_numel, numel) if numel else Fraction(1)
    shares = balanced_shares(bandwidths, candidates, min_fraction)
    total = sum(shares)
    sizes = [numel * share // total for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda rank: (-(numel * shares[rank] % total), rank))
    for rank in by_remainder[: numel - sum(sizes)]:
        sizes[rank] += 1
    spans = []
    start = 0
    for size in sizes:
        spans.append(slice(start, start + size))
        start += size
    return spans


def _drawn(bandwidths: Sequence[int], num_worth: int, seed: bytes) -> list[int]:
    """Ranks of those that may reduce: only as many as there are spans worth a stream.

    A vector of a few kilobytes is averaged fastest by one member: each further one costs a stream to everybody. Who
    it is changes from round to round, so that the load is spread, but the slower half comes last.
    """
    able = [rank for rank, bandwidth in enumerate(bandwidths) if bandwidth > 0]
    if num_worth >= len(able):
        return able
    middle = statistics.median_high(bandwidths[rank] for rank in able)

    def order(rank: int) -> tuple[bool, bytes]:
        return bandwidths[rank] < middle, hashlib.sha256(seed + rank.to_bytes(4, "big")).digest()

    return sorted(able, key=order)[: max(1, num_worth)]


def chunks_of(span: slice, chunk_numel: int) -> list[slice]:
    """Cut a span into chunks of at most ``chunk_numel`` elements."""
    return [slice(start, min(start + chunk_numel, span.stop)) for start in range(span.start, span.stop, chunk_numel)]


def whole_units(numel: int, unit: int, most: int) -> int:
    """The next multiple of a unit, or the one before if that is more than ``most``; ``numel`` if there is neither."""
    return next((up for up in (-(-numel // unit) * unit, numel // unit * unit) if 0 < up <= most), numel)


def in_whole_units(spans: Sequence[slice], unit: int) -> list[slice]:
    """The spans of a vector, with bounds at multiples of a unit, if that changes none of them by much.

    What is not a whole unit is worked on by slower code, and at its end the vector has that once in any case.
    """
    if any(0 < span.stop - span.start < LEAST_UNITS * unit for span in spans):
        return list(spans)
    numel = max((span.stop for span in spans), default=0)
    bounds = [0, *(span.stop // unit * unit if span.stop < numel else numel for span in spans)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
