"""Who reduces which part of a vector, and in which chunks, in elements and in bytes; the same on all members. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

from manyhands.averaging.balance import leveled
from manyhands.averaging.member_values import MemberValues
from manyhands.averaging.messages import Group
from manyhands.averaging.spans import chunks_of, in_whole_units, owned_spans, whole_units

MAX_CHUNKS = 1 << 14
"""Of one vector; a leader that wants smaller chunks does not get them."""

CHUNKS_OF_VECTOR = 16
MIN_CHUNKS_OF_SPAN = 3
"""About as many chunks has a vector, unless they would be small: while one is reduced, others come and go. More of them
cost more calls, fewer leave too little to do meanwhile."""

MIN_CHUNK_NUMEL = 1 << 18
"""Less is not worth the calls."""


class Partition:
    """The spans of the reducers, and their chunks.

    Args:
        members: ranks of those that take part.
        region: of the vector that is averaged.
        codec: how values travel.

    Attributes:
        spans: by rank; that of a member which reduces nothing is empty.
        chunks: of each span, in order.
        places: where each chunk lies in its span, in bytes, encoded.
    """

    def __init__(self, group: Group, members: Collection[int], region: slice, codec: MemberValues) -> None:
        numel, unit = region.stop - region.start, codec.unit_numel
        bandwidths = [bandwidth if rank in members else 0 for rank, bandwidth in enumerate(group.bandwidths())]
        spans = in_whole_units(owned_spans(numel, leveled(bandwidths), group.min_span_numel, group.group_id), unit)
        self.spans = [slice(region.start + span.start, region.start + span.stop) for span in spans]
        num_chunks = max(CHUNKS_OF_VECTOR, MIN_CHUNKS_OF_SPAN * sum(map(self.is_reducer, range(len(spans)))))
        most = max(group.chunk_numel, math.ceil(numel / MAX_CHUNKS))
        usual = min(most, max(MIN_CHUNK_NUMEL, math.ceil(numel / num_chunks)))
        self.chunks = [chunks_of(span, whole_units(usual, unit, most)) for span in self.spans]
        self.places = [_one_after_the_other([codec.num_bytes(chunk) for chunk in chunks]) for chunks in self.chunks]

    def is_reducer(self, rank: int) -> bool:
        """Whether a member owns a span."""
        return self.numel(rank) > 0

    def numel(self, rank: int) -> int:
        """Elements of the span of a member."""
        return int(self.spans[rank].stop - self.spans[rank].start)

    def num_bytes(self, rank: int) -> int:
        """Of the span of a member, encoded."""
        return int(self.places[rank][-1].stop) if self.places[rank] else 0


def _one_after_the_other(sizes: list[int]) -> list[slice]:
    stops = itertools.accumulate(sizes)
    return [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
