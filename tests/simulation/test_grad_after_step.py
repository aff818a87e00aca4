"""``step()`` leaves ``.grad`` as it is, and an optimizer may keep the gradients that it gets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from manyhands.testing import between
from tests.simulation.swarm_of_trainers import BATCH_S, Member, Swarm, together
from tests.sweeps import few_of

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 4
BATCH_SIZE = 4
MAX_NORM = 0.05
"""Below that of all gradients here."""
NAMES = ("p0", "p1")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("manyhands").setLevel(logging.ERROR)


def new_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def loss_of(model: torch.nn.Module, *numbers: int) -> torch.Tensor:
    """The mean over the samples of some batches."""
    losses = []
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        inputs, targets = (
            torch.randn(BATCH_SIZE, 4, generator=generator),
            torch.randn(BATCH_SIZE, 2, generator=generator),
        )
        losses.append(torch.nn.functional.mse_loss(model(inputs), targets))
    return torch.stack(losses).mean()


def gradients_of(model: torch.nn.Module) -> list[torch.Tensor]:
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [gradient.clone() for gradient in gradients if gradient is not None]


def assert_close(ours: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for one, other in zip(ours, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class Keeping(torch.optim.SGD):
    """Keeps the gradients of its last step in its state, and each first one for ever."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["last"] = parameter.grad
                state.setdefault("first", parameter.grad.view(-1))
        return super().step(closure)


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"delay": "gradients"}], ids=str)
def test_an_optimizer_alone_may_keep_the_gradients_that_it_was_given(options: dict[str, Any]) -> None:
    """They lie in the memory in which the next batches were added up, if nobody keeps them."""

    def train(member: Member) -> None:
        optimizer = member.optimizer
        for number in range(NUM_STEPS):
            kept = [(one, one.clone()) for values in optimizer.inner.state.values() for one in values.values()]
            for _ in range(2):
                member.step(loss_of(member.model, number))
                assert all(torch.equal(one, copy) for one, copy in kept)
            optimizer.settle()
            assert all(torch.equal(one, copy) for one, copy in kept)
        assert optimizer.statistics.steps_alone >= NUM_STEPS - 1

    swarm = Swarm(seed=3)
    swarm.start(
        "p0", new_model, lambda model: Keeping(model.parameters(), lr=0.1), train,
        target_batch_size=2 * BATCH_SIZE, batch_size_per_step=BATCH_SIZE, **options,
    )  # fmt: skip
    swarm.run()


def pair(train: Callable[[Member], None], **options: Any) -> Swarm:
    swarm = Swarm(seed=3)
    for name in NAMES:
        swarm.start(
            name, new_model, sgd, train,
            **{"target_batch_size": 8 * BATCH_SIZE, "batch_size_per_step": BATCH_SIZE, **options},
        )  # fmt: skip
    return swarm


@pytest.mark.parametrize(
    "options",
    few_of(
        [{"delay": "gradients"}, {"max_grad_norm": MAX_NORM}, {}, {"offload": True}, {"delay": "optimizer"}],
        1,
        pytest.mark.long,
    ),
    ids=str,
)
def test_gradients_stay_as_they_were_after_a_step(options: dict[str, Any]) -> None:
    """In the same tensors, whether a step is made, fails or is not due."""

    def train(member: Member) -> None:
        together(2, member)
        optimizer, number = member.optimizer, 100 * NAMES.index(member.name)
        while member.peer.time() < 60.0:
            number += 1
            member.peer.sleep(BATCH_S)
            loss_of(member.model, number).backward()  # type: ignore[no-untyped-call]
            before = [(parameter.grad, parameter.grad.clone()) for parameter in member.model.parameters()]
            optimizer.step()
            for parameter, (tensor, values) in zip(member.model.parameters(), before, strict=True):
                assert parameter.grad is tensor
                assert torch.equal(tensor, values)
            optimizer.zero_grad()
        optimizer.settle()
        assert optimizer.global_step >= 6

    swarm = pair(train, **options)
    swarm.world.schedule(between(20.0, 32.0).partition({"p0"}, {"p1"}))
    swarm.run()
    assert sum(member.optimizer.statistics.rounds_aborted for member in swarm.members.values()) >= 1


class Refusing(torch.optim.SGD):
    """Raises in its second step."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        if self.num_steps == 2:
            raise ZeroDivisionError
        return super().step(closure)


def test_an_optimizer_that_raises_leaves_the_gradient_that_it_was_given() -> None:
    def train(member: Member) -> None:
        loss_of(member.model, 1).backward()  # type: ignore[no-untyped-call]
        member.optimizer.step()
        member.optimizer.zero_grad()
        loss_of(member.model, 2).backward()  # type: ignore[no-untyped-call]
        before = gradients_of(member.model)
        with pytest.raises(ZeroDivisionError):
            member.optimizer.step()
        assert_close(gradients_of(member.model), before)

    swarm = Swarm(seed=3)
    swarm.start(
        "p0", new_model, lambda model: Refusing(model.parameters(), lr=0.1), train,
        target_batch_size=BATCH_SIZE, batch_size_per_step=BATCH_SIZE,
    )  # fmt: skip
    swarm.run()
