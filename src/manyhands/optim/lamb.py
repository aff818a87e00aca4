"""LAMB, which torch does not have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from manyhands.base.errors import ConfigError


class Lamb(torch.optim.Optimizer):
    """Adam with a step for each tensor whose norm is that of the tensor itself, times the learning rate.

    With ``m`` and ``v`` the averages of Adam, for each tensor ``x``::

        r = m / (sqrt(v) + eps) + weight_decay * x
        x = x - lr * min(norm(x), clamp_value) / norm(r) * r

    Where one of the norms is zero, the factor of ``r`` is ``lr`` alone.

    Args:
        clamp_value: bound of ``norm(x)``: the upper bound of phi in the paper.
        debias: correct ``m`` and ``v`` for their start from zero, as the paper does; without it, a warm-up of the
            learning rate should take care of that.
    Raises:
        ConfigError: a value breaks its rule.
    Source: You et al., Large Batch Optimization for Deep Learning, arXiv:1904.00962, algorithm 2.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        clamp_value: float = 10.0,
        debias: bool = True,
    ) -> None:
        if not lr >= 0:
            raise ConfigError(f"lr={lr} must be at least 0; for example 0.00176")
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"betas={betas} must be from 0 to below 1; for example (0.9, 0.999)")
        if not eps >= 0 or not weight_decay >= 0:
            raise ConfigError(
                f"eps={eps} and weight_decay={weight_decay} must be at least 0; for example 1e-6 and 0.01"
            )
        if not clamp_value > 0:
            raise ConfigError(f"clamp_value={clamp_value} must be above 0; for example 10000.0")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "clamp_value": clamp_value}
        super().__init__(params, {**defaults, "debias": debias})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; ``closure`` computes the loss and its gradients again, and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if gradient.is_sparse:
            raise ConfigError("Lamb takes no sparse gradients; give these parameters to torch.optim.SparseAdam")
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        num_steps = state["step"] if group["debias"] else math.inf
        mean_bias, square_bias = 1 - beta1**num_steps, 1 - beta2**num_steps
        direction = (mean / mean_bias).div_((square / square_bias).sqrt_().add_(group["eps"]))
        if group["weight_decay"]:
            direction.add_(parameter, alpha=group["weight_decay"])
        precision = torch.promote_types(parameter.dtype, torch.float32)
        length = torch.linalg.vector_norm(parameter, dtype=precision).clamp_(max=group["clamp_value"])
        norm = torch.linalg.vector_norm(direction, dtype=precision)
        trust = torch.where((length > 0) & (norm > 0), length / norm, torch.ones_like(norm))
        parameter.sub_(direction.mul_((group["lr"] * trust).to(direction.dtype)))
