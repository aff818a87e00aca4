"""A schedule is described by all that decides its learning rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from manyhands.optim.manifest import described_schedule
from manyhands.optim.state.check import ScheduleAtBegin


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def warm_up_then(total: int, milestone: int) -> Callable[[torch.optim.Optimizer], Any]:
    def make(inner: torch.optim.Optimizer) -> Any:
        parts = [lr_scheduler.LinearLR(inner, 0.1), lr_scheduler.CosineAnnealingLR(inner, total)]
        return lr_scheduler.SequentialLR(inner, parts, [milestone])

    return make


@pytest.mark.parametrize(
    ("one", "another"),
    [
        (lambda inner: lr_scheduler.StepLR(inner, 10), lambda inner: lr_scheduler.StepLR(inner, 11)),
        (lambda inner: lr_scheduler.StepLR(inner, 10), lambda inner: lr_scheduler.ExponentialLR(inner, 0.1)),
        (lambda inner: lr_scheduler.MultiStepLR(inner, [5, 9]), lambda inner: lr_scheduler.MultiStepLR(inner, [5, 8])),
        (warm_up_then(100, 5), warm_up_then(101, 5)),
        (warm_up_then(100, 5), warm_up_then(100, 6)),
        (lambda inner: None, lambda inner: lr_scheduler.StepLR(inner, 10)),
    ],
)
def test_schedules_that_differ_are_described_differently(one: Any, another: Any) -> None:
    assert described_schedule(one(optimizer())) != described_schedule(another(optimizer()))


@pytest.mark.parametrize(
    "make",
    [
        lambda inner: lr_scheduler.StepLR(inner, 10),
        lambda inner: lr_scheduler.LambdaLR(inner, lambda step: 1.0),
        lambda inner: lr_scheduler.OneCycleLR(inner, 0.1, 100),
        warm_up_then(100, 5),
    ],
)
def test_the_description_is_that_of_the_schedule_and_not_of_how_far_it_is(make: Any) -> None:
    inner = optimizer()
    scheduler = make(inner)
    before = described_schedule(scheduler)
    assert before == described_schedule(make(optimizer()))
    for _ in range(3):
        inner.step()
        scheduler.step()
    assert described_schedule(scheduler) == before


def test_the_description_can_be_read() -> None:
    assert described_schedule(lr_scheduler.StepLR(optimizer(), 10)) == "StepLR(gamma=0.1, step_size=10)"
    assert described_schedule(warm_up_then(100, 5)(optimizer())) == (
        "SequentialLR(milestones=[5], LinearLR(end_factor=1.0, start_factor=0.1, total_iters=5), "
        "CosineAnnealingLR(T_max=100, eta_min=0.0))"
    )
    assert described_schedule(None) == ""


def warm_up(num_steps: int) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda inner: lr_scheduler.LambdaLR(inner, lambda step: min(1.0, (step + 1) / num_steps))


def rates(make: Callable[[torch.optim.Optimizer], Any], num_moves: int = 0) -> str:
    inner = optimizer()
    scheduler = make(inner)
    for _ in range(num_moves):
        inner.step()
        scheduler.step()
    return ScheduleAtBegin(scheduler).rates()


def test_functions_are_compared_by_the_learning_rates_that_they_give() -> None:
    assert rates(warm_up(10)) == "0.01, 0.02, 0.03, 0.05, 0.09, 0.1, 0.1, 0.1, 0.1, 0.1"
    assert rates(warm_up(20)).startswith("0.005, 0.01, 0.015, 0.025, 0.045, 0.085, 0.1, 0.1")
    groups = torch.optim.SGD(
        [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (0.1, 0.2, 0.1)], lr=0.1
    )
    assert ScheduleAtBegin(lr_scheduler.StepLR(groups, 100)).rates().startswith("0.1 and 0.2, 0.1 and 0.2")


@pytest.mark.parametrize(
    "make",
    [
        warm_up(10),
        warm_up_then(100, 5),
        lambda inner: lr_scheduler.OneCycleLR(inner, 0.1, 100),
        lambda inner: lr_scheduler.CosineAnnealingWarmRestarts(inner, 5, 2),
    ],
)
@pytest.mark.parametrize("num_moves", [1, 12])
def test_a_schedule_that_has_moved_already_gives_the_same_learning_rates(make: Any, num_moves: int) -> None:
    assert rates(make, num_moves) == rates(make)


def test_a_schedule_that_ends_gives_the_learning_rates_until_then() -> None:
    assert rates(lambda inner: lr_scheduler.OneCycleLR(inner, 0.1, 5)).count(",") == 3  # after 0, 1, 2 and 4 steps
    assert rates(lambda inner: lr_scheduler.LambdaLR(inner, lambda step: [1.0, 0.5][step])) == "0.1, 0.05"
