"""What ``.grad`` is after ``step()``: as plain torch has it, once a step was made."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from manyhands.testing import between
from tests.simulation.swarm_of_trainers import BATCH_S, Member, Swarm, assert_equal_parameters, together

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 4
BATCH_SIZE = 4
MAX_NORM = 0.05
"""Below that of all gradients here."""
NAMES = ("p0", "p1")

Zero = Callable[[torch.optim.Optimizer], None]
ZEROS: dict[str, Zero] = {
    "to None": lambda optimizer: optimizer.zero_grad(),
    "to zero": lambda optimizer: optimizer.zero_grad(set_to_none=False),
    "never": lambda optimizer: None,
}


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


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("zero", list(ZEROS))
def test_a_loop_alone_sees_what_plain_torch_shows(zero: str, offload: bool) -> None:
    """Clipped, in the same tensors; so one that never zeroes them goes on from there."""

    def watch(model: torch.nn.Module, make_step: Callable[[], Any], optimizer: torch.optim.Optimizer) -> None:
        for number in range(NUM_STEPS):
            loss_of(model, number).backward()  # type: ignore[no-untyped-call]
            before = [parameter.grad for parameter in model.parameters()]
            make_step()
            assert all(one is two.grad for one, two in zip(before, model.parameters(), strict=True))
            seen.append(gradients_of(model))
            ZEROS[zero](optimizer)

    seen: list[list[torch.Tensor]] = []
    plain = new_model()
    optimizer = sgd(plain)

    def plain_step() -> None:
        torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
        optimizer.step()

    watch(plain, plain_step, optimizer)
    expected, seen = seen, []
    swarm = Swarm(seed=3)
    swarm.start(
        "p0", new_model, sgd, lambda member: watch(member.model, member.optimizer.step, member.optimizer),
        target_batch_size=BATCH_SIZE, batch_size_per_step=BATCH_SIZE, max_grad_norm=MAX_NORM, offload=offload,
    )  # fmt: skip
    swarm.run()
    assert swarm.members["p0"].optimizer.statistics.steps_alone == NUM_STEPS
    assert_equal_parameters(swarm.members["p0"].model, plain)
    for ours, others in zip(seen, expected, strict=True):
        assert_close(ours, others)


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


class Watch:
    """What a member's gradients were before and after each call of ``step()``, and what they should be."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._number = 100 * NAMES.index(member.name)
        self._applied: list[torch.Tensor] = []
        self.num_steps = self.num_failures = self.num_between = 0
        member.optimizer.inner.register_step_pre_hook(lambda inner, *_: self._note(inner))

    def _note(self, inner: torch.optim.Optimizer) -> None:
        self._applied = [one.grad.clone() for group in inner.param_groups for one in group["params"]]

    def batch(self) -> None:
        """Compute a batch, step, and look."""
        member, optimizer = self._member, self._member.optimizer
        self._number += 1
        member.peer.sleep(BATCH_S)
        loss_of(member.model, self._number).backward()  # type: ignore[no-untyped-call]
        own, counts = gradients_of(member.model), optimizer.statistics
        at_step, num_failed = optimizer.global_step, counts.rounds_aborted
        optimizer.step()
        if optimizer.global_step > at_step:
            expected = self._applied
            self.num_steps += 1
        else:
            expected = own
            self.num_failures += counts.rounds_aborted > num_failed
            self.num_between += 1
        assert_close(gradients_of(member.model), expected)
        optimizer.zero_grad()


def pair(train: Callable[[Member], None], **options: Any) -> Swarm:
    swarm = Swarm(seed=3)
    for name in NAMES:
        swarm.start(
            name, new_model, sgd, train,
            **{"target_batch_size": 8 * BATCH_SIZE, "batch_size_per_step": BATCH_SIZE, **options},
        )  # fmt: skip
    return swarm


@pytest.mark.parametrize("offload", [False, True])
def test_of_several_peers_after_each_call(offload: bool) -> None:
    """The averaged gradient after a step, else what it was, also after an attempt that failed."""
    watches: dict[str, Watch] = {}

    def train(member: Member) -> None:
        together(2, member)
        watch = watches[member.name] = Watch(member)
        while member.peer.time() < 60.0:
            watch.batch()

    swarm = pair(train, max_grad_norm=MAX_NORM, offload=offload)
    swarm.world.schedule(between(20.0, 32.0).partition({"p0"}, {"p1"}))
    swarm.run()
    for watch in watches.values():
        assert watch.num_steps >= 6
        assert watch.num_between >= 6
    assert sum(watch.num_failures for watch in watches.values()) >= 1


def test_a_call_that_counts_nothing_leaves_it_alone() -> None:
    """Even one that makes a step: the loop may be adding gradients up in there."""

    def train(member: Member) -> None:
        together(2, member)
        loss_of(member.model, 1).backward()  # type: ignore[no-untyped-call]
        member.optimizer.step()
        loss_of(member.model, 2).backward()  # type: ignore[no-untyped-call]
        before = gradients_of(member.model)
        member.wait_for(1)
        assert_close(gradients_of(member.model), before)

    pair(train, target_batch_size=2 * BATCH_SIZE).run()


@pytest.mark.parametrize("delay", ["optimizer", "gradients"])
def test_with_a_delay_it_stays_as_it_was(delay: str) -> None:
    def train(member: Member) -> None:
        together(2, member)
        for number in range(40):
            member.peer.sleep(BATCH_S)
            loss_of(member.model, number).backward()  # type: ignore[no-untyped-call]
            before = gradients_of(member.model)
            member.optimizer.step()
            assert_close(gradients_of(member.model), before)
            member.optimizer.zero_grad()
        member.optimizer.settle()
        assert member.optimizer.global_step >= 3

    pair(train, delay=delay).run()


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
