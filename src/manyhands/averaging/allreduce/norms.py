"""Adds up the size of each member's values at their reducer.

The pass that averages a chunk also measures each member's values. In a chunk with numbers that do not count
(:class:`Uncompared`), such as integers of buffers, the others are measured once more without these, which would hide
small gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from manyhands.averaging.codecs import Plan, square_of

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


class Norms:
    """The norms of the members' values in one span."""

    def __init__(self, plan: Plan, num_members: int) -> None:
        self._plan = plan
        self._squares = [0.0] * num_members

    def add(
        self,
        chunk: slice,
        squares: Mapping[int, float],
        received: Mapping[int, torch.Tensor],
        own: torch.Tensor,
    ) -> None:
        """Add an averaged chunk.

        Args:
            squares: by rank of each contributor, the sum of the squares of its values.
            received: encoded chunks, by rank; the values of a contributor without one are ``own``.
        """
        gaps = self._plan.uncompared(chunk)
        for rank, square in squares.items():
            self._squares[rank] += self._square(received.get(rank, own), chunk, gaps) if gaps else square

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
        else:
            values = values.clone()
        for gap in gaps:
            values[gap] = 0
        return square_of(values)
