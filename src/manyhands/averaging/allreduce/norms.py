"""Adds up the size of each member's values at their reducer, and their products with the mean.

The pass that averages a chunk also measures each member's values. In a chunk with numbers that do not count
(:class:`Uncompared`), such as integers of buffers, the others are measured once more without these, which would hide
small gradients. :mod:`.checks` has what products are for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from manyhands.averaging.allreduce.checks import LARGEST_FLOAT32, Told, product_with
from manyhands.averaging.codecs import Plan, Share, square_of


class Norms:
    """The norms of the members' values in one span, and their products with its mean."""

    def __init__(self, plan: Plan, num_members: int) -> None:
        self._plan = plan
        self._squares = [0.0] * num_members
        self._products = [0.0] * (0 if plan.passes_on else num_members)
        self._decoded = torch.empty(0, dtype=plan.dtype)

    def add(
        self,
        chunk: slice,
        squares: Mapping[int, float],
        received: Mapping[int, torch.Tensor],
        own: torch.Tensor,
    ) -> None:
        """Add the size of the values of a chunk.

        Args:
            squares: by rank of each contributor, the sum of the squares of its values.
            received: encoded chunks, by rank; the values of a contributor without one are ``own``.
        """
        has_gaps = bool(self._plan.uncompared(chunk))
        runs = self._plan.compared(chunk.start, chunk.stop) if has_gaps else []
        for rank, square in squares.items():
            if has_gaps:
                values = self._values(received.get(rank, own), chunk)
                square = sum(square_of(values[run]) for run, _ in runs)
            self._squares[rank] += square

    def multiply(
        self,
        chunk: slice,
        mean: torch.Tensor,
        shares: Mapping[int, Share],
        received: Mapping[int, torch.Tensor],
        own: torch.Tensor,
    ) -> None:
        """Add the products of values with the mean of a chunk, or a part of one.

        Args:
            mean: as all members decode it.
            shares: of each contributor, by rank.
        """
        for rank, share in shares.items():
            values = self._values(received.get(rank, own), chunk)
            self._products[rank] += product_with(self._plan, chunk.start, mean, share, values)

    def add_products(self, products: Mapping[int, float]) -> None:
        """Add products that are known, by rank, times the shares."""
        for rank, product in products.items():
            self._products[rank] += product

    def spoil(self, rank: int) -> None:
        """Mark a member that sent values that are not finite or cannot be decoded."""
        self._squares[rank] = math.inf

    def told(self) -> Told:
        """The norms, rounded to float32 as they are sent, so that all members compute with the same, and products."""
        norms = [math.sqrt(square) for square in self._squares]
        return Told(
            [float(np.float32(norm)) if norm <= LARGEST_FLOAT32 else math.inf for norm in norms], self._products
        )

    def _values(self, values: torch.Tensor, chunk: slice) -> torch.Tensor:
        """A member's values, which may be encoded (uint8); valid until the next call."""
        plan, numel = self._plan, chunk.stop - chunk.start
        if values.dtype != torch.uint8:
            return values
        if plan.is_exact(chunk.start, chunk.stop) and not plan.passes_on:
            return values.view(plan.dtype)
        if len(self._decoded) < numel:
            self._decoded = torch.empty(numel, dtype=plan.dtype)
        plan.decode(values, chunk.start, self._decoded[:numel])
        return self._decoded[:numel]
