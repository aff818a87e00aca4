"""What a training loop does with a torch optimizer, it can do with this one."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from manyhands.base.errors import ConfigError
from manyhands.optim.optimizer import Optimizer
from tests.liars import say_norm
from tests.simulation.swarm_of_trainers import Member, Swarm, assert_equal_parameters, together

pytestmark = pytest.mark.usefixtures("one_thread")


def new_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def loss_of(model: torch.nn.Module, number: int, size: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    inputs, targets = torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)
    return torch.nn.functional.mse_loss(model(inputs), targets)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def alone(train: Callable[[Member], None], make: Callable[[torch.nn.Module], Any] = adam, **options: Any) -> Member:
    """Run one peer's program."""
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    swarm = Swarm()
    swarm.start("p0", new_model, make, train, **{"target_batch_size": 4, "batch_size_per_step": 4, **options})
    swarm.run()
    return swarm.members["p0"]


def plain_steps(numbers: list[int]) -> torch.nn.Module:
    model = new_model()
    optimizer = adam(model)
    for number in numbers:
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


# AMP


@pytest.mark.parametrize("is_unscaled_before", [False, True])
@pytest.mark.parametrize("offload", [False, True])
def test_a_grad_scaler_scales_without_a_trace(is_unscaled_before: bool, offload: bool) -> None:
    def train(member: Member) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
        for number in range(8):
            scaler.scale(loss_of(member.model, number)).backward()
            if is_unscaled_before:
                scaler.unscale_(member.optimizer)
            scaler.step(member.optimizer)
            scaler.update()
            member.optimizer.zero_grad()
        assert member.optimizer.global_step == 8

    member = alone(train, offload=offload)
    assert_equal_parameters(member.model, plain_steps(list(range(8))))


@pytest.mark.parametrize("is_unscaled_before", [False, True])
def test_an_overflow_drops_its_micro_batch_and_nothing_else(is_unscaled_before: bool) -> None:
    def train(member: Member) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for number in (0, -1, 1):
            scaler.scale(loss_of(member.model, number)).backward()
            if number < 0:
                next(member.model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
            if is_unscaled_before:
                scaler.unscale_(member.optimizer)
            scaler.step(member.optimizer)
            scaler.update()
            member.optimizer.zero_grad()
        assert scaler.get_scale() == 2.0**9, "the scaler was told"
        counts = member.optimizer.statistics
        assert (counts.samples_computed, counts.samples_dropped, counts.samples_used) == (12, 4, 8)
        assert member.optimizer.global_step == 1

    member = alone(train, target_batch_size=8)
    plain = new_model()
    optimizer = adam(plain)
    ((loss_of(plain, 0) + loss_of(plain, 1)) / 2).backward()
    optimizer.step()
    assert_equal_parameters(member.model, plain)


def test_a_half_precision_model_trains_with_a_scaler_and_masters_on_the_host() -> None:
    """Plain torch refuses gradients in float16 here."""

    def half_model() -> torch.nn.Module:
        return new_model().to(torch.float16)

    def train(member: Member) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for number in range(20):
            generator = torch.Generator().manual_seed(number)
            inputs = torch.randn(4, 4, generator=generator).half()
            loss = member.model(inputs).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(member.optimizer)
            scaler.update()
            member.optimizer.zero_grad()
        own = member.optimizer.inner.param_groups[0]["params"]
        assert all(parameter.dtype == torch.float32 for parameter in own)
        for parameter, master in zip(member.model.parameters(), own, strict=True):
            assert parameter.dtype == torch.float16
            assert torch.equal(parameter, master.half())
        with torch.no_grad():
            assert loss.item() < 0.5 * float(half_model()(inputs).float().square().mean())

    swarm = Swarm()
    swarm.start("p0", half_model, adam, train, target_batch_size=4, batch_size_per_step=4, offload=True)
    swarm.run()


# closures, hooks, options, checkpoints


def test_a_step_with_a_closure_computes_the_loss_as_in_plain_torch() -> None:
    def train(member: Member) -> None:
        optimizer = member.optimizer

        def closure(number: int) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(member.model, number)
            loss.backward()
            return loss

        for number in range(4):
            loss = optimizer.step(functools.partial(closure, number))
            assert loss.item() > 0

    assert_equal_parameters(alone(train).model, plain_steps([0, 1, 2, 3]))


@pytest.mark.parametrize("offload", [False, True])
def test_step_save_and_load_hooks_run(offload: bool) -> None:
    def train(member: Member) -> None:
        optimizer, calls = member.optimizer, []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before each batch"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after each batch"))
        optimizer.inner.register_step_post_hook(lambda *_: calls.append("global step"))
        for number in (0, 1):
            loss_of(member.model, number).backward()
            optimizer.step()
        assert calls == [
            "before each batch",
            "after each batch",
            "before each batch",
            "global step",
            "after each batch",
        ]
        calls.clear()

        def note(name: str) -> Callable[..., None]:
            def hook(given: Optimizer, *rest: Any) -> None:
                assert given is optimizer
                calls.append(name)

            return hook

        optimizer.register_state_dict_pre_hook(note("saving"))
        optimizer.register_state_dict_post_hook(note("saved"))
        optimizer.register_load_state_dict_pre_hook(note("loading"))
        handle = optimizer.register_load_state_dict_post_hook(note("loaded"))
        optimizer.load_state_dict(optimizer.state_dict())
        assert calls == ["saving", "saved", "loading", "loaded"]
        handle.remove()
        optimizer.load_state_dict(optimizer.state_dict())
        assert calls[4:] == ["saving", "saved", "loading"]

    alone(train, target_batch_size=8, offload=offload)


@pytest.mark.parametrize("offload", [False, True])
def test_zero_grad_and_groups_are_those_of_the_model(offload: bool) -> None:
    def train(member: Member) -> None:
        optimizer = member.optimizer
        assert list(optimizer.param_groups[0]["params"]) == list(member.model.parameters())
        loss_of(member.model, 0).backward()
        optimizer.zero_grad(set_to_none=False)
        assert all(not p.grad.any() for p in member.model.parameters() if p.grad is not None)
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in member.model.parameters())

    alone(train, offload=offload)


def test_a_function_makes_the_optimizer_and_its_schedule() -> None:
    def train(member: Member) -> None:
        rates = []
        for number in range(4):
            rates.append(member.optimizer.param_groups[0]["lr"])
            member.step(loss_of(member.model, number))
        assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05])

    swarm, model = Swarm(), new_model()
    swarm.start(
        "p0", lambda: model, lambda _: lambda params: torch.optim.SGD(params, lr=0.1), train,
        params=model.parameters(), target_batch_size=8, batch_size_per_step=4,
        scheduler=lambda inner: torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5),
    )  # fmt: skip
    swarm.run()


def test_an_optimizer_and_params_that_do_not_go_together_are_refused() -> None:
    def nothing(member: Member) -> None:
        raise AssertionError

    for make, params, says in (
        (adam, new_model().parameters(), "has parameters already"),
        (lambda _: torch.optim.SGD, None, "give params=model.parameters"),
    ):
        swarm = Swarm()
        swarm.start("p0", new_model, make, nothing, target_batch_size=8, params=params)
        with pytest.raises(ConfigError, match=says):
            swarm.run()


@pytest.mark.parametrize("offload", [False, True])
def test_a_checkpoint_goes_on_where_it_was_taken(offload: bool) -> None:
    saved: dict[str, Any] = {}

    def schedule(inner: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(inner, 2, gamma=0.5)

    def first(member: Member) -> None:
        for number in range(3):
            member.step(loss_of(member.model, number))
        saved["model"] = {name: value.clone() for name, value in member.model.state_dict().items()}
        saved["optimizer"] = copy.deepcopy(member.optimizer.state_dict())  # as writing it to a file would
        for number in range(3, 6):
            member.step(loss_of(member.model, number))
        saved["digest"] = member.optimizer.state_digest()

    def second(member: Member) -> None:
        member.model.load_state_dict(saved["model"])
        member.optimizer.load_state_dict(saved["optimizer"])
        assert member.optimizer.global_step == 3
        for number in range(3, 6):
            member.step(loss_of(member.model, number))
        assert member.optimizer.global_step == 6
        assert member.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 8)

    one = alone(first, scheduler=schedule, offload=offload)
    two = alone(second, scheduler=schedule, offload=offload)
    assert_equal_parameters(one.model, two.model, tolerance=0.0)
    assert two.optimizer.state_digest() == saved["digest"]


def test_a_peer_that_loads_an_old_checkpoint_follows_the_run() -> None:
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    swarm = Swarm()

    def train(member: Member) -> None:
        together(2, member)
        old, model = copy.deepcopy(member.optimizer.state_dict()), member.model.state_dict()
        old_model = {name: value.clone() for name, value in model.items()}
        for step in range(2):
            member.step(loss_of(member.model, step))
            member.wait_for(step + 1)
        if member.name == "p1":
            member.model.load_state_dict(old_model)
            member.optimizer.load_state_dict(old)
            assert member.optimizer.global_step == 0
        member.wait_for(2)
        for step in (2, 3):
            member.step(loss_of(member.model, step))
            member.wait_for(step + 1)

    for name in ("p0", "p1"):
        swarm.start(name, new_model, adam, train, target_batch_size=8, batch_size_per_step=4)
    swarm.run()
    assert len({member.optimizer.state_digest() for member in swarm.members.values()}) == 1
    assert swarm.members["p1"].optimizer.statistics.states_loaded >= 1


# updates that are not finite


@pytest.mark.parametrize("offload", [False, True])
def test_all_members_refuse_an_average_that_is_not_finite_and_keep_the_last_good_state(offload: bool) -> None:
    logging.getLogger("manyhands").setLevel(logging.CRITICAL)
    swarm, digests, before = Swarm(), {}, {}

    def train(member: Member) -> None:
        together(3, member)
        for step in range(4):
            if step == 2:
                before[member.name] = [p.detach().clone() for p in member.model.parameters()]
            loss = loss_of(member.model, 10 * step + int(member.name[1]))
            if step == 2:
                loss = loss * 1e25  # finite, but its square is not; of one peer alone it would be left out
            member.step(loss)
            member.wait_for(step + 1)
            if step == 2:
                after = list(member.model.parameters())
                assert all(torch.equal(p, old) for p, old in zip(after, before[member.name], strict=True))
        digests[member.name] = member.optimizer.state_digest()
        counts = member.optimizer.statistics
        assert (counts.updates_refused, counts.samples_dropped, counts.samples_used) == (1, 4, 12)
        assert (counts.rounds_committed, counts.states_loaded) == (4, 0)
        member.check_samples()

    for name in ("p0", "p1", "p2"):
        swarm.start(name, new_model, adam, train, target_batch_size=12, batch_size_per_step=4, offload=offload)
    swarm.run()
    assert len(set(digests.values())) == 1


@contextlib.contextmanager
def left_out(member: Member) -> Iterator[float]:
    """The others leave out the gradient of a member times this factor: it says that its norm is small."""
    matchmaker = member.optimizer.collaboration.step_rounds.rounds.matchmaker
    say_norm(matchmaker, 1e-3)
    yield 1e25
    del matchmaker.find_group


def test_the_others_do_not_wait_for_a_peer_that_asks_for_the_means_without_a_gradient() -> None:
    """It is no newcomer: it comes to the next round in any case."""
    logging.getLogger("manyhands").setLevel(logging.CRITICAL)
    swarm, took_s = Swarm(), list[float]()

    def train(member: Member) -> None:
        together(4, member)
        for step in range(7):
            began = member.peer.time()
            loss = loss_of(member.model, 10 * step + int(member.name[1]))
            with left_out(member) if member.name == "p3" and step == 4 else contextlib.nullcontext(1.0) as factor:
                member.step(factor * loss, 0.4)
                member.wait_for(step + 1)
            took_s.append(member.peer.time() - began)

    for name in ("p0", "p1", "p2", "p3"):
        swarm.start(name, new_model, adam, train, target_batch_size=16, batch_size_per_step=4)
    swarm.run()
    assert swarm.members["p3"].optimizer.statistics.samples_dropped == 4
    assert max(took_s) < 2.0, took_s


@pytest.mark.parametrize("offload", [False, True], ids=["here", "offload"])
def test_members_step_without_a_gradient_that_is_larger_than_was_said(offload: bool) -> None:
    logging.getLogger("manyhands").setLevel(logging.CRITICAL)
    swarm, digests = Swarm(), {}

    def train(member: Member) -> None:
        together(3, member)
        for step in range(4):
            loss = loss_of(member.model, 10 * step + int(member.name[1]))
            with left_out(member) if step == 2 and member.name == "p1" else contextlib.nullcontext(1.0) as factor:
                member.step(factor * loss)
                member.wait_for(step + 1)
        digests[member.name] = member.optimizer.state_digest()
        counts = member.optimizer.statistics
        assert (counts.updates_refused, counts.rounds_committed, counts.states_loaded) == (0, 4, 0)
        assert (counts.samples_dropped, counts.samples_used) == ((4, 12) if member.name == "p1" else (0, 16))
        member.check_samples()

    for name in ("p0", "p1", "p2"):
        swarm.start(name, new_model, adam, train, target_batch_size=12, batch_size_per_step=4, offload=offload)
    swarm.run()
    assert len(set(digests.values())) == 1
