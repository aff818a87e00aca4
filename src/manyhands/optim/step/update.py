"""Makes one step of the wrapped optimizer with the averaged gradient, and undoes it if the result is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from manyhands.optim.flat import GradientLayout, are_finite
from manyhands.optim.run.drift import KNOWN_OPTIMIZERS
from manyhands.optim.state.state import parameters_of

LARGE = 1e7
"""Known optimizers multiply at most five numbers: SGD the learning rate, momentum, dampening, weight decay and a value.
If each is below this, the product is finite in float32, and no copy of the statistics is needed."""
SMALLEST_EPS = 1e-20
"""A value below ``LARGE``, divided by this and multiplied by such a learning rate, is finite, too."""


def guarded_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    layout: GradientLayout,
    averaged_N: torch.Tensor,
    *,
    max_grad_norm: float | None,
    spare_N: torch.Tensor | None,
) -> str:
    """Clip the averaged gradient and make a step with it; if the result is not finite, undo it and return the reason.

    If the optimizer raises, only the parameters are restored, where there is a copy. All peers have the same vector,
    parameters and statistics, so all refuse the same steps.

    Args:
        parameters: the trained ones, in the order of the vector.
        averaged_N: its gradients are clipped in place.
        max_grad_norm: bound of the norm of all gradients together.
        spare_N: memory of the same size for a copy of the parameters. Without it there is no copy if the formula of the
            optimizer guarantees a finite result and all parameters are on the host; else more is allocated.
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
    is_safe = _is_surely_finite(optimizer, parameters, norm)
    is_on_host = all(parameter.device.type == "cpu" for parameter in parameters)
    before = _copies(parameters, layout, spare_N) if spare_N is not None or not (is_safe and is_on_host) else []
    statistics = None if is_safe else _copied(optimizer)

    def take_back() -> None:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=bool(before)):
                parameter.copy_(value)
        if statistics is not None:
            optimizer.state.clear()
            optimizer.state.update(statistics)

    try:
        with layout.installed(parameters, averaged_N, frozen):
            optimizer.step()
        is_finite = are_finite(parameters) and (statistics is None or are_finite(_tensors_of(optimizer)))
    except BaseException:
        take_back()
        raise
    if is_finite:
        return ""
    take_back()
    return "with it, the parameters or the optimizer's statistics would not be finite"


def move_statistics(optimizer: torch.optim.Optimizer) -> None:
    """Move each parameter's statistics to its device: the model may move to a GPU after they were created."""
    for parameter, statistics in optimizer.state.items():
        for name, value in statistics.items():
            is_like_it = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape
            if is_like_it and value.device != parameter.device:
                statistics[name] = value.to(parameter.device)


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
    for tensor in (*parameters, *_tensors_of(optimizer)):
        if tensor.numel():
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
    # a kernel for a kind, and one wait; NaN if there is one
    norms = [torch.stack(torch._foreach_norm(kind)).float().max().item() for kind in by_kind.values()]  # noqa: SLF001
    sizes = (gradient_norm, *map(float, options), *norms)
    return all(abs(size) < LARGE for size in sizes) and all(group.get("eps", 1.0) >= SMALLEST_EPS for group in groups)


def _tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The floating-point tensors of an optimizer's statistics."""
    values = [value for statistics in optimizer.state.values() for value in statistics.values()]
    return [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]


def _copies(
    parameters: Sequence[torch.Tensor], layout: GradientLayout, spare_N: torch.Tensor | None
) -> list[torch.Tensor]:
    """Copies of all parameters, in the spare memory where it can hold them exactly."""
    views = layout.views(spare_N).values if spare_N is not None else [None] * len(parameters)
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
