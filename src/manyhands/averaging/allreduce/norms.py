"""Adds up the size of each member's values at their reducer.

The pass that averages a chunk also measures a sample of each member's values, in the same places for all members. That
misses a few very large values, but these show in the mean: its norm is at most the mean of the members' norms. If it
is far above what the samples allow, all values of the chunk are measured. All values are also measured in a chunk with
numbers that do not count (:class:`Uncompared`), such as integers of buffers: these would hide small gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from manyhands.averaging.codecs import Plan, square_of

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
SUSPICIOUS = 4.0
"""If a mean's norm exceeds the mean of the sampled norms by this factor, the samples have missed large values."""


class Norms:
    """The norms of the members' values in one span."""

    def __init__(self, plan: Plan, weights: Sequence[float]) -> None:
        self._plan = plan
        self._weights = weights
        self._squares = [0.0] * len(weights)

    def add(
        self,
        chunk: slice,
        mean: torch.Tensor,
        sampled: Mapping[int, float],
        largest_square: float,
        received: Mapping[int, torch.Tensor],
        own: torch.Tensor,
    ) -> None:
        """Add an averaged chunk.

        Args:
            sampled: by rank of each contributor, an estimate of the sum of the squares of its values.
            largest_square: the sum of the squares of the mean, or an upper bound of it.
            received: encoded chunks, by rank; the values of a contributor without one are ``own``.
        """
        gaps = self._plan.uncompared(chunk)
        total = sum(self._weights[rank] for rank in sampled)
        allowed = SUSPICIOUS * sum(self._weights[rank] / total * math.sqrt(sampled[rank]) for rank in sampled)
        is_suspicious = not math.sqrt(largest_square) <= allowed and not math.sqrt(square_of(mean)) <= allowed
        has_to_measure = bool(gaps) or is_suspicious
        for rank, sampled_square in sampled.items():
            if has_to_measure:
                self._squares[rank] += self._square(received.get(rank, own), chunk, gaps)
            else:
                self._squares[rank] += sampled_square

    def spoil(self, rank: int) -> None:
        """Mark a member that sent values that are not finite or cannot be decoded."""
        self._squares[rank] = math.inf

    def told(self) -> list[float]:
        """The norms by rank, rounded to float32, as they are sent: so all members compute with the same numbers."""
        norms = [math.sqrt(square) for square in self._squares]
        return [float(np.float32(norm)) if norm <= LARGEST_FLOAT32 else math.inf for norm in norms]

    def _square(self, values: torch.Tensor, chunk: slice, gaps: Sequence[slice]) -> float:
        """The sum of the squares of a member's values, unencoded or encoded (uint8), without those in the gaps."""
        if values.dtype == torch.uint8:
            plain = torch.empty(chunk.stop - chunk.start, dtype=self._plan.dtype)
            self._plan.decode(values, chunk.start, plain)
            values = plain
        elif gaps:
            values = values.clone()
        for gap in gaps:
            values[gap] = 0
        return square_of(values)
