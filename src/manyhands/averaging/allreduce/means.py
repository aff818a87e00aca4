"""What a member holds of a round's result: parts with their contributors, and pieces that can be verified."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from blake3 import blake3

from manyhands.averaging.memory import bytes_of
from manyhands.averaging.messages import SpanResult

PIECE_BYTES = 1 << 20
MAX_PIECES = 1 << 12
ACROSS_BALLOTS = b"averaged again"
"""Precedes the digests of the pieces of a vector that was averaged in more than one ballot."""


@dataclass(frozen=True)
class Means:
    """A result, or the part of it that a member has.

    Attributes:
        spans_ballots: whether parts of it came in different ballots. Then a piece, uint8, is a plain part of the
            vector, else the means of one reducer as sent, in the code ``codec``.
        decode: writes the vector from the pieces, where they are encoded.
        chunks: of each piece, the parts of the vector that were encoded one by one; none for plain pieces, nor where
            contributions were passed on in place of their mean.
    """

    averaged_N: torch.Tensor
    spans_ballots: bool
    pieces: Sequence[torch.Tensor]
    decode: Callable[[], None]
    codec: int = 0
    chunks: Sequence[Sequence[slice]] = ()

    def lasting(self) -> Means:
        """The same pieces, which nobody changes any more: those in the memory of the vector are copied."""
        memory = self.averaged_N.untyped_storage().data_ptr()
        are_own = (piece.untyped_storage().data_ptr() == memory for piece in self.pieces)
        pieces = [piece.clone() if is_own else piece for piece, is_own in zip(self.pieces, are_own, strict=True)]
        return Means(torch.empty(0), self.spans_ballots, pieces, lambda: None, self.codec, self.chunks)

    def digests(self) -> list[bytes]:
        """BLAKE3 of each piece as it is now; reads all memory, so call it on a thread of its own."""
        return [digest_of(piece) for piece in self.pieces]


def across_ballots(averaged_N: torch.Tensor) -> Means:
    """A vector that was averaged in more than one ballot."""
    whole = averaged_N.view(torch.uint8)
    piece_bytes = max(PIECE_BYTES, math.ceil(whole.numel() / MAX_PIECES))
    starts = range(0, whole.numel(), piece_bytes)
    return Means(averaged_N, True, [whole[start : start + piece_bytes] for start in starts], lambda: None)


def digest_of(piece: torch.Tensor) -> bytes:
    """BLAKE3, which reads memory nearly three times as fast as SHA-256 here."""
    return blake3(bytes_of(piece) if piece.numel() else b"", max_threads=1).digest()


def digest_of_all(digests: Sequence[bytes], *, spans_ballots: bool) -> bytes:
    """The digest that members vote for, over the digests of all pieces."""
    return blake3((ACROSS_BALLOTS if spans_ballots else b"") + b"".join(digests)).digest()


class BadContribution(Exception):
    """A reducer's record of its contributors is impossible."""


class Contributions:
    """The parts of the averaged vector that a member holds; ``contributors`` are the ranks with a weight above 0."""

    def __init__(self, numel: int, num_members: int, contributors: Iterable[int]) -> None:
        self._numel = numel
        self._num_members = num_members
        self.mask_bytes = (num_members + 7) // 8  # for each chunk in the record that a reducer sends
        self._contributors = frozenset(contributors)
        self._parts: list[SpanResult] = []

    def add(self, start: int, stop: int, reducer: int, present: Iterable[int]) -> None:
        """Add ``flat_N[start:stop]``, in place of any former content."""
        if start >= stop:
            return
        self.drop(start, stop)
        absent = set(range(self._num_members)) - set(present)
        if self._contributors <= set(present):
            absent &= self._contributors  # members without a weight are not absent where all others are present
        parts = [*self._parts, SpanResult(start, stop, reducer, sorted(absent))]
        self._parts = _joined(sorted(parts, key=lambda part: part.start))

    def drop(self, start: int, stop: int) -> None:
        """Remove ``flat_N[start:stop]``."""
        kept: list[SpanResult] = []
        for part in self._parts:
            if part.start < start:
                kept.append(SpanResult(part.start, min(part.stop, start), part.reducer, part.absent))
            if part.stop > stop:
                kept.append(SpanResult(max(part.start, stop), part.stop, part.reducer, part.absent))
        self._parts = kept

    def missing(self) -> tuple[int, int]:
        """Start and stop of the shortest slice that covers all missing parts; equal if nothing is missing."""
        bounds = [0, *(end for part in self._parts for end in (part.start, part.stop)), self._numel]
        gaps = [(start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True) if start < stop]
        return (gaps[0][0], gaps[-1][1]) if gaps else (0, 0)

    def parts(self) -> list[SpanResult]:
        """The parts for the manifest; empty if all members contributed to everything."""
        return [] if all(not part.absent for part in self._parts) else list(self._parts)

    # the record that a reducer sends with its means

    def record(self, presents: Sequence[Iterable[int]]) -> bytes:
        """Encode the contributors to each chunk of a span: one bit for each rank, the lowest bit of a byte first."""
        return b"".join(sum(1 << rank for rank in present).to_bytes(self.mask_bytes, "little") for present in presents)

    def read_record(self, record: bytes) -> list[list[int]]:
        """Ranks by chunk.

        Raises:
            BadContribution: no member contributed to a chunk, or one without a weight or outside the group did.
        """
        size, presents = self.mask_bytes, []
        for start in range(0, len(record), size):
            bits = int.from_bytes(record[start : start + size], "little")
            present = [rank for rank in range(8 * size) if bits >> rank & 1]
            if not present or not self._contributors.issuperset(present):
                raise BadContribution(f"ranks {present} contributed to a chunk, not of {sorted(self._contributors)}")
            presents.append(present)
        return presents


def _joined(parts: Sequence[SpanResult]) -> list[SpanResult]:
    """Merge neighbours with the same reducer and contributors, so that all members write the same."""
    joined: list[SpanResult] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last and (last.stop, last.reducer, last.absent) == (part.start, part.reducer, part.absent):
            part = SpanResult(joined.pop().start, part.stop, part.reducer, part.absent)
        joined.append(part)
    return joined
