"""Divides the vector into the spans of the reducers, and spans into chunks. Pure; all members compute the same.

The spans are chosen so that the slowest member is done as early as possible. Of n members, let member i with bandwidth
b_i reduce the fraction w_i. It sends ``(1 - w_i) + (n - 1) w_i`` vectors and receives as much, which takes

    t_i = (1 + (n - 2) w_i) / b_i.

The best w minimises max t_i over w >= 0, sum w = 1. All reducers finish at the same time 1 / x: one that finished later
would gain by giving a part of its span to another. So ``w_i = (x b_i - 1) / (n - 2)``, and 0 for the slowest members,
which need longer than that to send their own values, x b_i <= 1. If the k fastest reduce, and S is the sum of their
bandwidths, ``sum w = 1`` gives ``x = (n - 2 + k) / S``; the right k is the largest for which all k fractions are
positive. With n = 2 each takes a half, because the addition is work too. A client that
is not met reduces nothing, but counts in n.

All numbers are integers, so all members compute the same spans on any machine.

Source: Ryabinin et al., Moshpit SGD, arXiv:2103.03239, and Diskin et al., Distributed Deep Learning in Open
Collaborations, arXiv:2106.10207, which solve a linear program for the same minimum.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
from collections.abc import Collection, Sequence
from fractions import Fraction

from manyhands.averaging.codecs import Gathered, Plan
from manyhands.averaging.messages import Group
from manyhands.base.errors import ConfigError

MIN_SPAN_NUMEL = 4096
"""No member reduces less, so few members reduce a small vector: to open a stream would take longer than to send a
smaller span."""

CHUNK_NUMEL = 864 * 1024  # whole rows of all codecs
"""The most values that are encoded, reduced and sent on at once."""

CHUNKS_OF_VECTOR = 16
"""A vector has about this many chunks, unless they would be small. While one chunk is reduced, others are on the way:
more chunks cost more calls, and fewer leave too little to overlap."""
MIN_CHUNKS_OF_SPAN = 3
"""With many reducers a vector has more chunks than that: about this many per reducer."""

MIN_CHUNK_NUMEL = 1 << 18
"""Smaller chunks are not worth the calls."""

MANY_TO_ONE = 8
"""With more members than this for each reducer, chunks are smaller, as a reducer holds a few of each member at once."""


class Partition:
    """The spans of the reducers, and their chunks, in a vector that the members of these ranks average.

    Attributes:
        weights: by rank; 0 for members that do not take part.
        scales: by rank, the factor with which the members' values count.
        means: how means are encoded.
        is_exact: whether values are sent unencoded.
        spans, numel, chunks: by rank; empty for a member that reduces nothing.
        places, mean_places: by rank, for each chunk: position in bytes within the encoded values of the span, and
            within its encoded means.
        num_bytes, mean_bytes: by rank: bytes of the span's encoded values, and of its encoded means.
    """

    def __init__(self, group: Group, members: Collection[int], plan: Plan) -> None:
        self.plan = plan
        self.weights = [member.weight if rank in members else 0.0 for rank, member in enumerate(group.members)]
        self.scales = [member.scale for member in group.members]
        self.means = Gathered(plan, self.weights, self.scales) if plan.passes_on else plan
        self.is_exact = plan.is_exact(0, plan.numel) and not plan.passes_on
        numel = plan.numel
        unit = math.lcm(*(segment.codec.unit_numel for segment in plan.segments))  # whole rows or pieces of all codecs
        # a sparse codec chooses other values in a part of its unit than in the whole, so it always gets whole units
        least = 1 if plan.passes_on else LEAST_UNITS
        spans = owned_spans(numel, leveled(group.bandwidths(members)), MIN_SPAN_NUMEL, group.group_id)
        self.spans = in_whole_units(spans, unit, least)
        self.numel: list[int] = [span.stop - span.start for span in spans]
        self.reducers = {rank for rank, span_numel in enumerate(self.numel) if span_numel > 0}
        num_reducers = max(1, len(self.reducers))
        num_chunks = max(CHUNKS_OF_VECTOR, MIN_CHUNKS_OF_SPAN * num_reducers, len(members) // num_reducers)
        smallest = MIN_CHUNK_NUMEL * min(len(members), MANY_TO_ONE * num_reducers) // max(1, len(members))
        usual = min(CHUNK_NUMEL, max(smallest, math.ceil(numel / num_chunks)))
        self.chunks = [chunks_of(span, whole_units(usual, unit, CHUNK_NUMEL)) for span in self.spans]
        self.places = self._places(plan)
        self.mean_places = self._places(self.means) if plan.passes_on else self.places
        self.num_bytes = _sizes(self.places)
        self.mean_bytes = _sizes(self.mean_places)

    def _places(self, plan: Plan | Gathered) -> list[list[slice]]:
        places = []
        for chunks in self.chunks:
            sizes = [plan.num_bytes(chunk.start, chunk.stop) for chunk in chunks]
            places.append(_one_after_the_other(sizes))
        return places


def _sizes(places_by_rank: Sequence[Sequence[slice]]) -> list[int]:
    return [places[-1].stop if places else 0 for places in places_by_rank]


def _one_after_the_other(sizes: Sequence[int]) -> list[slice]:
    stops = itertools.accumulate(sizes)
    return [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


LEAST_UNITS = 16
"""Spans are rounded to whole codec units if each has at least this many units. So rounding changes no length
by a sixteenth or more."""


def owned_spans(numel: int, bandwidths: Sequence[int], min_span_numel: int, seed: bytes) -> list[slice]:
    """Split a flat vector among the reducers of one group. Rounding: largest remainder, ties to the lower rank.

    Args:
        bandwidths: bytes per second, shape [P], not all zero; a member with 0 never reduces.
        min_span_numel: smallest span in elements, at least 1; a single reducer may have less.
        seed: bytes that all members know, other ones in each round.
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
    return _one_after_the_other(sizes)


def _drawn(bandwidths: Sequence[int], num_worth: int, seed: bytes) -> list[int]:
    """Draw the ranks that may reduce: at most ``num_worth``, so that each span is worth a stream.

    The draw changes from round to round, to spread the load. The slower half of the members comes last.
    """
    able = [rank for rank, bandwidth in enumerate(bandwidths) if bandwidth > 0]
    if num_worth >= len(able):
        return able
    middle = statistics.median_high(bandwidths[rank] for rank in able)
    lots = {rank: hashlib.sha256(seed + rank.to_bytes(4, "big")).digest() for rank in able}
    return sorted(able, key=lambda rank: (bandwidths[rank] < middle, lots[rank]))[: max(1, num_worth)]


def chunks_of(span: slice, chunk_numel: int) -> list[slice]:
    """Cut a span into chunks of at most ``chunk_numel`` elements."""
    return [slice(start, min(start + chunk_numel, span.stop)) for start in range(span.start, span.stop, chunk_numel)]


def whole_units(numel: int, unit: int, most: int) -> int:
    """Round up to a multiple of a unit, or down if that exceeds ``most``; ``numel`` itself if neither is possible."""
    up = -(-numel // unit) * unit
    down = numel // unit * unit
    for rounded in (up, down):
        if 0 < rounded <= most:
            return rounded
    return numel


def in_whole_units(spans: Sequence[slice], unit: int, least: int) -> list[slice]:
    """Move the bounds of spans to multiples of a unit, unless one of the spans has fewer than ``least`` units.

    Partial units are processed by slower code; then at most the end of the vector is one.
    """
    if any(0 < span.stop - span.start < least * unit for span in spans):
        return list(spans)
    numel = max((span.stop for span in spans), default=0)
    bounds = [0, *(span.stop // unit * unit if span.stop < numel else numel for span in spans)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


SAME = Fraction(1, 4)
"""A member that is faster than another one by no more than this share counts as equally fast."""


def leveled(bandwidths: Sequence[int]) -> list[int]:
    """Bandwidths by rank, made equal where they hardly differ: measurements vary by as much.

    Members advance together: one that was underestimated has less to send, so it cannot show that it is faster.
    """
    levels = list(bandwidths)
    ascending = sorted((rank for rank, bandwidth in enumerate(bandwidths) if bandwidth > 0), key=bandwidths.__getitem__)
    while ascending:
        most = bandwidths[ascending[0]] * (1 + SAME)
        same = list(itertools.takewhile(lambda rank: bandwidths[rank] <= most, ascending))  # noqa: B023 (used at once)
        for rank in same:
            levels[rank] = sum(bandwidths[other] for other in same) // len(same)
        ascending = ascending[len(same) :]
    return levels


def balanced_shares(bandwidths: Sequence[int], candidates: Sequence[int], min_fraction: Fraction) -> list[int]:
    """Relative sizes of the spans, by rank.

    Args:
        candidates: ranks that may reduce, at least one; their bandwidths are > 0.
        min_fraction: smallest span as a fraction of the vector; a single reducer may have less.
    """
    num_others = len(bandwidths) - 2
    if num_others < 1:  # all send the same
        bandwidths, num_others = [1] * len(bandwidths), 1
    fastest = sorted(candidates, key=lambda rank: (-bandwidths[rank], rank))
    sums = list(itertools.accumulate(bandwidths[rank] for rank in fastest))
    num_reducers = len(fastest)
    while num_reducers > 1:
        total = sums[num_reducers - 1]
        least = (num_others + num_reducers) * bandwidths[fastest[num_reducers - 1]] - total
        if least > 0 and least * min_fraction.denominator >= min_fraction.numerator * num_others * total:
            break
        num_reducers -= 1
    shares = [0] * len(bandwidths)
    for rank in fastest[:num_reducers]:
        shares[rank] = (num_others + num_reducers) * bandwidths[rank] - sums[num_reducers - 1]
    return shares
