"""How large the values of each member are, as their reducer sees them: for a fiftieth of what averaging them costs.

Of each chunk a sample is measured, in the same places for all members. That misses a few values that are very large,
but these show in the mean: its norm is at most the mean of the members' norms. Where it is far above what the samples
allow, all values of the chunk are measured.
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
"""The norm of a mean is that of what was sampled, times less than this; else the samples have missed something."""


class Norms:
    """The norms of the members' values in one span.

    Args:
        codec: how they travel.
        num_members: of the group.
        seed: of the round; it says where samples are taken.
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
        """A chunk has been averaged.

        Args:
            largest_square: the sum of the squares of its mean, or a bound of that.
            shares: of those in the mean, by rank.
            received: as it travelled, by rank; for the rank that is not in it, the values are ``own``.
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
        """A member has sent what is not finite, or cannot be decoded."""
        self._squares[rank] = math.inf

    def told(self) -> list[float]:
        """By rank, as float32: all members reckon with the same numbers."""
        norms = [math.sqrt(square) for square in self._squares]
        return [float(np.float32(norm)) if norm <= LARGEST_FLOAT32 else math.inf for norm in norms]
