"""Parameters that are frozen, or trained again, while a run goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from manyhands.base.errors import ConfigError
from tests.simulation.swarm_of_trainers import Batch, Member, Swarm, assert_equal_parameters, cut, together

pytestmark = pytest.mark.usefixtures("one_thread")

TARGET = 8
NUM_STEPS = 9
FROZEN_STEPS = range(3, 6)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("manyhands").setLevel(logging.ERROR)


def new_model() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def with_a_frozen_body() -> torch.nn.Sequential:
    model = new_model()
    model[0].requires_grad_(False)
    return model


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.named_parameters(), lr=0.1, weight_decay=0.1)


def data_of_step(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(TARGET, 4, generator=generator), torch.randn(TARGET, 2, generator=generator)


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def half_of(member: Member, step: int) -> Batch:
    own = int(member.name[1:])
    return cut(data_of_step(step), [TARGET // 2, TARGET // 2])[own]


def pair(make_model: Callable[[], torch.nn.Module], train: Callable[[Member], None], *, offload: bool = False) -> Swarm:
    swarm = Swarm(seed=3)
    for name in ("p0", "p1"):
        swarm.start(
            name, make_model, adam, train,
            target_batch_size=TARGET, batch_size_per_step=TARGET // 2, max_grad_norm=1.0, offload=offload,
        )  # fmt: skip
    return swarm


def plain_steps(model: torch.nn.Module, steps: range, optimizer: torch.optim.Optimizer) -> None:
    for step in steps:
        loss_of(model, data_of_step(step)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("offload", [False, True])
def test_layers_frozen_for_some_steps_end_as_in_one_process(offload: bool) -> None:
    """Weight decay and momentum do not move it meanwhile."""

    def train(member: Member) -> None:
        body = member.model[0]  # type: ignore[index]
        together(2, member)
        for step in range(NUM_STEPS):
            body.requires_grad_(step not in FROZEN_STEPS)
            before = body.weight.detach().clone()
            member.step(loss_of(member.model, half_of(member, step)))
            member.wait_for(step + 1)
            assert torch.equal(before, body.weight) == (step in FROZEN_STEPS)

    swarm = pair(new_model, train, offload=offload)
    swarm.run()
    plain = new_model()
    optimizer = adam(plain)
    for step in range(NUM_STEPS):
        plain[0].requires_grad_(step not in FROZEN_STEPS)
        plain_steps(plain, range(step, step + 1), optimizer)
    for member in swarm.members.values():
        assert_equal_parameters(member.model, plain)
    assert len({member.optimizer.state_digest() for member in swarm.members.values()}) == 1


@pytest.mark.parametrize("offload", [False, True])
def test_a_parameter_that_the_run_does_not_train_is_refused_once_it_requires_grad(offload: bool) -> None:
    """Nothing is counted and nothing moves then; once it is frozen again training goes on, without the gradient."""

    def train(member: Member) -> None:
        body, optimizer = member.model[0], member.optimizer  # type: ignore[index]
        together(2, member)
        for step in range(2):
            member.step(loss_of(member.model, half_of(member, step)))
            member.wait_for(step + 1)
        before = member.model[2].weight.detach().clone()  # type: ignore[index]
        if member.name == "p0":
            body.requires_grad_(True)
            loss_of(member.model, half_of(member, 2)).backward()  # type: ignore[no-untyped-call]
            with pytest.raises(ConfigError, match=r"0\.weight was frozen when the Optimizer was made"):
                optimizer.step()
            assert optimizer.statistics.samples_computed == TARGET
            assert torch.equal(before, member.model[2].weight)  # type: ignore[index]
            body.requires_grad_(False)  # with a gradient of this peer alone in it
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            body.weight.grad.fill_(1.0)
        else:
            member.step(loss_of(member.model, half_of(member, 2)))
        member.wait_for(3)
        member.step(loss_of(member.model, half_of(member, 3)))
        member.wait_for(4)
        assert member.name == "p1" or body.weight.grad is None

    swarm = pair(with_a_frozen_body, train, offload=offload)
    swarm.run()
    plain = with_a_frozen_body()
    plain_steps(plain, range(4), adam(plain))
    for member in swarm.members.values():
        assert_equal_parameters(member.model, plain)
    assert len({member.optimizer.state_digest() for member in swarm.members.values()}) == 1
