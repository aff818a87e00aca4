"""A wrapper puts back what it has changed, and no two wrappers train the same parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from manyhands.base.errors import ConfigError, RunNotFound
from manyhands.optim.local_steps import LocalSteps
from manyhands.optim.optimizer import Optimizer
from manyhands.testing.blocking import SimPeer
from tests.simulation.small_model import adam, alone, assert_has, copied, half_model, in_each_mode, loss_of, new_model
from tests.simulation.swarm_of_trainers import BATCH_S, PLAIN, Member, Swarm, assert_equal_parameters, together

pytestmark = pytest.mark.usefixtures("one_thread")


def warm_up(inner: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Its first rate is a third of the optimizer's."""
    return torch.optim.lr_scheduler.LinearLR(inner, total_iters=10)


def wrapped(inner: Any, peer: SimPeer, **options: Any) -> Optimizer:
    given = {"run_id": "swarm", "target_batch_size": 4, "batch_size_per_step": 4, "averaging": PLAIN}
    return Optimizer(inner, peer=peer, **given | options)


def with_peer(program: Callable[[SimPeer], None]) -> None:
    """Run one peer's program, which makes its own optimizers."""

    def train(member: Member) -> None:
        member.optimizer.close()
        program(member.peer)

    alone(train)


def step(optimizer: Optimizer, model: torch.nn.Module, number: int) -> None:
    peer = optimizer.peer
    peer.sleep(BATCH_S)
    loss_of(model, number).backward()
    optimizer.step()
    optimizer.zero_grad()


def plain_steps(
    model: torch.nn.Module, inner: torch.optim.Optimizer, numbers: range, schedule: Callable[[Any], Any] | None = None
) -> None:
    scheduler = schedule(inner) if schedule is not None else None
    for number in numbers:
        loss_of(model, number).backward()
        inner.step()
        inner.zero_grad()
        if scheduler is not None:
            scheduler.step()


@in_each_mode
def test_after_a_constructor_that_raised_the_next_one_trains_the_model(options: dict[str, Any]) -> None:
    """With its schedule from the beginning, and the statistics that the optimizer had."""
    model, expected = new_model(), new_model()
    inner, plain = adam(model), adam(expected)
    plain_steps(model, inner, range(2))
    plain_steps(expected, plain, range(2))

    def program(peer: SimPeer) -> None:
        before = [dict(group) for group in inner.param_groups]
        statistics = {parameter: dict(values) for parameter, values in inner.state.items()}
        first = wrapped(adam(new_model()), peer)
        with pytest.raises(ConfigError, match="averages under run id 'swarm' already"):
            wrapped(inner, peer, scheduler=warm_up, **options)
        first.close()
        assert inner.param_groups == before
        assert inner.state == statistics
        optimizer = wrapped(inner, peer, scheduler=warm_up, **options)
        for number in range(2, 7):
            step(optimizer, model, number)
        optimizer.settle()

    with_peer(program)
    if "delay" not in options:
        plain_steps(expected, plain, range(2, 7), warm_up)
        assert_equal_parameters(model, expected)
    assert all(not torch.equal(*pair) for pair in zip(model.parameters(), new_model().parameters(), strict=True))


def test_a_run_that_is_not_there_leaves_the_optimizer_as_it_was() -> None:
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    swarm = Swarm()
    model, expected = new_model(), new_model()
    inner, plain = adam(model), adam(expected)

    def first(member: Member) -> None:
        member.peer.sleep(10.0)

    def second(member: Member) -> None:
        member.optimizer.close()
        with pytest.raises(RunNotFound):
            wrapped(inner, member.peer, run_id="mistyped", offload=True, start_new=False)
        plain_steps(model, inner, range(3))

    swarm.start("p0", new_model, adam, first, target_batch_size=4)
    swarm.start("p1", new_model, adam, second, target_batch_size=4, begins_s=2.0)
    swarm.run()
    plain_steps(expected, plain, range(3))
    assert_equal_parameters(model, expected, 0.0)


def test_a_newcomer_for_which_the_target_is_too_small_keeps_its_weights() -> None:
    """It knows the number of peers before it downloads the state of the run."""
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    swarm, newcomer = Swarm(), new_model()
    before = copied(newcomer)

    def old(member: Member) -> None:
        for number in range(10):
            member.step(loss_of(member.model, number))
        assert member.optimizer.global_step > 0

    def new(member: Member) -> None:
        member.optimizer.close()
        inner = adam(newcomer)
        with pytest.raises(ConfigError, match="target_batch_size=4 is below one batch of 4 samples for each of the 2"):
            wrapped(inner, member.peer, local_steps=LocalSteps())
        assert not inner.state
        assert_has(newcomer, before)

    swarm.start("p0", new_model, adam, old, target_batch_size=4, batch_size_per_step=4, local_steps=LocalSteps())
    swarm.start("p1", new_model, adam, new, run_id="another", target_batch_size=4, begins_s=20.0)
    swarm.run()


@in_each_mode
@pytest.mark.parametrize("ends", ["the optimizer", "its peer"])
def test_after_close_the_optimizer_is_one_of_plain_torch_again(options: dict[str, Any], ends: str) -> None:
    model, expected = new_model(), new_model()
    inner, plain = adam(model), adam(expected)

    def program(peer: SimPeer) -> None:
        optimizer = wrapped(inner, peer, **options)
        for number in range(3):
            step(optimizer, model, number)
        if ends == "the optimizer":
            optimizer.close()
        else:
            peer.run(peer.presence.stop(), 30.0, "closing")

    with_peer(program)
    assert [*inner.param_groups[0]["params"]] == [*model.parameters()]
    assert set(inner.state) == set(model.parameters())
    if "delay" not in options:  # else the last step may have been made, or not
        plain_steps(expected, plain, range(3))
        assert_equal_parameters(model, expected)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for number in range(3, 5):
        plain_steps(model, inner, range(number, number + 1))
    assert all(not torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    if "delay" not in options:
        plain_steps(expected, plain, range(3, 5))
        assert_equal_parameters(model, expected)


def test_in_half_precision_the_optimizer_steps_again_after_close() -> None:
    model = half_model()
    inner = adam(model)

    def program(peer: SimPeer) -> None:
        optimizer = wrapped(inner, peer, offload=True)
        for number in range(3):
            step(optimizer, model, number)
        optimizer.close()

    with_peer(program)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    plain_steps(model, inner, range(3, 4))
    assert all(not torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


@in_each_mode
def test_after_close_the_same_optimizer_is_wrapped_again_and_trains(options: dict[str, Any]) -> None:
    model, expected = new_model(), new_model()
    inner, plain = adam(model), adam(expected)

    def program(peer: SimPeer) -> None:
        for _ in range(2):
            optimizer = wrapped(inner, peer, scheduler=warm_up, **options)
            for number in range(5):
                step(optimizer, model, number)
            optimizer.settle()
            assert optimizer.statistics.samples_used >= 16
            optimizer.close()

    with_peer(program)
    if "delay" not in options:
        for _ in range(2):  # each schedule from its beginning
            plain.param_groups[0].pop("initial_lr", None)
            plain.param_groups[0]["lr"] = 0.01
            plain_steps(expected, plain, range(5), warm_up)
        assert_equal_parameters(model, expected)


def test_a_schedule_that_was_given_goes_on_in_the_next_wrapper() -> None:
    model, expected = new_model(), new_model()
    inner, plain = adam(model), adam(expected)

    def program(peer: SimPeer) -> None:
        scheduler = warm_up(inner)
        for numbers in (range(3), range(3, 6)):
            optimizer = wrapped(inner, peer, scheduler=scheduler)
            for number in numbers:
                step(optimizer, model, number)
            optimizer.close()

    with_peer(program)
    plain_steps(expected, plain, range(6), warm_up)
    assert_equal_parameters(model, expected)


def test_a_checkpoint_after_close_is_that_before_it() -> None:
    model = new_model()

    def program(peer: SimPeer) -> None:
        optimizer = wrapped(adam(model), peer, scheduler=warm_up, offload=True)
        for number in range(3):
            step(optimizer, model, number)
        before, digest = optimizer.state_dict(), optimizer.state_digest()
        optimizer.close()
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        assert after["manyhands"] == before["manyhands"]
        for index, values in before["state"].items():
            assert all(torch.equal(value, after["state"][index][name]) for name, value in values.items())
        assert optimizer.state_digest() == digest

    with_peer(program)


@pytest.mark.parametrize("ends", ["the optimizer", "its peer"])
def test_a_checkpoint_can_be_saved_after_close_has_broken_off_a_step(ends: str) -> None:
    """One in the background, in which this peer waits for the other."""
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    swarm = Swarm()

    def train(member: Member) -> None:
        together(2, member)
        if member.name == "p1":
            member.peer.sleep(20.0)
            return
        optimizer = member.optimizer
        step(optimizer, member.model, 0)
        assert optimizer.is_stepping
        if ends == "the optimizer":
            optimizer.close()
        else:
            member.peer.run(member.peer.presence.stop(), 30.0, "closing")
        optimizer.settle()
        assert optimizer.state_dict()["manyhands"]["step"] == 0
        member.check_samples()
        with pytest.raises(ConfigError):
            step(optimizer, member.model, 1)

    for name in ("p0", "p1"):
        swarm.start(name, new_model, adam, train, target_batch_size=4, batch_size_per_step=4, delay="gradients")
    swarm.run()


def test_a_checkpoint_can_be_saved_after_close_during_an_update_that_fails() -> None:
    """It takes a second, in the background."""
    logging.getLogger("manyhands").setLevel(logging.CRITICAL)
    swarm = Swarm(executor_cost_s=lambda job: 1.0 if "advance" in repr(job) else 0.001)

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ArithmeticError("this update fails")

    def train(member: Member) -> None:
        optimizer = member.optimizer
        step(optimizer, member.model, 0)
        assert optimizer.is_stepping
        optimizer.close()
        optimizer.settle()
        assert optimizer.state_dict()["manyhands"]["step"] == 0
        member.check_samples()
        with pytest.raises(ConfigError, match="this peer left the run"):
            step(optimizer, member.model, 1)

    settings = {"target_batch_size": 4, "batch_size_per_step": 4, "delay": "optimizer"}
    swarm.start("p0", new_model, lambda model: Failing(model.parameters(), lr=0.1), train, **settings)
    swarm.run()


@in_each_mode
def test_weights_that_were_loaded_before_close_stay(options: dict[str, Any]) -> None:
    model, best = new_model(), {name: value + 1 for name, value in new_model().state_dict().items()}

    def program(peer: SimPeer) -> None:
        optimizer = wrapped(adam(model), peer, **options)
        for number in range(3):
            step(optimizer, model, number)
        model.load_state_dict(best)
        optimizer.close()

    with_peer(program)
    assert all(torch.equal(value, best[name]) for name, value in model.state_dict().items())


@in_each_mode
def test_wrapping_what_is_wrapped_is_refused(options: dict[str, Any]) -> None:
    model = new_model()
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)

    def program(peer: SimPeer) -> None:
        optimizer = wrapped(named, peer)
        for given in (optimizer, named, torch.optim.SGD(model[2].parameters(), lr=0.1)):
            before = [*map(id, given.param_groups[0]["params"])]
            with pytest.raises(ConfigError) as raised:
                wrapped(given, peer, run_id="another", **options)
            if given is optimizer:
                assert "optimizer is a manyhands.Optimizer already" in str(raised.value)
            else:
                name = "0.weight" if given is named else "parameter 0"
                assert f"{name} is trained in run 'swarm' by another Optimizer already" in str(raised.value)
            assert [*map(id, given.param_groups[0]["params"])] == before
        for number in range(2):
            step(optimizer, model, number)
        optimizer.close()
        with pytest.raises(ConfigError, match="cannot be wrapped again"):
            wrapped(optimizer, peer)
        wrapped(named, peer)

    with_peer(program)


def test_a_member_that_was_wrapped_again_counts_in_full() -> None:
    """The other one has had half of its gradient."""
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    swarm, ends = Swarm(), {}

    def train(member: Member) -> None:
        if member.name == "p1":
            inner = member.optimizer.inner
            member.optimizer.close()
            member.optimizer = wrapped(inner, member.peer, target_batch_size=8, offload=True)
        together(2, member)
        for number in range(3):
            member.step(loss_of(member.model, 10 * number + int(member.name[1])))
            member.wait_for(number + 1)
        ends[member.name] = [parameter.detach().clone() for parameter in member.model.parameters()]

    for name in ("p0", "p1"):
        swarm.start(name, new_model, adam, train, target_batch_size=8, batch_size_per_step=4, offload=True)
    swarm.run()
    expected = new_model()
    plain = adam(expected)
    for number in range(3):
        ((loss_of(expected, 10 * number) + loss_of(expected, 10 * number + 1)) / 2).backward()
        plain.step()
        plain.zero_grad()
    for those in ends.values():
        for value, right in zip(those, expected.parameters(), strict=True):
            torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-5)
