"""One step of the wrapped optimizer with the averaged gradient, refused when it would spoil the parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from manyhands.optim.flat import GradientLayout, are_finite
from manyhands.optim.run.overflow_risk import may_overflow, statistics_of
from manyhands.optim.state.state import parameters_of


def guarded_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    layout: GradientLayout,
    averaged_N: torch.Tensor,
    *,
    max_grad_norm: float | None,
    spare_N: torch.Tensor | None,
) -> str:
    """Clip the averaged gradient, and make the step if it leaves the parameters finite.

    When the optimizer raises, the parameters are what they were.

    All peers have the same vector, parameters and statistics, so all refuse the same steps.

    Args:
        parameters: those that are trained, as they lie in the vector.
        averaged_N: its gradients are clipped in place.
        max_grad_norm: bound of the norm of all gradients together.
        spare_N: memory like that of ``averaged_N``, to remember the parameters in; without it more is taken.
    Returns:
        Why the step was refused, in which case nothing has changed; or nothing.
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
    before = _remembered(parameters, layout, spare_N)
    statistics = _copied(optimizer) if may_overflow(optimizer, parameters, norm) else None

    def take_back() -> None:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
        if statistics is not None:
            optimizer.state.clear()
            optimizer.state.update(statistics)

    try:
        with layout.installed(parameters, averaged_N, frozen):
            optimizer.step()
        is_finite = are_finite(parameters) and (statistics is None or are_finite(statistics_of(optimizer)))
    except BaseException:
        take_back()
        raise
    if is_finite:
        return ""
    take_back()
    return "with it, the parameters or the optimizer's statistics would not be finite"


def move_statistics(optimizer: torch.optim.Optimizer) -> None:
    """Have the statistics of each parameter where it is now: its model may be moved to a GPU once they are there."""
    for parameter, statistics in optimizer.state.items():
        for name, value in statistics.items():
            is_like_it = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape
            if is_like_it and value.device != parameter.device:
                statistics[name] = value.to(parameter.device)


def global_norm(tensors: Sequence[torch.Tensor]) -> float:
    """The Euclidean norm of all values together, in float32."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(norms)).item() if norms else 0.0


def _remembered(
    parameters: Sequence[torch.Tensor], layout: GradientLayout, spare_N: torch.Tensor | None
) -> list[torch.Tensor]:
    """The values of all parameters; in the spare memory where it can hold them exactly."""
    views = layout.views(spare_N)[0] if spare_N is not None else [None] * len(parameters)
    return [
        view.copy_(parameter.detach())
        if view is not None and parameter.dtype != torch.float64
        else parameter.detach().clone()
        for view, parameter in zip(views, parameters, strict=True)
    ]


def _copied(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, object]]:
    return {
        parameter: {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in statistics.items()
        }
        for parameter, statistics in optimizer.state.items()
    }
