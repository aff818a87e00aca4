"""A small model, the ways to wrap its optimizer, and one peer that trains it in virtual time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from manyhands.optim.local_steps import LocalSteps
from tests.simulation.swarm_of_trainers import Member, Swarm

Weights = dict[str, torch.Tensor]

MODES: dict[str, dict[str, Any]] = {
    "here": {},
    "offload": {"offload": True},
    "delayed step": {"delay": "optimizer"},
    "delayed gradients": {"delay": "gradients"},
    "local": {"local_steps": LocalSteps()},
    "local, offload": {"local_steps": LocalSteps(), "offload": True},
}
in_each_mode = pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=mode, marks=[pytest.mark.long] * (mode in ("offload", "delayed step", "local")))
        for mode, options in MODES.items()
    ],
)
"""The others are in ``make test-long``: each of their parts is in one of these too."""


def new_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def half_model() -> torch.nn.Module:
    return new_model().to(torch.bfloat16)


def loss_of(model: torch.nn.Module, number: int) -> torch.Tensor:
    """The loss of batch ``number``, of four samples."""
    generator = torch.Generator().manual_seed(number)
    inputs, targets = (torch.randn(4, size, generator=generator) for size in (4, 2))
    dtype = next(model.parameters()).dtype
    return torch.nn.functional.mse_loss(model(inputs.to(dtype)), targets.to(dtype))


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def alone(
    train: Callable[[Member], None],
    make_model: Callable[[], torch.nn.Module] = new_model,
    make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] = adam,
    **options: Any,
) -> Member:
    """Run one peer's program; each of its batches makes a step, unless ``options`` say otherwise."""
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    swarm = Swarm()
    settings = {"target_batch_size": 4, "batch_size_per_step": 4, **options}
    swarm.start("p0", make_model, make_optimizer, train, **settings)
    swarm.run()
    return swarm.members["p0"]


def copied(model: torch.nn.Module) -> Weights:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_has(has: torch.nn.Module | Weights, weights: Weights, within: float = 0.0) -> None:
    """All parameters are these, up to a difference."""
    for name, value in (has.state_dict() if isinstance(has, torch.nn.Module) else has).items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=within)
