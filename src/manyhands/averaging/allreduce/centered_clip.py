"""A mean that a minority of liars moves little: centered clipping.

It starts at the median of each value, which a minority cannot move beyond the others' values. Then each round adds the
weighted mean of the members' differences from where it is, and differences that are longer than those of most count
scaled down. Nobody counts for more than the median weight: weights are words, and three times the others' would be half
of a group of four. Without liars it is close to the plain mean; it is not exactly that, and costs more time and memory.

Source: Karimireddy et al., Learning from History for Byzantine Robust Optimization, arXiv:2012.10333, section 4. Within
a butterfly all-reduce, where each reducer has a part of the vector: Gorbunov et al., arXiv:2106.11257.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

ENOUGH = 3
"""The fewest members for centered clipping. Fewer have no majority to follow, and get their plain mean."""
ROUNDS = 3
"""From the median, further rounds change nothing that matters (``benchmarks/liars.py``)."""
FARTHEST = 1e6
"""Values farther than this from the median, in multiples of the usual distance, count as if they were there, or for
nothing if their distance is no number: they are clipped to 1 in any case, and their squares would overflow."""
BLOCK_NUMEL = 1 << 16
"""Values of which the median is computed at a time: those of several members fit into a processor's cache."""


def centered_clip(values: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """The mean of the members' values, robust against those of a minority.

    Args:
        values: finite, float32 or float64, shape [members, values].
        weights: positive, one for each member.

    Returns:
        Shape [values]; the members' common values if these are all equal.
    """
    median: torch.Tensor = torch.cat([_median(block) for block in torch.split(values, BLOCK_NUMEL, dim=1)])
    apart = values - median
    distances = torch.linalg.vector_norm(apart, dim=1)
    radius = float(distances.median())
    if not 0.0 < radius < math.inf:
        return median
    for row in torch.nonzero(distances > FARTHEST * radius).flatten():
        apart[row] = torch.nan_to_num(apart[row] * (FARTHEST * radius / distances[row]), posinf=0.0, neginf=0.0)
    capped = [min(weight, statistics.median(weights)) for weight in weights]
    shares = torch.tensor(capped, dtype=torch.float64) / math.fsum(capped)
    # where the rounds are is a sum of the differences from the median, so their products say all distances
    products = (apart @ apart.T).double()
    factors = torch.zeros_like(shares)
    for _ in range(ROUNDS):
        towards = products @ factors
        squares = products.diagonal() - 2 * towards + factors @ towards
        scales = (radius / squares.clamp(min=0.0).sqrt()).clamp(max=1.0)
        step = shares * scales
        factors = factors * (1 - step.sum()) + step
    return torch.add(median, factors.to(apart) @ apart)


def _median(values: torch.Tensor) -> torch.Tensor:
    """The median of each column; of an even number of members, the mean of the two in the middle."""
    rows: list[torch.Tensor] = list(values)
    for first in range(len(rows) // 2 + 1):  # the smallest of the rest moves there
        for row in range(len(rows) - 1, first, -1):
            one, other = rows[row - 1], rows[row]
            rows[row - 1], rows[row] = torch.minimum(one, other), torch.maximum(one, other)
    return torch.add(rows[(len(rows) - 1) // 2] / 2, rows[len(rows) // 2] / 2)
