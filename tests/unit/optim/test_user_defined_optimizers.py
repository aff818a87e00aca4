"""A newcomer goes on exactly as the others with any optimizer whose state can be sent, and its user hears of others."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

from manyhands.averaging.messages import Position
from manyhands.averaging.state.content import sealed
from manyhands.base.errors import ConfigError
from manyhands.optim.options import made_scheduler
from manyhands.optim.step.replica import Replica, trained_of
from tests.unit.optim.user_defined_optimizers import OWN, Holding, Make, NeedsMore, Own, ScheduleFree, WithAttributes


def new_replica(make: Make, dtype: torch.dtype = torch.float32, *, seed: int, **options: Any) -> Replica:
    torch.manual_seed(seed)
    optimizer = make(torch.nn.Linear(5, 8).to(dtype).parameters())
    schedule = made_scheduler(lambda inner: torch.optim.lr_scheduler.StepLR(inner, 100), optimizer)
    return Replica(optimizer, schedule, **options)


def train(replica: Replica, num_steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        for parameter in trained_of(replica.optimizer):
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        replica.optimizer.step()
        replica.position = Position(replica.position.step + 1, b"there")
        assert replica.scheduler is not None
        replica.scheduler.step()


def digest(replica: Replica) -> bytes:
    return sealed(replica.capture()).header.digest


CASES = [(kind, dtype, offload) for kind in OWN for dtype, offload in [(torch.float32, False), (torch.bfloat16, True)]]
CASES += [(kind, torch.bfloat16, False) for kind in ("masters", "schedule-free", "twelve tensors")]


@pytest.mark.parametrize(("kind", "dtype", "offload"), CASES)
def test_a_newcomer_goes_on_exactly_as_its_donor(kind: str, dtype: torch.dtype, offload: bool) -> None:
    there, here = (new_replica(OWN[kind], dtype, seed=seed, offload=offload) for seed in (0, 1))
    for num_steps in (0, 1, 3):
        train(there, num_steps, seed=num_steps)
        here.restore(there.capture())
        assert digest(here) == digest(there)
        train(there, 2, seed=9)
        train(here, 2, seed=9)
        assert digest(here) == digest(there)


@pytest.mark.parametrize("kind", OWN)
def test_a_checkpoint_is_exact_too(kind: str) -> None:
    there, here = (new_replica(OWN[kind], seed=seed) for seed in (0, 1))
    train(there, 3, seed=0)
    saved = there.wrapped.state_dict()
    with torch.no_grad():
        for own, theirs in zip(trained_of(here.optimizer), trained_of(there.optimizer), strict=True):
            own.copy_(theirs)
    here.load(saved, there.place())
    assert digest(here) == digest(there)


def test_a_checkpoint_of_a_model_of_another_precision_is_cast_as_torch_does() -> None:
    there = new_replica(torch.optim.Adam, seed=0)
    here = new_replica(torch.optim.Adam, torch.bfloat16, seed=1)
    train(there, 1, seed=0)
    here.load(there.wrapped.state_dict(), there.place())
    assert here.optimizer.state[trained_of(here.optimizer)[0]]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize("is_in_eval", [False, True], ids=["train", "eval"])
def test_a_newcomer_stays_in_its_mode_while_the_donor_evaluates(is_in_eval: bool) -> None:
    there, here = (new_replica(ScheduleFree, seed=seed) for seed in (0, 1))
    train(there, 3, seed=0)
    there_optimizer: Any = there.optimizer
    here_optimizer: Any = here.optimizer
    if is_in_eval:
        here_optimizer.eval()
    there_optimizer.eval()
    here.restore(there.capture())
    assert here_optimizer.param_groups[0]["train_mode"] is not is_in_eval
    there_optimizer.train()
    here_optimizer.train()
    assert digest(here) == digest(there)


def test_a_step_that_is_tried_touches_nothing_of_the_user() -> None:
    there, here = (new_replica(WithAttributes, seed=seed) for seed in (0, 1))
    train(there, 3, seed=0)
    steps: list[object] = []
    here.optimizer.register_step_post_hook(lambda *args: steps.append(args))
    here.restore(there.capture())
    assert not steps
    assert here.scheduler is not None
    assert here.scheduler.last_epoch == 3
    assert digest(here) == digest(there)


def test_an_optimizer_that_needs_more_than_gradients_for_a_step_is_not_tried() -> None:
    there, here = (new_replica(NeedsMore, seed=seed) for seed in (0, 1))
    there_optimizer: Any = there.optimizer
    there_optimizer.loss = 2.0
    train(there, 2, seed=0)
    here.restore(there.capture())
    assert digest(here) == digest(there)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "0.held.of.0 in the optimizer's state is a object, which can neither be sent"),
        ({1, 2}, "0.held.of.0 in the optimizer's state is a set"),
        (torch.float32, "0.held.of.0 in the optimizer's state is a dtype"),
        (torch.ones(2, dtype=torch.complex64), "0.held.of.0 in the optimizer's state is a Tensor of torch.complex64"),
        (
            torch.eye(2).to_sparse(),
            "0.held.of.0 in the optimizer's state is a Tensor of torch.float32, torch.sparse_coo",
        ),
        (torch.ones(2, device="meta"), "torch.strided on meta, which cannot be sent to a newcomer"),
        (torch.zeros(1).expand(40_000_000), "the largest is 0.held.of.0, float32 of shape [40000000]"),
        ([torch.ones(1) for _ in range(5000)], "it has 5000 statistics, and at most 768 are accepted"),
        ("x" * (17 << 20), "what is not in its tensors takes"),
    ],
    ids=["object", "set", "dtype", "complex", "sparse", "meta", "too large", "too many", "too long"],
)
def test_a_value_that_cannot_be_sent_is_named(value: Any, words: str) -> None:
    replica = new_replica(functools.partial(Holding, value=value), seed=0)
    replica.check_state()
    train(replica, 1, seed=0)
    with pytest.raises(ConfigError, match=re.escape(words)):
        replica.check_state()


def test_a_value_that_holds_itself_is_named() -> None:
    value: list[Any] = []
    value.append(value)
    replica = new_replica(functools.partial(Holding, value=value), seed=0)
    train(replica, 1, seed=0)
    with pytest.raises(ConfigError, match="is nested more than 32 deep"):
        replica.check_state()


def test_a_number_as_key_beside_the_parameters_is_named() -> None:
    replica = new_replica(Own, seed=0)
    state: Any = replica.optimizer.state
    state[0] = {"step": 1}
    with pytest.raises(ConfigError, match="has a value under 0, and its keys must be parameters or texts"):
        replica.check_state()
