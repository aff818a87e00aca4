"""Finds codecs by their name (for users) or code (on the wire), and plans which part of the vector each one encodes.

Norms and biases are small, and training reacts strongly to errors in them: they stay exact. The rest uses the chosen
codec. All members compute the same plan from the shapes in the run's manifest, so that a slice of the vector has the
same number of bytes for the sender and the receiver.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from manyhands.averaging.codecs.codec import BadEncoding, Codec, square_of
from manyhands.averaging.codecs.floats import Bf16, Fp16, Plain, PlainFloat64
from manyhands.averaging.codecs.int4 import Int4
from manyhands.averaging.codecs.int8 import Int8
from manyhands.averaging.codecs.sparse import SPARSE, Sparse, sparse_named
from manyhands.base.errors import ConfigError

NONE = Plain()
NONE_FLOAT64 = PlainFloat64()
FP16 = Fp16()
BF16 = Bf16()
INT8 = Int8()
INT4 = Int4()

CODECS: dict[str, Codec] = {codec.name: codec for codec in (NONE, FP16, BF16, INT8, INT4)}
"""Codecs that a user may choose; ``none`` also stands for float64 where the vector is float64."""
_BY_CODE: dict[int, Codec] = {codec.code: codec for codec in CODECS.values()}

EXACT_BELOW_NUMEL = 4096
ABSENT, PRESENT = 0, 1
"""The first byte of a slot of :class:`Gathered`: whether the contributor's values follow."""


def codec_named(name: str) -> Codec:
    """The codec that a user chose.

    Raises:
        ConfigError: no codec has this name.
    """
    if name.startswith(f"{SPARSE}-"):
        return sparse_named(name)
    if (codec := CODECS.get(name)) is None:
        raise ConfigError(f"codec {name!r} is unknown; one of {', '.join(CODECS)}, for example {INT8.name!r}")
    return codec


def codec_of_code(code: int, setting: str) -> Codec:
    """The codec with a code, as a leader chooses it. ``NONE_FLOAT64`` is never chosen: all float64 vectors use it.

    Args:
        setting: this peer's codec setting; the code of a sparse codec lacks the codec's numbers, the setting has them.
    Raises:
        BadEncoding: no codec that can be chosen has this code.
    """
    if code == Sparse.code and setting.startswith(f"{SPARSE}-"):
        return sparse_named(setting)
    if (codec := _BY_CODE.get(code)) is None:
        raise BadEncoding(f"no codec has code {code}; perhaps that peer is of a later version")
    return codec


@dataclass(frozen=True)
class Segment:
    """``flat_N[start:stop]`` uses one codec.

    Attributes:
        is_chosen: not averaged: all take over the values of the member with the most weight, of equal ones that with
            the lowest rank. Members whose values of a chunk did not come do not count there.
        is_scaled: the values of a member that is clipped are scaled down; else that member weighs less.
    """

    start: int
    stop: int
    codec: Codec
    is_chosen: bool = False
    is_scaled: bool = True


class Unscaled(tuple[int, ...]):
    """The shape of a tensor that is no gradient, such as parameters or running statistics.

    A member that is clipped weighs less there: to scale its values down would change what all have in common.
    """


class Uncompared(Unscaled):
    """The shape of a tensor that does not count in the norms of members' values, such as a buffer of integers."""


class Chosen(Uncompared):
    """The shape of a tensor that is not averaged: all take over the tensor of the member with the most weight."""


def _kind_of(segment: Segment) -> tuple[int, bool, bool]:
    return id(segment.codec), segment.is_chosen, segment.is_scaled


class Share(NamedTuple):
    """One member's part of a mean.

    Attributes:
        scaled: the factor of its values in segments that are scaled.
        unscaled: that in the others, where these factors of all members add up to 1.
    """

    scaled: float
    unscaled: float

    def of(self, segment: Segment, *, is_largest: bool) -> float:
        """The factor of its values in a segment.

        Args:
            is_largest: whether chosen segments take over these values; see :class:`Segment`.
        """
        if segment.is_chosen:
            return float(is_largest)
        return self.scaled if segment.is_scaled else self.unscaled


def shares_of(weights: Sequence[float], scales: Sequence[float], ranks: Sequence[int]) -> dict[int, Share]:
    """The shares of the members of these ranks in their mean.

    Args:
        weights: by rank; that of a member that is clipped counts in full.
        scales: by rank.
    """
    total = math.fsum(weights[rank] for rank in ranks)
    unscaled = math.fsum(weights[rank] * scales[rank] for rank in ranks) or total
    return {
        rank: Share(weights[rank] * scales[rank] / total, weights[rank] * scales[rank] / unscaled) for rank in ranks
    }


class Plan:
    """The segments of a flat vector, in order and without gaps; adjacent ones of one kind are joined.

    Args:
        segments: the first one starts at 0.
        uncompared: the parts of the vector that do not count in the norms of members' values.
    """

    def __init__(self, segments: Sequence[Segment], uncompared: Sequence[slice] = ()) -> None:
        joined: list[Segment] = []
        numel = 0
        for segment in segments:
            numel = segment.stop
            if segment.start == segment.stop:
                continue
            if joined and _kind_of(joined[-1]) == _kind_of(segment):
                segment = replace(segment, start=joined.pop().start)
            joined.append(segment)
        self.segments = tuple(joined)
        self.numel = numel
        self._uncompared = uncompared
        self.dtype = joined[0].codec.dtype if joined else NONE.dtype
        self.error = max((segment.codec.error for segment in joined), default=0.0)
        self.passes_on = any(segment.codec.passes_on for segment in joined)
        self._stops = [segment.stop for segment in joined]

    def cut(self, start: int, stop: int) -> list[Segment]:
        """The segments of ``flat_N[start:stop]``, their bounds counted from the start of the vector."""
        assert 0 <= start <= stop <= self.numel, "within the vector"
        first = bisect.bisect_right(self._stops, start)
        parts = []
        for segment in self.segments[first:]:
            if segment.start >= stop:
                break
            parts.append(replace(segment, start=max(start, segment.start), stop=min(stop, segment.stop)))
        return parts if start < stop else []

    def uncompared(self, chunk: slice) -> list[slice]:
        """The parts of a chunk that do not count in norms, their bounds counted from the start of the chunk."""
        overlaps = (slice(max(chunk.start, part.start), min(chunk.stop, part.stop)) for part in self._uncompared)
        return [slice(one.start - chunk.start, one.stop - chunk.start) for one in overlaps if one.start < one.stop]

    def compared(self, start: int, stop: int) -> list[tuple[slice, Segment]]:
        """The runs of ``flat_N[start:stop]`` that count in norms, from the start of the slice, with their segments."""
        gaps = self.uncompared(slice(start, stop))
        edges = [0, *(edge for gap in gaps for edge in (gap.start, gap.stop)), stop - start]
        return [
            (slice(part.start - start, part.stop - start), part)
            for begin, end in zip(edges[::2], edges[1::2], strict=True)
            for part in self.cut(start + begin, start + end)
            if not part.is_chosen
        ]

    def norm(self, flat_N: torch.Tensor) -> float:
        """The L2 norm of a whole vector, without the parts that do not count in norms; infinite if it is not finite."""
        edges = [0, *(edge for part in self._uncompared for edge in (part.start, part.stop)), self.numel]
        compared = zip(edges[::2], edges[1::2], strict=True)
        return math.sqrt(sum(square_of(flat_N[start:stop]) for start, stop in compared))

    def num_bytes(self, start: int, stop: int) -> int:
        """Encoded size of ``flat_N[start:stop]`` as one slice, in bytes.

        The slice is cut at the borders of segments, and each part into its codec's pieces, from the start of the part.
        So two adjacent slices may take a few bytes more than one slice of both, and may decode to slightly different
        values, within the codec's error bound.
        """
        return sum(part.codec.num_bytes(part.stop - part.start) for part in self.cut(start, stop))

    def is_exact(self, start: int, stop: int) -> bool:
        """Whether ``flat_N[start:stop]`` is sent unencoded, from its own memory, without a copy."""
        return all(part.codec in (NONE, NONE_FLOAT64) for part in self.cut(start, stop))

    def encode(self, values: torch.Tensor, start: int, out: torch.Tensor) -> None:
        """Like :meth:`Codec.encode`; ``values`` is ``flat_N[start : start + len(values)]``."""
        assert out.shape == (self.num_bytes(start, start + values.numel()),)
        for part, some_values, place in self._parts(values, start, out):
            part.codec.encode(some_values, place)

    def decode(self, encoded: torch.Tensor, start: int, out: torch.Tensor) -> None:
        """Like :meth:`Codec.decode`; ``out`` becomes ``flat_N[start : start + len(out)]``."""
        self._check_length(encoded, start, out)
        for part, some_values, place in self._parts(out, start, encoded):
            part.codec.decode(place, some_values)

    def add(
        self,
        encoded: torch.Tensor,
        start: int,
        share: Share,
        total: torch.Tensor,
        *,
        is_first: bool,
        is_largest: bool,
    ) -> float:
        """Like :meth:`decode`, but add the member's share of the values to ``total``; the first ones overwrite it.

        Args:
            is_largest: see :meth:`Share.of`.
        Returns:
            The sum of the squares of the values.
        """
        self._check_length(encoded, start, total)
        square = 0.0
        for part, some_total, place in self._parts(total, start, encoded):
            values = torch.empty_like(some_total)
            part.codec.decode(place, values)
            square += square_of(values)
            values.mul_(share.of(part, is_largest=is_largest))
            some_total.copy_(values) if is_first else some_total.add_(values)
        return square

    def add_values(
        self, values: torch.Tensor, start: int, share: Share, total: torch.Tensor, *, is_first: bool, is_largest: bool
    ) -> float:
        """Like :meth:`add`, of values that are not encoded."""
        square = 0.0
        for part in self.cut(start, start + total.numel()):
            run = slice(part.start - start, part.stop - start)
            factor = share.of(part, is_largest=is_largest)
            square += square_of(values[run])
            if is_first:
                torch.mul(values[run], factor, out=total[run])
            else:
                total[run].add_(values[run], alpha=factor)
        return square

    def _check_length(self, encoded: torch.Tensor, start: int, values: torch.Tensor) -> None:
        stop = start + values.numel()
        if (due := self.num_bytes(start, stop)) != encoded.numel():
            raise BadEncoding(f"values from {start} to {stop} take {due} bytes, but there are {encoded.numel()}")

    def _parts(
        self, values: torch.Tensor, start: int, encoded: torch.Tensor
    ) -> Iterator[tuple[Segment, torch.Tensor, torch.Tensor]]:
        """The parts of a slice that are encoded one by one: the values of each, and their place in the encoding."""
        offset = 0
        for part in self.cut(start, start + values.numel()):
            end = offset + part.codec.num_bytes(part.stop - part.start)
            yield part, values[part.start - start : part.stop - start], encoded[offset:end]
            offset = end


def plan_of(shapes: Sequence[Sequence[int]], codec: Codec, *, dtype: torch.dtype = torch.float32) -> Plan:
    """The plan of a vector of tensors with these shapes, in order.

    Tensors with fewer than two dimensions or fewer than ``EXACT_BELOW_NUMEL`` elements are exact.

    Args:
        shapes: a :class:`Chosen` one is not averaged, an :class:`Uncompared` one does not count in norms, and in an
            :class:`Unscaled` one a member that is clipped weighs less.
        codec: for the tensors that are not exact.
        dtype: dtype of the flat vector: float32, or float64, which is always encoded exactly.
    Raises:
        ConfigError: the vector has another dtype.
    """
    if dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"a vector is averaged in torch.float32 or torch.float64, not in {dtype}")
    exact: Codec = NONE if dtype == torch.float32 else NONE_FLOAT64
    segments, uncompared = [], []
    start = 0
    for shape in shapes:
        numel = math.prod(shape)
        stays_exact = dtype == torch.float64 or numel < EXACT_BELOW_NUMEL or len(shape) < 2
        is_chosen, is_scaled = isinstance(shape, Chosen), not isinstance(shape, Unscaled)
        segments.append(Segment(start, start + numel, exact if stays_exact else codec, is_chosen, is_scaled))
        if isinstance(shape, Uncompared):
            uncompared.append(slice(start, start + numel))
        start += numel
    return Plan(segments, uncompared)


class Gathered:
    """The contributions to a mean, passed on by the reducer in its place; all members add them up in order of ranks.

    Has those methods of :class:`Plan` that are called for means. The encoding of a slice has a slot for each
    contributor, in the order of ranks: a byte that says whether its values came, and the values as it encoded them.

    Args:
        plan: how each contribution is encoded.
        weights: weights of all members of the group, by rank; 0 for those that contribute nothing.
        scales: by rank, the factor with which the members' values count.
    """

    def __init__(self, plan: Plan, weights: Sequence[float], scales: Sequence[float]) -> None:
        self._plan = plan
        self._weights = weights
        self._scales = scales
        self._contributors = [rank for rank, weight in enumerate(weights) if weight > 0]

    def num_bytes(self, start: int, stop: int) -> int:
        return len(self._contributors) * (1 + self._plan.num_bytes(start, stop))

    def slots(self, encoded: torch.Tensor) -> dict[int, torch.Tensor]:
        """The slot of each contributor, by rank."""
        size = encoded.numel() // max(1, len(self._contributors))
        return {rank: encoded[at * size : (at + 1) * size] for at, rank in enumerate(self._contributors)}

    def fill(self, encoded: torch.Tensor, received: Mapping[int, torch.Tensor]) -> None:
        """Write the contributions that have come, by rank; the slots of the others stay empty."""
        for rank, slot in self.slots(encoded).items():
            if rank in received:
                slot[0] = PRESENT
                slot[1:].copy_(received[rank])
            else:
                slot[0] = ABSENT
                slot[1:].zero_()

    def decode(self, encoded: torch.Tensor, start: int, out: torch.Tensor) -> None:
        """Write the weighted mean of the contributions that have come.

        Raises:
            BadEncoding: no contribution has come, or one cannot be decoded; ``out`` must then not be used.
        """
        if encoded.numel() != self.num_bytes(start, start + out.numel()):
            raise BadEncoding(f"{out.numel()} contributed values from {start} on are not {encoded.numel()} bytes")
        present = {rank: slot for rank, slot in self.slots(encoded).items() if slot[0] == PRESENT}
        if not present:
            raise BadEncoding("no member's values are there")
        shares = shares_of(self._weights, self._scales, list(present))
        largest = max(present, key=self._weights.__getitem__)
        for number, (rank, slot) in enumerate(present.items()):
            self._plan.add(slot[1:], start, shares[rank], out, is_first=number == 0, is_largest=rank == largest)
