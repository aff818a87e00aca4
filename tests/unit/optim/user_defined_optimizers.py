"""Optimizers of users' own, with states as those of published optimizers are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch

Make = Callable[[Any], torch.optim.Optimizer]


class Own(torch.optim.Optimizer):
    """Changes each parameter by what :meth:`direction` makes of its gradient and its state."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    change = self.direction(parameter, parameter.grad, self.state[parameter])
                    parameter.sub_(change.to(parameter), alpha=group["lr"])

    def direction(self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        raise NotImplementedError


class Normalised(Own):
    """Divides by the norm of the gradient, as LARS does without an epsilon."""

    def direction(self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return grad / grad.norm()


class Shampoo(Own):
    """Has a matrix of each dimension, larger than the parameter."""

    def direction(self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        matrix = grad.reshape(len(grad), -1)
        if not state:
            state.update(step=0, left=torch.eye(len(matrix)), right=torch.eye(matrix.shape[1]))
        state["step"] += 1
        state["left"] += matrix @ matrix.T
        state["right"] += matrix.T @ matrix
        return (torch.linalg.solve(state["left"], matrix) @ state["right"].inverse()).view_as(grad)


class Soap(Own):
    """Keeps lists, among them a hole, and nested dicts with other keys than texts."""

    def direction(self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if not state:
            state["GG"] = [torch.zeros(size, size) for size in grad.shape] + [[]]
            state["by_step"] = {0: {"norm": torch.zeros(())}, (1, "a"): None}
            state["shape"], state["mode"], state["$odd"] = grad.shape, "eigen", True
        for axis, matrix in enumerate(state["GG"][:-1]):
            others = [other for other in range(grad.dim()) if other != axis]
            matrix.lerp_(torch.tensordot(grad, grad, (others, others)), 0.1)
        state["by_step"][0]["norm"] += grad.norm()
        assert state["mode"] == "eigen"
        assert state["by_step"][1, "a"] is None
        return grad * (1 + sum(matrix.trace() for matrix in state["GG"][:-1])) / state["by_step"][0]["norm"]


class Many(Own):
    """Keeps the last twelve gradients, each in a tensor of its own."""

    def direction(self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if not state:
            state.update({f"grad{number}": torch.zeros_like(grad) for number in range(12)}, next=0)
        state[f"grad{state['next']}"].copy_(grad)
        state["next"] = (state["next"] + 1) % 12
        return sum((state[f"grad{number}"] for number in range(12)), torch.zeros_like(grad))


class Shared(Own):
    """Keeps something for all parameters under texts, and one tensor in the state of each."""

    def direction(self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        every: Any = self.state
        if "all" not in every:
            every["all"], every["norms"] = {"count": 0, "sum": torch.zeros(())}, torch.ones(2)
        every["all"]["count"] += 1
        every["all"]["sum"] += grad.sum()
        every["norms"] += grad.norm()
        first = self.state[self.param_groups[0]["params"][0]]
        state.setdefault("steps", first.get("steps", torch.zeros(())))
        if state is first:
            state["steps"] += 1  # for all of them
        return grad * every["all"]["sum"] / every["norms"].sum() / state["steps"] + every["all"]["count"]


class Typed(Own):
    """Keeps tuples, integers, and numbers of NumPy and of more than 64 bits."""

    def direction(self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if not state:
            state.update(signs=torch.zeros_like(grad, dtype=torch.int8), is_new=torch.ones(2, dtype=torch.bool))
            state.update(pair=(torch.zeros_like(grad), 0), scale=numpy.float32(1.1), seed=numpy.int64(7), large=1 << 80)
        assert isinstance(state["scale"], numpy.float32)
        assert isinstance(state["seed"], numpy.int64)
        assert state["large"] == 1 << 80
        state["signs"] += grad.sign().to(torch.int8)
        state["is_new"].logical_not_()
        state["scale"] *= numpy.float32(1.01)
        mean, count = state["pair"]
        state["pair"] = (mean.lerp(grad, 0.5), count + 1)
        return state["pair"][0] * float(state["scale"]) + state["signs"] * 1e-3 * (2 - state["is_new"].sum())


class Rounded(Own):
    """Keeps its momentum in half precision beside float32 parameters."""

    def direction(self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if not state:
            state["momentum"] = torch.zeros_like(grad, dtype=torch.bfloat16)
        assert state["momentum"].dtype == torch.bfloat16
        state["momentum"].mul_(0.9).add_(grad)
        return state["momentum"].float()


class Masters(Own):
    """Makes its steps on copies in float32, beside parameters of half precision."""

    def direction(self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if not state:
            state["master"] = parameter.float().clone()
        assert state["master"].dtype == torch.float32
        state["master"].sub_(grad.float(), alpha=1e-3)
        return (parameter.float() - state["master"]) / self.param_groups[0]["lr"]


class ScheduleFree(Own):
    """Trains on ``y`` and evaluates ``x``, each in place of the parameters, as the optimizers of that name do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, train_mode=False, k=0)
        self.train()

    def train(self) -> None:
        self._turn(to_train=True, weight=0.1)

    def eval(self) -> None:
        self._turn(to_train=False, weight=1 - 1 / 0.9)

    @torch.no_grad()
    def _turn(self, *, to_train: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not to_train:
                group["train_mode"] = to_train
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], weight)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            group["k"] += 1
        return super().step(closure)

    def direction(self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if not state:
            state["z"] = parameter.clone()
        state["z"].sub_(grad, alpha=0.1)
        return parameter - torch.lerp(parameter, state["z"], 1 / self.param_groups[0]["k"])


class WithAttributes(Own):
    """Has attributes of its own, one of which is a bound method."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.decay = 0.9
        self.remember = self._remember

    def _remember(self, state: dict[str, Any], grad: torch.Tensor) -> torch.Tensor:
        state["mean"] = state.get("mean", torch.zeros_like(grad)).lerp(grad, 1 - self.decay)
        return state["mean"]

    def direction(self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return self.remember(state, grad)


class NeedsMore(Own):
    """Cannot make a step without being told the loss."""

    loss: float | None = None

    def direction(self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if self.loss is None:
            raise RuntimeError("tell me the loss")
        state["losses"] = [*state.get("losses", []), self.loss]
        return grad * self.loss


class Holding(Own):
    """Keeps a value of which nobody knows what it is."""

    def __init__(self, params: Any, value: Any) -> None:
        super().__init__(params)
        self.value = value

    def direction(self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["held"] = {"of": [self.value]}
        return grad


OWN: dict[str, Make] = {
    "divides by the gradient's norm": Normalised,
    "larger than its parameter": Shampoo,
    "lists and dicts": Soap,
    "twelve tensors": Many,
    "under texts": Shared,
    "of many types": Typed,
    "in another dtype": Rounded,
    "masters": Masters,
    "schedule-free": ScheduleFree,
    "with attributes": WithAttributes,
}
