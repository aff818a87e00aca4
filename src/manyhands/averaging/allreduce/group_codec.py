"""Encodes and decodes what the members of a group send each other, and blames members whose values break the rules.

:class:`Means` is the result of a round in the form that its digest covers: pieces that can be verified separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from blake3 import blake3

from manyhands.averaging.codecs import BadEncoding, ErrorFeedback, NotFinite, Plan, largest_magnitude, square_of
from manyhands.averaging.messages import Member
from manyhands.base.errors import RoundAborted


class InvalidContribution(RoundAborted):
    """A member sent invalid data; it is blamed."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, for sending from it or receiving into it."""
    return tensor.numpy().data.cast("B")


def is_finite(values: torch.Tensor) -> bool:
    """Whether no value is infinite or NaN.

    A sum is the fastest pass over memory, and not finite if one of the values is not. Only if the sum has overflowed
    are the values checked again.
    """
    return math.isfinite(values.sum().item()) or math.isfinite(largest_magnitude(values))


class GroupCodec:
    """Encodes and decodes chunks of a group's vector.

    Args:
        plan: how the vector is encoded.
        members: of the group, by rank.
        rank: of this member.
        region: the part of the vector that is averaged.

    Attributes:
        is_exact: whether values in the region are sent unencoded.
        unit_numel: chunks of a multiple of it are whole rows or pieces of all codecs.
    """

    def __init__(self, plan: Plan, members: Sequence[Member], rank: int, region: slice) -> None:
        self.is_exact = plan.is_exact(region.start, region.stop)
        self.unit_numel = math.lcm(*(segment.codec.unit_numel for segment in plan.segments))
        self._plan = plan
        self._members = members
        self._rank = rank

    def num_bytes(self, part: slice) -> int:
        """Encoded size of a part of the vector in bytes."""
        return self._plan.num_bytes(part.start, part.stop)

    def encode(self, values: torch.Tensor, chunk: slice, out: torch.Tensor, feedback: ErrorFeedback | None) -> None:
        """Encode values of this member.

        Raises:
            InvalidContribution: they are not finite.
        """
        try:
            if feedback is not None:
                feedback.encode(values, chunk.start, out)
            else:
                self._plan.encode(values, chunk.start, out)
        except NotFinite as error:
            raise self._spoiled(self._rank, f"are not finite: {error}") from error

    def decode(self, rank: int, encoded: torch.Tensor, chunk: slice, out: torch.Tensor) -> None:
        """Decode a member's values.

        Raises:
            InvalidContribution: no member that follows the rules sends this.
        """
        try:
            self._plan.decode(encoded, chunk.start, out)
        except BadEncoding as error:
            raise self._spoiled(rank, f"cannot be decoded: {error}") from error

    def requantize(self, values: torch.Tensor, chunk: slice, out: torch.Tensor, feedback: ErrorFeedback | None) -> None:
        """Encode values of this member, and replace them with what all members decode.

        Raises:
            InvalidContribution: they are not finite.
        """
        if feedback is not None:
            self.encode(values, chunk, out, feedback)
            self.decode(self._rank, out, chunk, values)
            return
        try:
            self._plan.requantize(values, chunk.start, out)
        except NotFinite as error:
            raise self._spoiled(self._rank, f"are not finite: {error}") from error

    def average(
        self,
        own: torch.Tensor,
        kept: torch.Tensor,
        rooms: torch.Tensor,
        which: Sequence[int],
        weights: Sequence[float],
        chunk: slice,
        mean: torch.Tensor,
        out: torch.Tensor,
    ) -> int:
        """Average and requantize the first values of a chunk in one pass, as many as possible; returns how many.

        Args: as those of :meth:`manyhands.averaging.codecs.Codec.average`.
        """
        return self._plan.average(own, kept, rooms, which, weights, chunk.start, mean, out)

    def add(
        self, rank: int, encoded: torch.Tensor, chunk: slice, weight: float, total: torch.Tensor, *, is_first: bool
    ) -> None:
        """Add a member's encoded values, times a weight, to ``total``; the first ones overwrite it.

        Raises:
            InvalidContribution: no member that follows the rules sends this.
        """
        try:
            self._plan.add(encoded, chunk.start, weight, total, is_first=is_first)
        except BadEncoding as error:
            raise self._spoiled(rank, f"cannot be decoded: {error}") from error

    def square(self, values: torch.Tensor, part: slice) -> float:
        """The sum of the squares of values, unencoded or encoded (uint8)."""
        if values.dtype == torch.uint8:
            plain = torch.empty(part.stop - part.start, dtype=self._plan.dtype)
            self._plan.decode(values, part.start, plain)
            values = plain
        return square_of(values)

    def largest_square(self, part: slice, encoded: torch.Tensor) -> float:
        """A bound of the sum of the squares of an encoded mean; infinite if it has to be computed."""
        return self._plan.largest_square(part.start, part.stop, encoded)

    def sampled_square(self, values: torch.Tensor, part: slice, at: int) -> float:
        """An estimate of it from some of the values, at a place derived from any number ``at``."""
        total = 0.0
        for sample in self._plan.sampled(part.start, part.stop, at):
            if values.dtype == torch.uint8:
                run = torch.empty(sample.values.stop - sample.values.start, dtype=self._plan.dtype)
                sample.codec.decode(values[sample.encoded], run)
            else:
                run = values[sample.values]
            total += sample.stands_for * square_of(run)
        return total

    def check_finite(self, rank: int, values: torch.Tensor) -> None:
        """Raises InvalidContribution if a value is infinite or NaN."""
        if not is_finite(values):
            raise self._spoiled(rank, "are not finite")

    def _spoiled(self, rank: int, how: str) -> InvalidContribution:
        peer_id = self._members[rank].peer_id
        return InvalidContribution(f"the values of peer {peer_id} {how}", [peer_id])


PIECE_BYTES = 1 << 20
MAX_PIECES = 1 << 12
AGAIN = b"averaged again"
"""Precedes the digests of the pieces of a vector that was averaged in more than one ballot."""


class Means:
    """A result, or the part of it that a member has.

    Args:
        averaged_N: the vector.
        is_again: whether parts of it came in different ballots. Then a piece is a plain part of the vector, else the
            means of one reducer as sent.
        pieces: their memory, uint8.
        decode: writes the vector from the pieces, where they are encoded.
    """

    def __init__(
        self, averaged_N: torch.Tensor, is_again: bool, pieces: Sequence[torch.Tensor], decode: Callable[[], None]
    ) -> None:
        self.averaged_N = averaged_N
        self.is_again = is_again
        self.pieces = pieces
        self.decode = decode

    def copy(self) -> Means:
        """A copy of the pieces, to send from."""
        pieces = [torch.empty_like(piece).copy_(piece) for piece in self.pieces]
        return Means(torch.empty(0), self.is_again, pieces, lambda: None)

    def digests(self) -> list[bytes]:
        """BLAKE3 of each piece as it is now; reads all memory, so call it on a thread of its own."""
        return [digest_of(piece) for piece in self.pieces]


def again(averaged_N: torch.Tensor) -> Means:
    """A vector that was averaged in more than one ballot."""
    whole = averaged_N.view(torch.uint8)
    piece_bytes = max(PIECE_BYTES, math.ceil(whole.numel() / MAX_PIECES))
    starts = range(0, whole.numel(), piece_bytes)
    return Means(averaged_N, True, [whole[start : start + piece_bytes] for start in starts], lambda: None)


def digest_of(piece: torch.Tensor) -> bytes:
    """BLAKE3, which reads memory nearly three times as fast as SHA-256 here."""
    return blake3(bytes_of(piece) if piece.numel() else b"", max_threads=1).digest()


def digest_of_all(is_again: bool, digests: Sequence[bytes]) -> bytes:
    """The digest that members vote for, over the digests of all pieces."""
    return blake3((AGAIN if is_again else b"") + b"".join(digests)).digest()
