"""The result of a round in the form that its digest covers: pieces that can be verified separately."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from blake3 import blake3

from manyhands.averaging.memory import bytes_of

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
        codec: code of the encoding, where there is one.
        chunks: of each piece, the parts of the vector that were encoded one by one; none for plain pieces, nor where
            contributions were passed on in place of their mean.
    """

    def __init__(
        self,
        averaged_N: torch.Tensor,
        is_again: bool,
        pieces: Sequence[torch.Tensor],
        decode: Callable[[], None],
        codec: int = 0,
        chunks: Sequence[Sequence[slice]] = (),
    ) -> None:
        self.averaged_N = averaged_N
        self.is_again = is_again
        self.pieces = pieces
        self.decode = decode
        self.codec = codec
        self.chunks = chunks

    def copy(self) -> Means:
        """A copy of the pieces, to send from."""
        pieces = [torch.empty_like(piece).copy_(piece) for piece in self.pieces]
        return Means(torch.empty(0), self.is_again, pieces, lambda: None)

    def lasting(self) -> Means:
        """The same pieces, which nobody changes any more: those in the memory of the vector are copied."""
        own = self.averaged_N.untyped_storage().data_ptr()
        pieces = [
            piece.clone() if piece.untyped_storage().data_ptr() == own else piece.detach() for piece in self.pieces
        ]
        return Means(torch.empty(0), self.is_again, pieces, lambda: None, self.codec, self.chunks)

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
