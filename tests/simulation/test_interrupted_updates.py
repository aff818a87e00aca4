"""What comes between the update of a step and its end: Ctrl-C, or an error of the user's schedule."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from manyhands.base.errors import Timeout
from manyhands.optim.step.global_step import GlobalStep
from tests.simulation.swarm_of_trainers import Member, Swarm, assert_equal_parameters, together

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 4
BAD_STEP = 2


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("manyhands").setLevel(logging.ERROR)


def new_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Linear(3, 2)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    return sum((parameter - 1).square().mean() for parameter in model.parameters())  # type: ignore[return-value]


def scheduler_that(acts: Callable[[], None]) -> Callable[[torch.optim.Optimizer], Any]:
    """One that does something in the midst of a step."""
    num_looks = 0

    def factor(step: int) -> float:
        nonlocal num_looks
        num_looks += step == BAD_STEP
        if step == BAD_STEP and num_looks == 2:  # it was asked before the first step what its learning rates are
            acts()
        return 0.9**step

    return lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, factor)


def run(acts: Callable[[], None], error: type[BaseException], **options: Any) -> tuple[Swarm, int]:
    """Two peers that train; returns them, and how often the error came out of ``step()`` or ``settle()``."""
    num_errors = 0

    def guarded(what: Callable[[], None]) -> None:
        nonlocal num_errors
        try:
            what()
        except error:
            num_errors += 1

    def train(member: Member) -> None:
        together(2, member)
        for step in range(NUM_STEPS):
            guarded(lambda: member.step(loss_of(member.model)))
            guarded(lambda step=step: member.wait_for(step + 1))  # type: ignore[misc]
            guarded(member.optimizer.settle)
            member.optimizer.zero_grad()
            assert member.optimizer.global_step == step + 1
            assert not member.optimizer.is_stepping
            member.check_samples()

    swarm = Swarm(seed=3)
    for name in ("p0", "p1"):
        swarm.start(
            name, new_model, sgd, train,
            target_batch_size=8, batch_size_per_step=4, scheduler=scheduler_that(acts), **options,
        )  # fmt: skip
    swarm.run()
    return swarm, num_errors


def assert_all_steps_were_made(swarm: Swarm) -> None:
    plain = new_model()
    optimizer = sgd(plain)
    schedule = scheduler_that(lambda: None)(optimizer)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(plain).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    for member in swarm.members.values():
        counts = member.optimizer.statistics
        assert (counts.rounds_committed, counts.samples_dropped, counts.states_loaded) == (NUM_STEPS, 0, 0), counts
        assert counts.samples_used == counts.samples_computed
        assert_equal_parameters(member.model, plain)


@pytest.mark.parametrize("offload", [False, True])
def test_an_interrupt_in_an_update_is_raised_when_the_step_is_made(offload: bool) -> None:
    swarm, num_errors = run(lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt, offload=offload)
    assert num_errors == 2
    assert_all_steps_were_made(swarm)
    assert len({member.optimizer.state_digest() for member in swarm.members.values()}) == 1


@pytest.mark.parametrize("delay", [None, "optimizer", "gradients"])
def test_a_schedule_that_raises_does_so_when_the_step_is_made(delay: str | None) -> None:
    """The learning rate stays what it was, as with plain torch."""

    def raise_it() -> None:
        raise ZeroDivisionError

    swarm, num_errors = run(raise_it, ZeroDivisionError, delay=delay)
    assert num_errors == 2
    for member in swarm.members.values():
        counts = member.optimizer.statistics
        assert (counts.rounds_committed, counts.samples_dropped, counts.states_loaded) == (NUM_STEPS, 0, 0), counts
    assert len({member.optimizer.state_digest() for member in swarm.members.values()}) == 1


@pytest.mark.parametrize("delay", [None, "gradients"])
def test_a_step_goes_on_if_the_network_thread_cannot_be_told_of_it(
    delay: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was blocked, say. Then this peer looks as if it had missed the step, and loads the state."""
    original: Any = GlobalStep.announce
    num_blocked = 0

    def blocked_once(step: GlobalStep, collaboration: Any) -> None:
        nonlocal num_blocked
        if step.left_from.step == BAD_STEP and not num_blocked:
            num_blocked += 1
            raise Timeout("moving on", 60.0)
        original(step, collaboration)

    def train(member: Member) -> None:
        together(2, member)
        while member.optimizer.global_step < NUM_STEPS:
            member.step(loss_of(member.model))
            member.check_samples()
        member.optimizer.settle()
        member.wait_for(max(other.optimizer.global_step for other in swarm.members.values()))

    monkeypatch.setattr(GlobalStep, "announce", blocked_once)
    swarm = Swarm(seed=3)
    for name in ("p0", "p1"):
        swarm.start(name, new_model, sgd, train, target_batch_size=8, batch_size_per_step=4, delay=delay)
    swarm.run()
    assert num_blocked == 1
    assert sum(member.optimizer.statistics.states_loaded for member in swarm.members.values()) == (delay is None)
    assert sum(member.optimizer.statistics.steps_alone for member in swarm.members.values()) == 0
