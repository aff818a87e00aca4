"""What a reducer tells of the members' values (:class:`Norms`), and how the others check its means by it.

With its means a reducer tells for each member j two numbers: the norm of its values, and a *product*

    p_j = sum over the chunks c of  share_jc <m_c, v_jc>,

where m_c is the mean as all members decode it, v_jc are the values of the member as they were sent, and share_jc is the
factor with which they count. If these numbers are right, the products add up to <m, t>, where t is the true mean. Each
member checks that

- its own values are in each chunk, and its own two numbers are right, as it knows what it has sent;
- no product is larger than its share of |m| times the norm (Cauchy-Schwarz);
- the products add up to at least half of <m, m>, which says the same as |m - t| <= |t|: the means are at least as near
  to the true mean as zeros are.

So a wrong mean that passes points nowhere uphill and is at most twice as long. It slows the training of its span down;
to do worse, a reducer has to tell wrong numbers of many members, each of which complains. docs/adr/0051 has the limits
of this. Codecs whose contributions are passed on need none of it, as all members compute the mean themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from manyhands.averaging.codecs import Plan, Segment, Share, product_of, shares_of, square_of

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
ROUNDING = 1e-4
"""Limit of the relative error of a product or norm of float32, of up to 2^31 values in any order."""
SMALLEST_PRODUCT = 2.0**-126
"""Smaller products of two values are rounded, in some processes to 0."""
CLOSE = 0.1
"""The largest error of a codec with which a member uses its own values as they are for the checks. With a
larger error it first encodes and decodes them, so that they are as the reducer got them."""

LEAVES_OUT = "leave out the values that this peer has sent"
OTHER_VALUES = "do not fit the values that this peer has sent"
NO_MEANS = "are not the means of the members' values"


def product_with(plan: Plan, start: int, mean: torch.Tensor, share: Share, values: torch.Tensor) -> float:
    """The product of a member's values with a part of the mean, from ``start`` on, times its share."""
    return math.fsum(
        share.of(segment, is_largest=False) * product_of(mean[run], values[run])
        for run, segment in plan.compared(start, start + mean.numel())
    )


class Told(NamedTuple):
    """What a reducer tells of each member's values in its span, by rank.

    Attributes:
        norms: infinite for values that are not finite, 0 for a member without any.
        products: empty where contributions are passed on.
    """

    norms: list[float]
    products: list[float]


class Norms:
    """The norms of the members' values in one span, and their products with its mean, at its reducer.

    The pass that averages a chunk also measures each member's values. In a chunk with numbers that do not count
    (:class:`Uncompared <manyhands.averaging.codecs.Uncompared>`), such as integers of buffers, the others are measured
    once more without these, which would hide small gradients.
    """

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


class SpanCheck:
    """Checks the means of one reducer, at one other member, as they come.

    Args:
        rank: of this member.
        weights, scales: as in :class:`Partition <manyhands.averaging.allreduce.partition.Partition>`.
        error: limit of the relative error of the values that are given to :meth:`add`, beside those that were sent.
    """

    def __init__(
        self, plan: Plan, rank: int, weights: Sequence[float], scales: Sequence[float], num_chunks: int, error: float
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._weights = weights
        self._scales = scales
        self._tolerance = error + ROUNDING
        self._numel = 0
        self._square = 0.0  # of the means
        self._own_square = 0.0
        self._products = [[0.0, 0.0] for _ in range(num_chunks)]  # of values that are not scaled down, and of others

    def add(self, number: int, start: int, mean: torch.Tensor, own: torch.Tensor | None) -> None:
        """Count a part of the means, from ``start`` on, which lies in the chunk of this number.

        Args:
            own: this member's values as they were sent; None if it contributes nothing.
        """
        for run, segment in self._plan.compared(start, start + mean.numel()):
            some = mean[run]
            product = own_square = 0.0
            if own is not None:
                product, own_square = product_of(some, own[run]), square_of(own[run])
            self.count(number, segment, some.numel(), product, square_of(some), own_square)

    def count(
        self, number: int, segment: Segment, numel: int, product: float, square: float, own_square: float
    ) -> None:
        """Like :meth:`add`, of values of one segment whose products are known."""
        self._numel += numel
        self._square += square
        self._own_square += own_square
        self._products[number][segment.is_scaled] += product

    def fault(self, presents: Sequence[Sequence[int]], told: Told) -> str:
        """What is wrong with the means; empty if nothing is.

        Args:
            presents: ranks of the contributors to each chunk; this member is in all if it contributes anything.
            told: with norms that are not negative.
        """
        by_present = {
            present: shares_of(self._weights, self._scales, present) for present in {tuple(one) for one in presents}
        }
        shares = [by_present[tuple(present)] for present in presents]
        largest = [0.0] * len(told.norms)  # share of each member
        for of_chunk in by_present.values():
            for rank, share in of_chunk.items():
                largest[rank] = max(largest[rank], *share)
        floor = self._numel * SMALLEST_PRODUCT
        least = math.sqrt(floor)  # norms may be rounded down by so much
        length = math.sqrt(self._square) + least
        reach = [share * length * (norm + least) for share, norm in zip(largest, told.norms, strict=True)]
        if self._weights[self._rank] > 0 and not self._is_own(shares, told, largest[self._rank] * length, floor):
            return OTHER_VALUES
        if math.inf in told.norms:
            return ""  # all complain of that member, and exchange again
        is_possible = all(
            abs(product) <= (1 + 10 * ROUNDING) * most + floor
            for product, most in zip(told.products, reach, strict=True)
        )
        if not is_possible:
            return NO_MEANS
        rounding = ROUNDING * math.fsum(reach) + floor
        return "" if math.fsum(told.products) + rounding >= self._square / 2 else NO_MEANS

    def _is_own(self, shares: Sequence[dict[int, Share]], told: Told, reach: float, floor: float) -> bool:
        """Whether the norm and the product of this member are right."""
        norm, least = math.sqrt(self._own_square), math.sqrt(floor)
        if norm > LARGEST_FLOAT32:  # told as infinite
            return True
        own_shares = (share[self._rank] for share in shares)
        product = math.fsum(
            share.unscaled * unscaled + share.scaled * scaled
            for share, (unscaled, scaled) in zip(own_shares, self._products, strict=True)
        )
        is_norm = abs(told.norms[self._rank] - norm) <= self._tolerance * norm + least
        return is_norm and abs(told.products[self._rank] - product) <= self._tolerance * reach * (norm + least) + floor
