"""States of users' own optimizers: a newcomer loads them exactly, or says why not, and begins no branch of its own."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import manyhands
from manyhands.base.errors import ConfigError, Unavailable
from tests.trainers import Trainer, in_threads, peers, step_until
from tests.unit.optim.user_defined_optimizers import Holding, Rounded, ScheduleFree, Shared, Soap


class _Momentum(torch.optim.Optimizer):
    """A user's own optimizer, of which another version keeps its momentum under another name."""

    name = "momentum"

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state[self.name] = torch.zeros_like(parameter)
                state[self.name].mul_(0.9).add_(parameter.grad)
                parameter.sub_(state[self.name], alpha=group["lr"])


def old_version(model: torch.nn.Module) -> torch.optim.Optimizer:
    return type("Own", (_Momentum,), {})(model.parameters())


def new_version(model: torch.nn.Module) -> torch.optim.Optimizer:
    return type("Own", (_Momentum,), {"name": "exp_avg"})(model.parameters())


def test_a_newcomer_that_cannot_use_the_state_raises_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    with peers(2) as (one, newcomer):
        trainer = Trainer(one, "refused", 8, make=old_version)
        trainer.train_until(2)
        with caplog.at_level(logging.INFO), pytest.raises(Unavailable) as caught:
            Trainer(newcomer, "refused", 8, make=new_version)
        assert f"the state of peer {one.peer_id} cannot be used: a step from it fails" in str(caught.value)
        assert "'exp_avg'" in str(caught.value)
        assert "alone" not in caplog.text


def test_a_peer_that_was_there_from_the_begin_but_has_learnt_nothing_waits_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with peers(3) as (one, two, other):
        trainers = [Trainer(peer, "missed", 16, make=old_version) for peer in (one, two)]
        behind = Trainer(other, "missed", 16, make=new_version)
        in_threads([lambda t=trainer: t.train_until(1) for trainer in trainers])  # type: ignore[misc]
        step_until(behind.optimizer, lambda: "This peer waits, and makes no step" in caplog.text)
        assert "run 'missed' was at global step 1, and the state of peer" in caplog.text
        assert "cannot be used: a step from it fails" in caplog.text
        assert behind.optimizer.global_step == 0


@pytest.mark.parametrize("kind", [Soap, Shared, Rounded, ScheduleFree])
def test_a_newcomer_with_an_optimizer_of_its_user_trains_with_the_others(kind: Any) -> None:
    with peers(2) as (one, newcomer):
        trainers = [Trainer(one, "own", 16, make=lambda model: kind(model.parameters()))]
        trainers[0].train_until(2)
        trainers.append(Trainer(newcomer, "own", 16, seed=1, make=lambda model: kind(model.parameters())))
        assert trainers[1].optimizer.state_digest() == trainers[0].optimizer.state_digest()
        in_threads([lambda t=trainer: t.train_until(4) for trainer in trainers])  # type: ignore[misc]
        assert trainers[1].optimizer.statistics.states_loaded == 1
        if trainers[0].optimizer.global_step == trainers[1].optimizer.global_step:
            assert trainers[1].optimizer.state_digest() == trainers[0].optimizer.state_digest()


@pytest.mark.parametrize(
    "options", [{}, {"delay": "gradients"}, {"local_steps": manyhands.LocalSteps()}], ids=["plain", "delay", "local"]
)
def test_a_state_that_no_newcomer_could_load_is_named_at_the_first_step(options: dict[str, Any]) -> None:
    with peers(1) as (one,):
        trainer = Trainer(one, "held", 8, make=lambda model: Holding(model.parameters(), value=object()), **options)
        with pytest.raises(
            ConfigError, match=r"0\.held\.of\.0 in the optimizer's state is a object, which can neither"
        ):
            trainer.train_until(3)
