"""The part of a round's result that a member holds: the means as sent, and the contributors to each part."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from blake3 import blake3

from manyhands.averaging.allreduce.checks import Told
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


class BadRecord(Exception):
    """What a reducer tells after its means is impossible."""


class MeansRecords:
    """What a reducer sends after its means: who contributed to each chunk, and of their values the size and product.

    For each chunk it has one bit for each rank, the lowest bit of a byte first; then the norm of each member's values
    in the span (float32) and their product with the means (float64).

    Args:
        contributors: ranks that may contribute.
        is_measured: whether it has norms.
        has_products: whether it has products, too.
    """

    def __init__(
        self, num_members: int, contributors: Iterable[int], *, is_measured: bool = False, has_products: bool = False
    ) -> None:
        self._num_members = num_members
        self._contributors = frozenset(contributors)
        self._mask_bytes = (num_members + 7) // 8
        num_products = num_members if has_products else 0
        self._numbers = struct.Struct(f"<{num_members}f{num_products}d" if is_measured else "<")

    def num_bytes(self, num_chunks: int) -> int:
        """Size of the record of a span with so many chunks."""
        return self._mask_bytes * num_chunks + self._numbers.size

    def encode(self, presents: Iterable[Iterable[int]], told: Told) -> bytes:
        """Encode the ranks that contributed to each chunk, and what is told of all members."""
        masks = [sum(1 << rank for rank in present).to_bytes(self._mask_bytes, "little") for present in presents]
        return b"".join(masks) + self._numbers.pack(*told.norms, *told.products)

    def read(self, record: bytes) -> tuple[list[list[int]], Told]:
        """Decode a record of a valid size: ranks of the contributors, by chunk, and what it tells of all members.

        Raises:
            BadRecord: no member contributed to a chunk, or one without a weight or outside the group did; a norm is
                negative or not a number.
        """
        size = self._mask_bytes
        end = len(record) - self._numbers.size
        presents = []
        for start in range(0, end, size):
            bits = int.from_bytes(record[start : start + size], "little")
            present = [rank for rank in range(8 * size) if bits >> rank & 1]
            if not present or not self._contributors.issuperset(present):
                raise BadRecord(f"ranks {present} contributed to a chunk, not of {sorted(self._contributors)}")
            presents.append(present)
        numbers = self._numbers.unpack(record[end:])
        told = Told(list(numbers[: self._num_members]), list(numbers[self._num_members :]))
        if not all(norm >= 0.0 for norm in told.norms):
            raise BadRecord("a norm is negative, or not a number")
        return presents, told
