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

from manyhands.averaging.codecs import Plan, square_of

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
SUSPICIOUS = 4.0
"""If a mean's norm exceeds the sampled one by this factor, the samples have missed something."""


class Norms:
    """The norms of the members' values in one span; ``seed`` determines where samples are taken."""

    def __init__(self, plan: Plan, num_members: int, seed: bytes) -> None:
        self._plan = plan
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
        squares = {rank: self._sampled_square(one, chunk, at) for rank, one in values.items()}
        allowed = SUSPICIOUS * sum(share * math.sqrt(squares[rank]) for rank, share in shares.items())
        if not math.sqrt(largest_square) <= allowed and not math.sqrt(square_of(mean)) <= allowed:
            squares = {rank: self._whole_square(one, chunk) for rank, one in values.items()}
        for rank, square in squares.items():
            self._squares[rank] += square

    def spoil(self, rank: int) -> None:
        """Mark a member that sent values that are not finite or cannot be decoded."""
        self._squares[rank] = math.inf

    def told(self) -> list[float]:
        """By rank, as float32: all members compute with the same numbers."""
        norms = [math.sqrt(square) for square in self._squares]
        return [float(np.float32(norm)) if norm <= LARGEST_FLOAT32 else math.inf for norm in norms]

    def _whole_square(self, values: torch.Tensor, part: slice) -> float:
        """The sum of the squares of a member's values, unencoded or encoded (uint8)."""
        if values.dtype == torch.uint8:
            plain = torch.empty(part.stop - part.start, dtype=self._plan.dtype)
            self._plan.decode(values, part.start, plain)
            values = plain
        return square_of(values)

    def _sampled_square(self, values: torch.Tensor, part: slice, at: int) -> float:
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
