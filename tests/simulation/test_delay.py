"""Steps in the background: never more than one step stale, nobody waits, no sample is lost."""

from __future__ import annotations

import itertools
import logging
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch

from manyhands.averaging.timing import LOOK_S
from manyhands.base.errors import ConfigError
from manyhands.optim.blocking_client import BlockingRunClient
from manyhands.optim.run.tracker import ProgressTracker
from manyhands.testing import at
from tests.simulation.swarm_of_trainers import Member, Swarm, together
from tests.simulation.test_drop_in import adam, new_model
from tests.sweeps import few_of

pytestmark = pytest.mark.usefixtures("one_thread")

STEP_S = 3.0
"""Virtual seconds of a step on the host."""
TARGET, BATCH_S = 512, 0.25
"""Four peers with batches of 8 samples compute the target in 4 s."""


def slow_steps(job: Callable[..., Any]) -> float:
    return STEP_S if getattr(job, "__name__", "") == "advance" else 0.001


def quadratic(model: torch.nn.Module) -> torch.Tensor:
    return sum((parameter - 1).square().mean() for parameter in model.parameters())  # type: ignore[return-value]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("manyhands").setLevel(logging.ERROR)


@pytest.mark.parametrize("delay", ["optimizer", "gradients"])
def test_gradients_are_at_most_one_step_old(delay: str) -> None:
    """With a step in each batch exactly one: x[k] = x[k-1] - lr * gradient(x[k-2])."""

    def train(member: Member) -> None:
        model = new_model()
        history = [[parameter.detach().clone() for parameter in model.parameters()]] * 2
        for _ in range(10):
            for parameter, old in zip(model.parameters(), history[-2], strict=True):
                parameter.data.copy_(old)
                parameter.grad = None
            quadratic(model).backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            history.append([x - 0.2 * g for x, g in zip(history[-1], gradients, strict=True) if g is not None])
            member.step(quadratic(member.model))
        member.optimizer.settle()
        assert member.optimizer.global_step == 10
        for parameter, expected in zip(member.model.parameters(), history[-1], strict=True):
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=1e-6)

    swarm = Swarm()
    swarm.start("p0", new_model, sgd, train, target_batch_size=4, batch_size_per_step=4, delay=delay)
    swarm.run()


@pytest.mark.parametrize("delay", few_of(["gradients", "optimizer"], 1, pytest.mark.long))
def test_the_training_thread_does_not_wait_for_what_is_in_the_background(delay: str) -> None:
    num_batches, longest = 60, {}

    def train(member: Member) -> None:
        together(3, member)
        waits, steps = [], []
        for _ in range(num_batches):
            member.peer.sleep(0.5)
            quadratic(member.model).backward()
            before = member.peer.time()
            member.optimizer.step()
            waits.append(member.peer.time() - before)
            steps.append(member.optimizer.global_step)
            member.optimizer.zero_grad()
            member.check_samples()
        member.optimizer.settle()
        longest[member.name] = max(waits[:-4])  # at the end it may wait for another one that trains no more
        assert steps[-1] >= 5
        assert sorted(steps) == steps
        counts = member.optimizer.statistics
        assert counts.samples_dropped == counts.states_loaded == counts.steps_alone == 0
        member.wait_for(max(steps[-1], 5))
        member.check_samples()

    swarm = Swarm(executor_cost_s=slow_steps)
    for name in ("p0", "p1", "p2"):
        swarm.start(name, new_model, adam, train, target_batch_size=60, batch_size_per_step=4, delay=delay)
    swarm.run()
    if delay == "gradients":
        assert max(longest.values()) < 0.1, "not even for the slowest of the others"
    else:
        assert max(longest.values()) < 1.5, "for the round, but not for the step"


@pytest.mark.parametrize("background_s", few_of([3.0, 0.5, 6.0], 1, pytest.mark.long))
def test_the_next_step_begins_when_its_samples_are_there_and_the_last_one_has_ended(background_s: float) -> None:
    """Four peers compute the target in 4 s."""
    steps = delayed_steps(background_s)
    longest_s = max(4.0, background_s)
    assert max(seconds for seconds, _ in steps) <= longest_s + 4 * BATCH_S, "peers notice something after each batch"
    assert statistics.median(seconds for seconds, _ in steps) <= longest_s + 2 * BATCH_S
    if background_s < 4.0:
        assert statistics.median(samples for _, samples in steps) <= 1.1 * TARGET, steps


def delayed_steps(background_s: float) -> list[tuple[float, float]]:
    """Seconds and samples of global steps whose updates take so long in the background."""
    num_peers, times, sizes = 4, list[float](), list[float]()

    def train(member: Member) -> None:
        together(num_peers, member)
        while member.optimizer.global_step < 8:
            before = member.optimizer.global_step
            member.step(quadratic(member.model), batch_s=BATCH_S)
            if member.name == "p0" and member.optimizer.global_step > before and member.optimizer.last_round:
                times.append(member.peer.time())
                sizes.append(sum(member.optimizer.last_round.weights))
        member.optimizer.settle()

    swarm = Swarm(executor_cost_s=lambda job: background_s if getattr(job, "__name__", "") == "advance" else 0.001)
    for number in range(num_peers):
        swarm.start(
            f"p{number}", new_model, sgd, train, target_batch_size=TARGET, batch_size_per_step=8, delay="gradients"
        )
    swarm.run()
    seconds = [later - earlier for earlier, later in itertools.pairwise(times)]
    return list(zip(seconds, sizes[1:], strict=True))[2:]


def test_short_batches_beside_a_step_are_reported_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each report wakes two threads, one of which is in a round."""
    tell, report, batch_s = ProgressTracker.report, BlockingRunClient.report, 0.02
    num_told = 0
    reports: list[tuple[float, int]] = []

    def told(self: ProgressTracker, *args: Any) -> None:
        nonlocal num_told
        num_told += 1
        tell(self, *args)

    def noted(self: BlockingRunClient, samples: int, *args: Any) -> None:
        before = num_told
        report(self, samples, *args)
        if num_told > before:
            reports.append((swarm.world.loop.time(), samples))

    monkeypatch.setattr(ProgressTracker, "report", told)
    monkeypatch.setattr(BlockingRunClient, "report", noted)

    def train(member: Member) -> None:
        while member.optimizer.global_step < 1:
            member.step(quadratic(member.model), batch_s=batch_s)
        member.optimizer.settle()  # the update takes longer than closing a peer may
        member.check_samples()

    swarm = Swarm(executor_cost_s=slow_steps)
    swarm.start("p0", new_model, sgd, train, target_batch_size=4, batch_size_per_step=4, delay="gradients")
    swarm.run()
    pauses = [after[0] - before[0] for before, after in itertools.pairwise(reports)]
    assert len(pauses) >= 0.8 * STEP_S / LOOK_S
    assert all(LOOK_S <= pause_s <= LOOK_S + 2 * batch_s for pause_s in pauses)
    assert reports[-1][1] - reports[0][1] >= 4 * (STEP_S - 2 * LOOK_S) / (2 * batch_s), "all batches were computed"


def test_gradients_computed_during_a_step_count_in_the_next_one_and_all_peers_end_equal() -> None:
    done = {}

    def train(member: Member) -> None:
        together(3, member)
        pause_s = {"p0": 0.2, "p1": 0.5, "p2": 1.1}[member.name]
        while member.optimizer.global_step < 8:
            member.step(quadratic(member.model), batch_s=pause_s)
            member.check_samples()
        member.optimizer.settle()
        member.wait_for(8)
        done[member.name] = member.optimizer.statistics

    swarm = Swarm(executor_cost_s=slow_steps)
    for name in ("p0", "p1", "p2"):
        swarm.start(name, new_model, adam, train, target_batch_size=60, batch_size_per_step=4, delay="gradients")
    swarm.run()
    assert sum(counts.samples_dropped for counts in done.values()) == 0
    by_step: dict[int, set[str]] = {}
    for member in swarm.members.values():
        by_step.setdefault(member.optimizer.global_step, set()).add(member.optimizer.state_digest())
    assert all(len(digests) == 1 for digests in by_step.values()), by_step
    assert quadratic(swarm.members["p0"].model) < 0.7 * quadratic(new_model()), "it learns"


@pytest.mark.parametrize("moment_s", few_of([20.1, 21.3, 23.7, 26.0], 1, pytest.mark.long))
def test_a_killed_peer_costs_the_others_no_sample(moment_s: float) -> None:
    def train(member: Member) -> None:
        if member.name == "p2":
            while True:
                member.step(quadratic(member.model))
        while member.optimizer.global_step < 12:
            member.step(quadratic(member.model))
            member.check_samples()
        member.optimizer.settle()
        assert member.optimizer.statistics.samples_dropped == 0
        member.check_samples()

    swarm = Swarm(executor_cost_s=slow_steps)
    for name in ("p0", "p1", "p2"):
        swarm.start(name, new_model, adam, train, target_batch_size=48, batch_size_per_step=4, delay="gradients")
    swarm.world.schedule(at(moment_s).kill("p2"), at(moment_s).call(lambda: swarm.done.add("p2")))
    swarm.run()


@pytest.mark.parametrize("delay", [None, "optimizer", "gradients"])
def test_an_error_of_the_wrapped_optimizer_reaches_the_training_loop_and_spoils_nothing(delay: Any) -> None:
    """The others have made the step: this peer follows them with their state."""
    broken: set[str] = set()

    class Fragile(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if broken and self is swarm.members["p1"].optimizer.inner:
                broken.clear()
                raise ZeroDivisionError("on purpose")

    def train(member: Member) -> None:
        together(2, member)
        for step in (1, 2, 3, 4):
            if step == 3 and member.name == "p1":
                broken.add("p1")
            try:
                member.step(quadratic(member.model))
                member.wait_for(step)
                member.optimizer.settle()
            except ZeroDivisionError:
                raised.append(member.name)
                member.check_samples()
                member.optimizer.zero_grad()
                member.wait_for(step)
        assert quadratic(member.model) < 0.8 * quadratic(new_model())
        member.check_samples()

    swarm = Swarm()
    raised: list[str] = []
    for name in ("p0", "p1"):
        swarm.start(
            name, new_model, lambda model: Fragile(model.parameters(), lr=0.2), train,
            target_batch_size=8, batch_size_per_step=4, delay=delay,
        )  # fmt: skip
    swarm.run()
    assert raised == ["p1"]
    counts = swarm.members["p1"].optimizer.statistics
    assert (counts.states_loaded, counts.samples_dropped) == (1, 4)
    assert len({member.optimizer.state_digest() for member in swarm.members.values()}) == 1


@pytest.mark.long
def test_a_peer_that_falls_behind_loads_the_state_and_goes_on() -> None:
    def train(member: Member) -> None:
        while member.optimizer.global_step < 18:
            member.step(quadratic(member.model))
            member.check_samples()
        member.optimizer.settle()

    swarm = Swarm(seed=3)
    for name in ("p0", "p1", "p2"):
        swarm.start(name, new_model, adam, train, target_batch_size=48, batch_size_per_step=4, delay="gradients")
    swarm.world.schedule(at(20.0).freeze("p1"), at(50.0).thaw("p1"))
    swarm.run()
    assert swarm.members["p1"].optimizer.statistics.states_loaded >= 1


def test_a_delay_needs_the_copy_on_the_host() -> None:
    swarm = Swarm()
    swarm.start("p0", new_model, adam, lambda member: None, target_batch_size=4, delay="gradients", offload=False)
    with pytest.raises(ConfigError, match="leave offload out"):
        swarm.run()
