"""The part of a round's result that a member holds: the means as sent, and the contributors to each part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from blake3 import blake3

from manyhands.averaging.memory import bytes_of
from manyhands.averaging.messages import Group, SpanResult

MAX_PIECES = 1 << 12


@dataclass(frozen=True)
class Means:
    """The result of an exchange.

    Attributes:
        pieces: the means of each reducer as sent, uint8, in the code ``codec``.
        chunks: for each piece, the parts of the vector that were encoded one by one; empty where contributions were
            passed on in place of their mean.
    """

    averaged_N: torch.Tensor
    pieces: Sequence[torch.Tensor]
    codec: int = 0
    chunks: Sequence[Sequence[slice]] = ()

    def lasting(self) -> Means:
        """The same pieces in memory that nobody overwrites: those in the memory of the vector are copied."""
        memory = self.averaged_N.untyped_storage().data_ptr()
        pieces = []
        for piece in self.pieces:
            is_in_vector = piece.untyped_storage().data_ptr() == memory
            pieces.append(piece.clone() if is_in_vector else piece)
        return Means(torch.empty(0), pieces, self.codec, self.chunks)


def digest_of(piece: torch.Tensor) -> bytes:
    """BLAKE3 of a piece, empty for an empty one. BLAKE3 is nearly three times as fast as SHA-256 here."""
    return blake3(bytes_of(piece), max_threads=1).digest() if piece.numel() else b""


class BadContribution(Exception):
    """A reducer's record of its contributors is impossible."""


def parts_of(held: Iterable[tuple[slice, int, Sequence[int]]], group: Group) -> list[SpanResult]:
    """The parts of a whole vector for the manifest; empty if all members with a weight contributed to everything.

    Args:
        held: all chunks, each with its reducer and the ranks that contributed to it.
    """
    parts: list[SpanResult] = []
    givers = {rank for rank, member in enumerate(group.members) if member.weight > 0}
    for chunk, reducer, present in sorted(held, key=lambda one: one[0].start):
        absent = set(range(len(group.members))) - set(present)
        if givers <= set(present):
            absent &= givers  # members without a weight are not absent where all others are present
        if parts and (parts[-1].reducer, parts[-1].absent) == (reducer, sorted(absent)):
            parts[-1] = SpanResult(parts[-1].start, chunk.stop, reducer, parts[-1].absent)
        elif chunk.start < chunk.stop:
            parts.append(SpanResult(chunk.start, chunk.stop, reducer, sorted(absent)))
    return parts if any(part.absent for part in parts) else []


class ContributionRecords:
    """The record that a reducer sends with its means: who contributed to each chunk of its span.

    Args:
        contributors: ranks that may contribute.
    """

    def __init__(self, num_members: int, contributors: Iterable[int]) -> None:
        self.mask_bytes = (num_members + 7) // 8  # for each chunk
        self._contributors = frozenset(contributors)

    def record(self, presents: Sequence[Iterable[int]]) -> bytes:
        """Encode the contributors to each chunk of a span: one bit for each rank, the lowest bit of a byte first."""
        masks = []
        for present in presents:
            mask = sum(1 << rank for rank in present)
            masks.append(mask.to_bytes(self.mask_bytes, "little"))
        return b"".join(masks)

    def read_record(self, record: bytes) -> list[list[int]]:
        """Decode a record: ranks of the contributors, by chunk.

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
