"""Optimizers with methods of their own, such as train() and eval() of those that are schedule-free."""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any

import pytest
import torch

from manyhands.base.errors import ConfigError
from tests.schedule_free import ScheduleFreeAdamW
from tests.simulation import small_model
from tests.simulation.small_model import MODES, Weights, assert_has, copied, in_each_mode, loss_of, new_model
from tests.simulation.swarm_of_trainers import Member, Swarm, together

pytestmark = pytest.mark.usefixtures("one_thread")


def schedule_free(model: torch.nn.Module) -> ScheduleFreeAdamW:
    return ScheduleFreeAdamW(model.parameters())


alone = functools.partial(small_model.alone, make_optimizer=schedule_free)


def plain_steps(model: torch.nn.Module, inner: ScheduleFreeAdamW, numbers: range) -> None:
    """With an evaluation before each."""
    for number in numbers:
        inner.eval()
        inner.train()
        loss_of(model, number).backward()
        inner.step()
        inner.zero_grad()


def plain(numbers: range) -> tuple[Weights, Weights]:
    """The parameters to train and to evaluate after some steps."""
    model = new_model()
    inner = schedule_free(model)
    plain_steps(model, inner, numbers)
    trained = copied(model)
    inner.eval()
    return trained, copied(model)


@in_each_mode
def test_an_evaluation_has_the_weights_to_evaluate_and_training_goes_on_from_those_to_train(
    options: dict[str, Any],
) -> None:
    def train(member: Member) -> None:
        optimizer: Any = member.optimizer
        for number in range(5):
            optimizer.train()
            member.step(loss_of(member.model, number))
            optimizer.settle()
            trained = copied(member.model)
            optimizer.eval()
            assert optimizer.param_groups[0]["train_mode"] is False
            evaluated = copied(member.model)
            optimizer.eval()
            assert_has(member.model, evaluated)
            digest = optimizer.state_digest()
            optimizer.train()
            assert optimizer.param_groups[0]["train_mode"] is True
            assert_has(member.model, trained)
            assert optimizer.state_digest() == digest, "an evaluation does not change the state of the run"
            optimizer.eval()
        right_to_train, right_to_evaluate = plain(range(5))
        assert_has(member.model, right_to_evaluate, 1e-5)
        optimizer.train()
        assert_has(member.model, right_to_train, 1e-5)
        assert any((right_to_train[name] - value).abs().max() > 1e-3 for name, value in right_to_evaluate.items())

    alone(train, **options)


def test_a_batch_in_eval_mode_is_refused_and_counts_nothing() -> None:
    def train(member: Member) -> None:
        optimizer: Any = member.optimizer
        optimizer.eval()
        with pytest.raises(ConfigError, match=r"in eval mode: call optimizer.train\(\) before the next batch"):
            member.step(loss_of(member.model, 0))
        assert optimizer.statistics.samples_computed == 0
        optimizer.train()
        member.step(loss_of(member.model, 0))
        assert optimizer.statistics.samples_used == 4

    alone(train)


@in_each_mode
def test_a_batch_is_refused_too_once_the_state_was_loaded_in_eval_mode(options: dict[str, Any]) -> None:
    """As ``accelerate.prepare`` does it, and a checkpoint that was saved at the same step."""

    def train(member: Member) -> None:
        optimizer: Any = member.optimizer
        optimizer.train()
        for number in range(3):
            member.step(loss_of(member.model, number))
            optimizer.settle()
        trained, in_train_mode = copied(member.model), copy.deepcopy(optimizer.state_dict())
        optimizer.eval()
        optimizer.load_state_dict(optimizer.state_dict())
        with pytest.raises(ConfigError, match=r"in eval mode: call optimizer.train\(\) before the next batch"):
            member.step(loss_of(member.model, 3))
        optimizer.zero_grad()
        optimizer.train()
        assert_has(member.model, trained)
        optimizer.eval()
        member.model.load_state_dict(trained)
        optimizer.load_state_dict(in_train_mode)
        member.step(loss_of(member.model, 3))
        optimizer.settle()
        assert_has(member.model, plain(range(4))[0], 1e-5)

    alone(train, **options)


@in_each_mode
def test_other_public_methods_are_those_of_the_wrapped_optimizer(options: dict[str, Any]) -> None:
    def train(member: Member) -> None:
        optimizer: Any = member.optimizer
        optimizer.train()
        member.step(loss_of(member.model, 0))
        optimizer.settle()
        assert optimizer.num_steps(plus=2) == 3
        assert optimizer.num_steps.__doc__ == ScheduleFreeAdamW.num_steps.__doc__
        before = copied(member.model)
        optimizer.halve()
        assert_has(member.model, {name: value / 2 for name, value in before.items()})
        member.step(loss_of(member.model, 1))
        optimizer.settle()
        assert_has(member.model, {name: value / 2 for name, value in before.items()}, 0.2)
        for name in ("first_step", "_move", "step_", "parameters"):
            assert not hasattr(optimizer, name)

    alone(train, **options)


@in_each_mode
def test_after_close_the_model_still_gets_the_weights_to_evaluate(options: dict[str, Any]) -> None:
    def train(member: Member) -> None:
        optimizer: Any = member.optimizer
        optimizer.train()
        for number in range(3):
            member.step(loss_of(member.model, number))
            optimizer.settle()
        optimizer.close()
        optimizer.eval()
        assert_has(member.model, plain(range(3))[1], 1e-5)
        optimizer.inner.train()
        loss_of(member.model, 3).backward()
        optimizer.inner.step()
        assert_has(member.model, plain(range(4))[0], 1e-5)

    alone(train, **options)


def test_a_method_does_not_hide_that_the_loop_has_changed_an_option() -> None:
    def train(member: Member) -> None:
        member.optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(ConfigError, match=r"the option 'lr' was 0\.01 and is 0\.5 now"):
            member.optimizer.train()  # type: ignore[attr-defined]

    alone(train)


def test_torch_optimizers_without_such_methods_have_none() -> None:
    def train(member: Member) -> None:
        assert not hasattr(member.optimizer, "train")
        assert not hasattr(member.optimizer, "eval")

    swarm = Swarm()
    swarm.start("p0", new_model, lambda model: torch.optim.SGD(model.parameters()), train, target_batch_size=4)
    swarm.run()


@in_each_mode
@pytest.mark.parametrize("saves_in", ["train", "eval"])
@pytest.mark.parametrize("evaluates_first", [False, True])
def test_a_checkpoint_of_either_mode_goes_on_where_it_was_taken(
    options: dict[str, Any], saves_in: str, evaluates_first: bool
) -> None:
    saved: dict[str, Any] = {}

    def first(member: Member) -> None:
        optimizer: Any = member.optimizer
        optimizer.train()
        for number in range(3):
            member.step(loss_of(member.model, number))
            optimizer.settle()
        getattr(optimizer, saves_in)()
        saved.update(optimizer=copy.deepcopy(optimizer.state_dict()), model=copied(member.model))
        go_on(member)
        saved["end"] = copied(member.model)

    def go_on(member: Member) -> None:
        optimizer: Any = member.optimizer
        if evaluates_first:
            optimizer.eval()
        optimizer.train()
        for number in range(3, 5):
            member.step(loss_of(member.model, number))
            optimizer.settle()

    def second(member: Member) -> None:
        member.model.load_state_dict(saved["model"])
        member.optimizer.load_state_dict(member.optimizer.state_dict())  # as accelerate.prepare does
        member.optimizer.load_state_dict(saved["optimizer"])
        go_on(member)
        assert_has(member.model, saved["end"], 1e-6)

    alone(first, **options)
    alone(second, **options)


@in_each_mode
@pytest.mark.parametrize("saved_in", ["train", "eval"])
def test_a_checkpoint_of_the_plain_optimizer_goes_on_in_either_mode(options: dict[str, Any], saved_in: str) -> None:
    model = new_model()
    inner = schedule_free(model)
    plain_steps(model, inner, range(3))
    getattr(inner, saved_in)()

    def train(member: Member) -> None:
        optimizer: Any = member.optimizer
        member.model.load_state_dict(model.state_dict())
        optimizer.load_state_dict(inner.state_dict())
        optimizer.train()
        assert_has(member.model, plain(range(3))[0], 1e-6)
        for number in range(3, 5):
            member.step(loss_of(member.model, number))
            optimizer.settle()
        assert_has(member.model, plain(range(5))[0], 1e-5)

    alone(train, **options)


@in_each_mode
def test_weights_that_are_loaded_in_eval_mode_are_those_to_evaluate(options: dict[str, Any]) -> None:
    def train(member: Member) -> None:
        optimizer: Any = member.optimizer
        optimizer.train()
        for number in range(3):
            member.step(loss_of(member.model, number))
            optimizer.settle()
        optimizer.eval()
        weights = {name: value + 1 for name, value in copied(member.model).items()}
        member.model.load_state_dict(weights)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.train()
        optimizer.eval()
        assert_has(member.model, weights, 1e-5)

    alone(train, **options)


@pytest.mark.parametrize("options", [MODES["here"], MODES["offload"]], ids=["here", "offload"])
def test_peers_that_evaluate_at_different_times_stay_equal_and_hand_out_the_state_to_train(
    options: dict[str, Any],
) -> None:
    """A newcomer loads the state while the only other peer evaluates."""
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    swarm, digests = Swarm(), {}

    def old(member: Member) -> None:
        optimizer: Any = member.optimizer
        optimizer.train()
        for number in range(3):
            member.step(loss_of(member.model, number))
            optimizer.eval()
            optimizer.train()
        assert optimizer.global_step >= 1
        optimizer.eval()
        while "p1" not in digests:
            member.peer.sleep(1.0)
        assert digests["p1"] == optimizer.state_digest()
        optimizer.train()
        train(member, optimizer.global_step)

    def newcomer(member: Member) -> None:
        optimizer: Any = member.optimizer
        assert optimizer.statistics.states_loaded == 1
        optimizer.train()
        digests["p1"] = optimizer.state_digest()
        train(member, optimizer.global_step)

    def train(member: Member, begun_at: int) -> None:
        together(2, member)
        for number in range(1, 4):
            if member.name == "p1":
                member.optimizer.eval()  # type: ignore[attr-defined]
                member.optimizer.train()  # type: ignore[attr-defined]
            member.step(loss_of(member.model, 10 * number + int(member.name[1])))
            member.wait_for(begun_at + number)
        ends[member.name] = member.optimizer.state_digest()
        assert member.optimizer.statistics.samples_dropped == 0

    ends: dict[str, str] = {}
    settings = {"target_batch_size": 8, "batch_size_per_step": 4, **options}
    swarm.start("p0", new_model, schedule_free, old, **settings)
    swarm.start("p1", new_model, schedule_free, newcomer, begins_s=20.0, **settings)
    swarm.run()
    assert len(set(ends.values())) == 1
