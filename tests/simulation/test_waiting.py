"""A peer that waits for the others goes on computing, and the group of a step is found at once."""

from __future__ import annotations

import logging
import random
import statistics

import pytest
import torch

from manyhands.testing import at, between
from tests.simulation.swarm_of_trainers import Member, Swarm, together
from tests.simulation.test_delay import quadratic, sgd
from tests.simulation.test_drop_in import new_model
from tests.sweeps import few_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("manyhands").setLevel(logging.ERROR)


def train_until(member: Member, global_step: int, batch_s: float) -> None:
    while member.optimizer.global_step < global_step:
        member.step(quadratic(member.model), batch_s=batch_s)
        member.check_samples()


def test_fast_peers_go_on_while_a_slow_one_finishes_its_batch() -> None:
    """A batch takes them 0.2 s and 4 s: waiting in step() would be for 2 s on average, 10 batches of the fast one."""
    waits: list[float] = []

    def train(member: Member) -> None:
        together(2, member)
        if member.name == "slow":
            train_until(member, 8, 4.0)
            return
        while member.optimizer.global_step < 8:
            member.peer.sleep(0.2)
            quadratic(member.model).backward()
            before, step = member.peer.time(), member.optimizer.global_step
            member.optimizer.step()
            member.optimizer.zero_grad()
            if member.optimizer.global_step > step > 1:  # the speeds are known by then
                waits.append(member.peer.time() - before)

    swarm = Swarm()
    for name in ("fast", "slow"):
        swarm.start(name, new_model, sgd, train, target_batch_size=100, batch_size_per_step=2)
    swarm.run()
    assert len(waits) >= 5
    assert sum(waits) / len(waits) < 0.9
    for member in swarm.members.values():
        counts = member.optimizer.statistics
        assert counts.samples_dropped == counts.rounds_aborted == counts.states_loaded == 0
    used = sum(member.optimizer.statistics.samples_used for member in swarm.members.values())
    assert used >= 8 * 100


def waits(latency_s: float) -> list[float]:
    """Seconds that the training threads of four peers wait in a step; nothing is dropped, and nothing left out."""
    seen: list[float] = []

    def train(member: Member) -> None:
        together(4, member)
        while member.optimizer.global_step < 10:
            member.peer.sleep(0.5)
            quadratic(member.model).backward()
            before, step = member.peer.time(), member.optimizer.global_step
            member.optimizer.step()
            member.optimizer.zero_grad()
            member.check_samples()
            if member.optimizer.global_step > step > 1:
                seen.append(member.peer.time() - before)

    swarm = Swarm()
    swarm.world.network.default_link.latency_s = latency_s
    for number in range(4):
        swarm.start(f"p{number}", new_model, sgd, train, target_batch_size=160, batch_size_per_step=4)
    swarm.run()
    for member in swarm.members.values():
        counts = member.optimizer.statistics
        assert counts.samples_dropped == counts.rounds_aborted == counts.states_loaded == 0
        assert counts.samples_used == counts.samples_computed - member.optimizer.samples_accumulated
    return seen


@pytest.mark.long
@pytest.mark.parametrize(
    ("latency_s", "wait_s"),
    [(0.1, 0.85), pytest.param(0.02, 0.165, marks=pytest.mark.long), pytest.param(0.2, 1.65, marks=pytest.mark.long)],
)
def test_the_wait_in_a_step_is_some_trips_between_the_peers(latency_s: float, wait_s: float) -> None:
    """All know who leads, and connections and streams are open."""
    assert statistics.mean(waits(latency_s)) == pytest.approx(wait_s, rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize(("target", "batch_s"), [(256, 1.25), (320, 0.26)])
def test_a_step_has_as_many_samples_as_its_target_says(target: int, batch_s: float) -> None:
    """Each of four peers brought one batch more, and three more when steps were short: 320 for 256, and 512 for 320."""
    sizes = samples_of_steps(target, 16, [batch_s] * 4, latency_s=0.02)
    assert len(sizes) >= 10
    assert target <= statistics.median(sizes) <= 1.08 * target, sizes


@pytest.mark.long
def test_peers_of_unequal_speeds_bring_little_more_than_the_target() -> None:
    sizes = samples_of_steps(256, 16, [0.6, 0.9, 1.2, 2.4], latency_s=0.02)
    assert 256 <= statistics.median(sizes) <= 256 + 3 * 16, sizes


@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "batches_s", "most"),
    [
        (64, [0.4, 0.43, 0.79, 0.83], 1.13),
        (256, [0.4, 0.43, 0.79, 0.83], 1.08),
        (64, [0.6, 0.9, 1.2, 2.4], 1.25),
    ],
)
def test_delayed_steps_have_little_more_than_the_target(target: int, batches_s: list[float], most: float) -> None:
    """Each peer brought one batch more, or two when steps were short: 1.2 times 256, and 1.75 and 2.0 times 64."""
    sizes = samples_of_steps(target, 8, batches_s, latency_s=0.02, delay="gradients")
    assert len(sizes) >= 10
    assert min(sizes) >= target
    assert statistics.median(sizes) <= most * target, sizes


def samples_of_steps(
    target: int, batch: int, batches_s: list[float], latency_s: float, delay: str | None = None
) -> list[float]:
    """The samples of each step but the first ones, of all peers together; a batch takes each peer so long."""
    sizes: dict[int, float] = {}

    def train(member: Member) -> None:
        together(len(batches_s), member)
        number = int(member.name[1:])
        member.peer.sleep(batches_s[number] * number / len(batches_s))  # the first batches do not begin at one time
        while member.optimizer.global_step < 20:
            before = member.optimizer.global_step
            member.step(quadratic(member.model), batch_s=batches_s[number])
            manifest = member.optimizer.last_round
            if before >= 3 and member.optimizer.global_step > before and manifest is not None:
                sizes[member.optimizer.global_step] = sum(manifest.weights)

    swarm = Swarm()
    swarm.world.network.default_link.latency_s = latency_s
    for number in range(len(batches_s)):
        swarm.start(
            f"p{number}", new_model, sgd, train, target_batch_size=target, batch_size_per_step=batch, delay=delay
        )
    swarm.run()
    return list(sizes.values())


def test_an_auxiliary_peer_helps_to_average_and_nobody_waits_for_it() -> None:
    helped: set[str] = set()

    def train(member: Member) -> None:
        together(2, member)
        for step in range(1, 13):
            train_until(member, step, 1.0)
            manifest = member.optimizer.last_round
            if manifest is not None and len(manifest.members) == 3:
                assert min(manifest.weights) == 0.0
                helped.add(member.name)
        assert member.optimizer.num_peers == 2
        assert member.optimizer.statistics.rounds_aborted == 0

    def help_out(member: Member) -> None:
        while {"p0", "p1"} - swarm.done:
            member.optimizer.step()
        assert member.optimizer.statistics.samples_computed == 0
        assert member.optimizer.statistics.rounds_committed > 0

    swarm = Swarm()
    for name in ("p0", "p1"):
        swarm.start(name, new_model, sgd, train, target_batch_size=32, batch_size_per_step=4)
    swarm.start("helper", new_model, sgd, help_out, target_batch_size=32, auxiliary=True)
    swarm.run()
    assert helped == {"p0", "p1"}


@pytest.mark.parametrize("joins_s", few_of([20.0, 0.0], 1, pytest.mark.long))
def test_an_auxiliary_peer_is_in_the_rounds_of_a_trainer_that_is_alone(joins_s: float) -> None:
    """So that the state survives that trainer. Nobody's values but the trainer's are in the state."""
    num_members: list[int] = []

    def train(member: Member) -> None:
        for step in range(1, 41):
            train_until(member, step, 1.0)
            manifest = member.optimizer.last_round
            num_members.append(1 if manifest is None else len(manifest.members))

    def help_out(member: Member) -> None:
        while "trainer" not in swarm.done:
            member.optimizer.step()

    swarm = Swarm()
    swarm.start("trainer", new_model, sgd, train, target_batch_size=8, batch_size_per_step=4)
    swarm.start("helper", new_model, sgd, help_out, target_batch_size=8, auxiliary=True, begins_s=joins_s)
    swarm.run()
    assert num_members[-10:].count(2) >= 8, str(num_members)  # it misses one now and then


@pytest.mark.long
def test_an_auxiliary_peer_that_freezes_holds_up_one_step_and_one_that_is_killed_none() -> None:
    """It has a place in the group that forms ahead, and is waited for as a trainer would be."""
    assert [wait_s > 1.0 for wait_s in waits_beside_a_helper("kill")] == [False] * 18
    held_up = [wait_s for wait_s in waits_beside_a_helper("freeze") if wait_s > 1.0]
    assert len(held_up) == 1
    assert held_up[0] < 8.0


def waits_beside_a_helper(fault: str) -> list[float]:
    """How long a trainer waits in each of its steps, but the first ones; the helper is lost as the 7th comes."""
    waits: list[float] = []

    def train(member: Member) -> None:
        together(2, member)
        while (step := member.optimizer.global_step) < 20:
            member.peer.sleep(0.5)
            quadratic(member.model).backward()
            before = member.peer.time()
            member.optimizer.step()
            member.optimizer.zero_grad()
            if member.name == "p0" and member.optimizer.global_step > step >= 2:
                waits.append(member.peer.time() - before)
        lost.add("helper")

    def help_out(member: Member) -> None:
        while not lost:
            member.optimizer.step()

    lost: set[str] = set()
    swarm = Swarm()
    for name in ("p0", "p1"):
        swarm.start(name, new_model, sgd, train, target_batch_size=64, batch_size_per_step=4)
    swarm.start("helper", new_model, sgd, help_out, target_batch_size=64, auxiliary=True)
    swarm.world.schedule(between(33.0, 120.0).freeze("helper") if fault == "freeze" else at(33.0).kill("helper"))
    if fault == "kill":
        swarm.done.add("helper")
    swarm.run()
    return waits


def test_steps_that_average_for_longer_than_they_compute_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("manyhands").setLevel(logging.INFO)

    def train(member: Member) -> None:
        together(2, member)
        train_until(member, 6, 3.0)

    swarm = Swarm()
    for name in ("p0", "p1"):
        swarm.start(name, lambda: torch.nn.Linear(600, 600), sgd, train, target_batch_size=4, batch_size_per_step=2)
        swarm.world.network.set_bandwidth(name, up_mbit_s=0.5, down_mbit_s=2.0)  # averaging takes longer than a step
    swarm.run(4000.0)
    words = [record.message for record in caplog.records if "the run waits more than it trains" in record.message]
    assert len(words) == 2, "once for each peer"
    assert "instead of 4" in words[0]
    assert any("samples computed here so far" in record.message for record in caplog.records)


@pytest.mark.long
def test_peers_whose_batches_take_seconds_still_meet_after_trouble() -> None:
    """A member is late four times, so less is waited for all; then it leaves. A call finds the others in mid-batch."""
    late_s, gone_s, end_s, batch_s = 60.0, 180.0, 330.0, 4.0

    def train(member: Member) -> None:
        rng = random.Random(member.name)
        while member.peer.time() < end_s:
            is_late = member.name == "late" and late_s < member.peer.time()
            if is_late and member.peer.time() >= gone_s:
                return
            member.step(quadratic(member.model), batch_s=40.0 if is_late else batch_s * rng.uniform(0.9, 1.1))
            member.check_samples()

    swarm = Swarm(seed=1)
    for name in ("p0", "p1", "p2", "p3", "late"):
        swarm.start(name, new_model, sgd, train, target_batch_size=40, batch_size_per_step=4)
    swarm.run(end_s + 100.0)
    for name in ("p0", "p1", "p2", "p3"):
        optimizer = swarm.members[name].optimizer
        assert optimizer.statistics.rounds_aborted <= 3
        assert optimizer.statistics.samples_dropped == 0
        assert optimizer.last_round is not None
        assert len(optimizer.last_round.members) == 4
