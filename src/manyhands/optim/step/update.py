"""Makes one step of the wrapped optimizer with the averaged gradient, and undoes it if the result is not finite."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from manyhands.optim.flat import GradientLayout, are_finite
from manyhands.optim.run.drift import KNOWN_OPTIMIZERS
from manyhands.optim.state.state import parameters_of
from manyhands.optim.state.tree import tensors_in, with_tensors

LARGE = 1e7
"""Known optimizers multiply at most five numbers: SGD the learning rate, momentum, dampening, weight decay and a value.
If each is below this, the product is finite in float32."""
SMALLEST_EPS = 1e-20
"""A value below ``LARGE``, divided by this and multiplied by such a learning rate, is finite, too."""


def guarded_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    layout: GradientLayout,
    averaged_N: torch.Tensor,
    max_grad_norm: float | None = None,
) -> str:
    """Clip the averaged gradient and make a step with it; if the result is not finite, undo it and return the reason.

    All peers have the same vector, parameters and statistics, so all refuse the same steps. The norm that is bounded is
    that of all gradients together.
    """
    values_N = averaged_N[: layout.num_values]
    norm = global_norm([values_N])  # finite only if all of them are
    if not math.isfinite(norm) or not are_finite([averaged_N[layout.num_values :]]):
        return "the averaged gradient is not finite, or its square is not"
    if max_grad_norm is not None and norm > max_grad_norm:
        values_N.mul_(max_grad_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ does
        norm = max_grad_norm
    trained = set(map(id, parameters))
    frozen = [parameter for parameter in parameters_of(optimizer) if id(parameter) not in trained]
    is_finite = _is_surely_finite(optimizer, parameters, norm)
    values = [] if is_finite else [parameter.detach().clone() for parameter in parameters]
    memo: dict[int, Any] = {}  # one tensor may be a statistic of several parameters
    statistics = {} if is_finite else {of: copy.deepcopy(those, memo) for of, those in optimizer.state.items()}
    try:
        with layout.installed(parameters, averaged_N, frozen):
            optimizer.step()
        is_finite = is_finite or are_finite([*parameters, *_statistics_of(optimizer)])
    finally:
        if not is_finite:
            with torch.no_grad():
                for parameter, value in zip(parameters, values, strict=True):
                    parameter.copy_(value)
            optimizer.state.clear()
            optimizer.state.update(statistics)
    return "" if is_finite else "with it, the parameters or the optimizer's statistics would not be finite"


def move_statistics(optimizer: torch.optim.Optimizer) -> None:
    """Move each parameter's statistics to its device: the model may move to a GPU after they were created."""

    def beside(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.to(parameter.device) if value.dim() > 0 and value.shape == parameter.shape else value

    for parameter, statistics in optimizer.state.items():
        if isinstance(parameter, torch.Tensor):
            optimizer.state[parameter] = with_tensors(statistics, functools.partial(beside, parameter))


def global_norm(tensors: Sequence[torch.Tensor]) -> float:
    """The Euclidean norm of all values together, in float32."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(norms)).item() if norms else 0.0


def _is_surely_finite(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], gradient_norm: float
) -> bool:
    """Whether the optimizer's formula guarantees a finite update, as all its inputs are moderate."""
    groups = optimizer.param_groups
    options = [value for group in groups for value in group.values() if isinstance(value, float | int | torch.Tensor)]
    if type(optimizer) not in KNOWN_OPTIMIZERS or any(parameter.dtype == torch.float16 for parameter in parameters):
        return False  # the largest value of float16 is 65504
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in (*parameters, *_statistics_of(optimizer)):
        if tensor.numel():
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
    # a kernel for a kind, and one wait; NaN if there is one
    norms = [torch.stack(torch._foreach_norm(kind)).float().max().item() for kind in by_kind.values()]  # noqa: SLF001
    sizes = (gradient_norm, *map(float, options), *norms)
    return all(abs(size) < LARGE for size in sizes) and all(group.get("eps", 1.0) >= SMALLEST_EPS for group in groups)


def _statistics_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for value in tensors_in(dict(optimizer.state)) if value.is_floating_point()]
