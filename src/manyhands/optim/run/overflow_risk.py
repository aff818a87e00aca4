"""Whether an update may end with values that are not finite, so that all that it changes must be saved before it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from manyhands.optim.lamb import Lamb

LARGE_NORM = 1e10
"""Of a gradient: its square, and an optimizer's sums of squares, stay finite in float32 far above it."""
LARGE_VALUE = 1e18
LARGE_OPTION = 1e4
"""A value below the one may be squared, or multiplied by some options below the other."""
SMALL_EPS = 1e-20
KNOWN_OPTIMIZERS = frozenset({torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, Lamb})
"""Whose update of a moderate gradient is finite by its formula. Of any other, a subclass say, nothing is known."""


def may_overflow(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], gradient_norm: float) -> bool:
    """Whether the next step of an optimizer could spoil parameters or statistics.

    Reads all of them once; the copy that this saves would need as much memory as the statistics.
    """
    if type(optimizer) not in KNOWN_OPTIMIZERS or gradient_norm > LARGE_NORM:
        return True
    if any(parameter.dtype == torch.float16 for parameter in parameters):  # its largest value is 65504
        return True
    if any(_is_wild(group) for group in optimizer.param_groups):
        return True
    return not _largest_norm([*parameters, *statistics_of(optimizer)]) < LARGE_VALUE


def statistics_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The floating-point tensors of an optimizer's state."""
    values = [value for statistics in optimizer.state.values() for value in statistics.values()]
    return [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]


def _is_wild(group: dict[str, object]) -> bool:
    options = [float(value) for value in group.values() if isinstance(value, float | int | torch.Tensor)]
    eps = group.get("eps", 1.0)
    is_small = isinstance(eps, float | int) and eps < SMALL_EPS  # zero divided by zero
    is_growing = isinstance(momentum := group.get("momentum", 0.0), float | int) and not abs(momentum) < 1
    return is_small or is_growing or any(not abs(option) <= LARGE_OPTION for option in options)


def _largest_norm(tensors: Sequence[torch.Tensor]) -> float:
    """The largest Euclidean norm, which no value exceeds; torch finds it nine times as fast as the largest value."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
    # one call for all that are alike: on a GPU one kernel
    norms = [torch.stack(torch._foreach_norm(its_tensors)).float().max().item() for its_tensors in by_kind.values()]  # noqa: SLF001
    return math.nan if any(map(math.isnan, norms)) else max(norms, default=0.0)
