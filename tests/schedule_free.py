"""An optimizer whose model has other parameters to train than to evaluate."""

from __future__ import annotations

from typing import Any

import torch


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """Schedule-free AdamW as its authors publish it: it trains y, and evaluates x; z is a statistic.

    Source: Defazio et al., The Road Less Scheduled, arXiv:2405.15682.
    """

    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": 1e-8,
            "k": 0,
            "train_mode": False,
            "weight_sum": 0.0,
            "lr_max": -1.0,
        }
        super().__init__(params, options)

    @torch.no_grad()
    def eval(self) -> None:
        """Have the parameters be x."""
        for group in self.param_groups:
            if group["train_mode"]:
                self._move(group, 1 - 1 / group["betas"][0])
            group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        """Have the parameters be y."""
        for group in self.param_groups:
            if not group["train_mode"]:
                self._move(group, 1 - group["betas"][0])
            group["train_mode"] = True

    def _move(self, group: dict[str, Any], weight: float) -> None:
        for parameter in group["params"]:
            statistics = self.state[parameter]
            if "z" in statistics:
                parameter.lerp_(end=statistics["z"].to(parameter.device), weight=weight)

    def num_steps(self, *, plus: int = 0) -> int:
        """A public method that changes nothing."""
        return int(self.param_groups[0]["k"]) + plus

    @torch.no_grad()
    def halve(self) -> None:
        """A public method that changes the parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raises ``RuntimeError`` unless :meth:`train` was called."""
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("Optimizer was not in train mode when step is called.")
        for group in self.param_groups:
            (beta1, beta2), lr, number = group["betas"], group["lr"], group["k"] + 1
            largest = group["lr_max"] = max(lr, group["lr_max"])
            group["weight_sum"] += largest**2
            share = largest**2 / group["weight_sum"]
            for y in group["params"]:
                if y.grad is None:
                    continue
                statistics = self.state[y]
                if "z" not in statistics:
                    statistics["z"] = y.clone()
                    statistics["exp_avg_sq"] = torch.zeros_like(y)
                z, squares = statistics["z"], statistics["exp_avg_sq"]
                squares.mul_(beta2).addcmul_(y.grad, y.grad, value=1 - beta2)
                normalized = y.grad.div_((squares / (1 - beta2**number)).sqrt_().add_(group["eps"]))
                y.lerp_(end=z, weight=share)
                y.add_(normalized, alpha=lr * (beta1 * (1 - share) - 1))
                z.sub_(normalized, alpha=lr)
            group["k"] = number
