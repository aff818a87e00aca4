"""Which member reduces which part of the vector. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from manyhands.base.errors import ConfigError


def owned_spans(numel: int, shares: Sequence[float]) -> list[slice]:
    """Split a flat vector among the reducers of one group.

    Reducer ``i`` averages ``flat_N[spans[i]]``. Rounding: largest remainder, ties to the lower rank, so that every
    member computes the same answer.

    Args:
        numel: N, in elements (not bytes).
        shares: relative bandwidth, shape [P], finite, >= 0, not all zero.
    Raises:
        ConfigError: shares break the rule above.
    Source: Ryabinin et al., Moshpit SGD, arXiv:2103.03239.
    """
    if not shares or not all(math.isfinite(share) and share >= 0 for share in shares) or not any(shares):
        raise ConfigError(f"shares {list(shares)} must be finite, >= 0 and not all zero; for example [1.0, 1.0]")
    total = math.fsum(shares)
    exact = [numel * share / total for share in shares]
    sizes = [math.floor(size) for size in exact]
    by_remainder = sorted(range(len(shares)), key=lambda rank: (sizes[rank] - exact[rank], rank))
    for rank in by_remainder[: numel - sum(sizes)]:
        sizes[rank] += 1
    spans = []
    start = 0
    for size in sizes:
        spans.append(slice(start, start + size))
        start += size
    return spans


def reducer_shares(numel: int, shares: Sequence[float], min_span_numel: int, seed: bytes) -> list[float]:
    """Let only as many members reduce as there are spans worth a stream; the others get a share of 0.

    A vector of a few kilobytes is averaged fastest by one member: each further one costs a stream to everybody. Who
    reduces is drawn by the seed, the same for all members and another in each round, so that the load is spread.

    Args:
        numel: N, in elements.
        shares: relative bandwidth, shape [P]; who has 0 never reduces.
        min_span_numel: elements, at least 1; with at least so many for each, all with a share reduce.
        seed: bytes that all members know, and nobody chooses.
    """
    able = [rank for rank, share in enumerate(shares) if share > 0]
    num_reducers = max(1, min(len(able), numel // min_span_numel))
    drawn = sorted(able, key=lambda rank: hashlib.sha256(seed + rank.to_bytes(4, "big")).digest())[:num_reducers]
    return [share if rank in drawn else 0.0 for rank, share in enumerate(shares)]


def chunks_of(span: slice, chunk_numel: int) -> list[slice]:
    """Cut a span into chunks of at most ``chunk_numel`` elements."""
    return [slice(start, min(start + chunk_numel, span.stop)) for start in range(span.start, span.stop, chunk_numel)]
