"""Measures the size of each member's values at their reducer, at a fiftieth of the cost of averaging them.

A sample of each chunk is measured, in the same places for all members. That misses a few very large values, but these
show in the mean: its norm is at most the mean of the members' norms. If it is far above what the samples allow, all
values of the chunk are measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from manyhands.averaging.allreduce.group_codec import GroupCodec
from manyhands.averaging.codecs import square_of

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
SUSPICIOUS = 4.0
"""If a mean's norm exceeds the sampled one by this factor, the samples have missed something."""


class Norms:
    """The norms of the members' values in one span.

    Args:
        codec: how they are encoded.
        num_members: of the group.
        seed: of the round; determines where samples are taken.
    """

    def __init__(self, codec: GroupCodec, num_members: int, seed: bytes) -> None:
        self._codec = codec
        self._squares = [0.0] * num_members
        self._seed = int.from_bytes(seed[:8], "little")

    def add(
        self,
        chunk: slice,
        mean: torch.Tensor,
        largest_square: float,
        shares: Mapping[int, float],
        received: Mapping[int, torch.Tensor],
        own: torch.Tensor,
    ) -> None:
        """Add an averaged chunk.

        Args:
            largest_square: the sum of the squares of its mean, or a bound of that.
            shares: of those in the mean, by rank.
            received: encoded chunks by rank; for the missing rank, the values are ``own``.
        """
        at = self._seed + chunk.start
        values = {rank: received.get(rank, own) for rank in shares}
        squares = {rank: self._codec.sampled_square(one, chunk, at) for rank, one in values.items()}
        allowed = SUSPICIOUS * sum(share * math.sqrt(squares[rank]) for rank, share in shares.items())
        if not math.sqrt(largest_square) <= allowed and not math.sqrt(square_of(mean)) <= allowed:
            squares = {rank: self._codec.square(one, chunk) for rank, one in values.items()}
        for rank, square in squares.items():
            self._squares[rank] += square

    def spoil(self, rank: int) -> None:
        """Mark a member that sent values that are not finite or cannot be decoded."""
        self._squares[rank] = math.inf

    def told(self) -> list[float]:
        """By rank, as float32: all members compute with the same numbers."""
        norms = [math.sqrt(square) for square in self._squares]
        return [float(np.float32(norm)) if norm <= LARGEST_FLOAT32 else math.inf for norm in norms]
