"""What happens to a run when a peer is killed in any phase of a step, freezes, is told a wrong time, or is slow."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from manyhands.averaging.allreduce.butterfly import Butterfly
from manyhands.averaging.matchmaking.matchmaker import Matchmaker
from manyhands.averaging.round.round_machine import Round
from manyhands.optim.local_steps import LocalSteps, nesterov
from manyhands.optim.run.collaboration import Collaboration
from manyhands.optim.step.replica import Replica
from manyhands.testing import at, between
from tests.simulation.swarm_of_trainers import Member, Swarm, together
from tests.simulation.test_delay import quadratic, sgd
from tests.simulation.test_drop_in import adam, new_model
from tests.sweeps import few_of

pytestmark = pytest.mark.usefixtures("one_thread")

PHASES: dict[str, tuple[type, str]] = {
    "deciding": (Collaboration, "decide"),
    "looking for a group": (Matchmaker, "find_group"),
    "averaging": (Butterfly, "run"),
    "voting": (Round, "_exchanged"),
    "updating": (Replica, "advance"),
    "telling": (Collaboration, "move"),
}
LAST_STEP = 8
WAIT_LIMIT_S = 75.0
"""A round and its verdict take at most so long; no thread waits longer."""


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("manyhands").setLevel(logging.CRITICAL)


class Longest:
    """How long a training thread waited at most."""

    def __init__(self) -> None:
        self.wait_s = 0.0

    def train_until(self, member: Member, global_step: int, batch_s: float = 0.5) -> None:
        while member.optimizer.global_step < global_step:
            member.peer.sleep(batch_s)
            quadratic(member.model).backward()
            before = member.peer.time()
            member.optimizer.step()
            self.wait_s = max(self.wait_s, member.peer.time() - before)
            member.optimizer.zero_grad()
            member.check_samples()


def assert_it_learns_and_agrees(swarm: Swarm, names: list[str]) -> None:
    by_step: dict[int, set[str]] = {}
    for name in names:
        member = swarm.members[name]
        by_step.setdefault(member.optimizer.global_step, set()).add(member.optimizer.state_digest())
        assert quadratic(member.model) < 0.9 * quadratic(new_model()), name
    assert all(len(digests) == 1 for digests in by_step.values()), by_step


MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "delayed": {"delay": "gradients"},
    "local": {"local_steps": LocalSteps(nesterov)},
    "fragments": {"local_steps": LocalSteps(nesterov, fragments=2, overlap_steps=1)},
}


@pytest.mark.parametrize("mode", few_of(MODES))
@pytest.mark.parametrize("rank", few_of([0, 2], 1, pytest.mark.long), ids=["leader", "follower"])
@pytest.mark.parametrize("phase", few_of(PHASES, 3))
def test_the_others_learn_and_lose_no_sample_after_a_kill_in_any_phase(
    phase: str, rank: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, longest = ["p0", "p1", "p2"], Longest()
    swarm = Swarm(seed=rank)
    by_id = sorted(names, key=lambda name: swarm.world.identity(name).peer_id)
    victim, others = by_id[rank], [name for name in names if name != by_id[rank]]
    owner, method = PHASES[phase]
    original: Callable[..., Any] = getattr(owner, method)

    def deadly(self: Any, *args: Any, **kwargs: Any) -> Any:
        member = swarm.members.get(victim)
        if (
            member is not None
            and member.optimizer.global_step == 3
            and victim not in swarm.done
            and swarm.is_running(victim)
        ):
            swarm.done.add(victim)
            swarm.world.loop.call_soon(swarm.world.kill, victim)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, deadly)

    def train(member: Member) -> None:
        together(3, member)
        longest.train_until(member, LAST_STEP if member.name != victim else 10**6)
        member.optimizer.settle()

    for name in names:
        swarm.start(name, new_model, sgd, train, target_batch_size=36, batch_size_per_step=4, **MODES[mode])
    swarm.run()
    assert victim in swarm.done
    assert longest.wait_s < WAIT_LIMIT_S
    assert_it_learns_and_agrees(swarm, others)
    for name in others:
        counts = swarm.members[name].optimizer.statistics
        assert counts.samples_dropped == 0, (name, counts)


def train_all(
    swarm: Swarm, longest: Longest, names: list[str], until_step: int, *, batch_s: dict[str, float] | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """Each trains until the run has reached a step."""

    def train(member: Member) -> None:
        longest.train_until(member, until_step, (batch_s or {}).get(member.name, 0.5))
        member.optimizer.settle()

    for name in names:
        swarm.start(name, new_model, sgd, train, **{"target_batch_size": 36, "batch_size_per_step": 4, **options})


def test_a_peer_that_froze_for_half_a_minute_notices_reloads_and_goes_on() -> None:
    swarm, longest = Swarm(seed=5), Longest()
    train_all(swarm, longest, ["p0", "p1", "p2"], 30)
    swarm.world.schedule(between(20.0, 50.0).freeze("p1"))
    swarm.run()
    counts = swarm.members["p1"].optimizer.statistics
    assert counts.states_loaded >= 1
    assert counts.rounds_committed >= 5, "it takes part again"
    for name in ("p0", "p2"):
        assert swarm.members[name].optimizer.statistics.samples_dropped == 0
    assert longest.wait_s < WAIT_LIMIT_S
    assert_it_learns_and_agrees(swarm, ["p0", "p1", "p2"])


@pytest.mark.long
@pytest.mark.parametrize("jump_s", few_of([3600.0, -3600.0]))
def test_a_clock_that_jumps_by_an_hour_does_not_end_the_run(jump_s: float) -> None:
    """Its records count nowhere then, so the peer is alone until its clock is right; the others go on without it."""
    swarm, longest = Swarm(seed=6), Longest()
    names = ["p0", "p1", "p2"]
    train_all(swarm, longest, names, 30, batch_s=dict.fromkeys(names, 2.0))
    swarm.world.schedule(at(20.0).clock("p1", jump_s), at(90.0).clock("p1", -jump_s))
    swarm.run(900.0)
    assert longest.wait_s < WAIT_LIMIT_S
    assert_it_learns_and_agrees(swarm, names)
    for name in ("p0", "p2"):
        counts = swarm.members[name].optimizer.statistics
        assert counts.samples_used >= 0.95 * counts.samples_computed, counts
        assert counts.steps_alone == 0
    assert swarm.members["p1"].optimizer.last_round is not None, "it is back in the end"


@pytest.mark.long
def test_twenty_peers_that_join_at_once_all_take_part() -> None:
    swarm, longest = Swarm(seed=7), Longest()
    names = [f"p{number}" for number in range(21)]

    def train(member: Member) -> None:
        if member.name == "p0":
            longest.train_until(member, 3)
        longest.train_until(member, 12)

    swarm.start("p0", new_model, sgd, train, target_batch_size=160, batch_size_per_step=4)

    def all_at_once() -> None:
        for name in names[1:]:
            swarm.start(name, new_model, sgd, train, target_batch_size=160, batch_size_per_step=4)

    swarm.started.update(names)
    swarm.world.schedule(at(30.0).call(all_at_once))
    swarm.run(900.0)
    assert longest.wait_s < WAIT_LIMIT_S
    sizes = [len(swarm.members[name].optimizer.last_round.members) for name in names]  # type: ignore[union-attr]
    assert min(sizes) >= 19, sizes
    assert_it_learns_and_agrees(swarm, names)


def test_a_fast_peer_that_reaches_the_target_alone_waits_for_a_slow_one() -> None:
    """The slow one is waited for, and its samples count in each step: it is not left to load states for ever."""
    swarm, longest = Swarm(seed=8), Longest()
    train_all(swarm, longest, ["fast", "slow"], 12, batch_s={"fast": 0.1, "slow": 6.0}, target_batch_size=8)
    swarm.run(900.0)
    slow = swarm.members["slow"].optimizer.statistics
    assert slow.samples_used >= 8 * 4, slow
    assert slow.states_loaded <= 2
    assert swarm.members["fast"].optimizer.statistics.samples_dropped == 0
    assert longest.wait_s < WAIT_LIMIT_S
    assert_it_learns_and_agrees(swarm, ["fast", "slow"])


@pytest.mark.long
def test_a_newcomer_joins_a_lone_peer_though_its_download_takes_longer_than_a_step() -> None:
    """The lone peer goes on computing, but does not step away from who comes."""
    swarm, longest = Swarm(seed=9), Longest()

    def big_model() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Linear(300, 300)

    def train(member: Member) -> None:
        longest.train_until(member, 80, 0.2)

    for name in ("early", "late"):
        swarm.start(name, big_model, sgd, train, target_batch_size=4, batch_size_per_step=4)
    swarm.world.network.set_bandwidth("late", up_mbit_s=2.0, down_mbit_s=2.0)  # its download takes 1.4 s
    swarm.world.schedule(at(0.05).kill("late"), at(6.0).restart("late"))
    swarm.run(900.0)
    early, late = (swarm.members[name].optimizer.statistics for name in ("early", "late"))
    assert late.rounds_committed >= 20, late
    assert late.states_loaded <= 3, late
    assert early.samples_dropped == 0
    assert early.steps_alone >= 10


@pytest.mark.parametrize("delay", few_of([None, "gradients"], 1, pytest.mark.long), ids=["synchronous", "delayed"])
def test_a_lone_survivor_goes_on_before_the_record_of_the_dead_one_expires(delay: str | None) -> None:
    swarm, longest = Swarm(seed=12), Longest()
    killed_s, first_alone_s = 30.0, []

    def train(member: Member) -> None:
        together(2, member)
        while not first_alone_s:
            longest.train_until(member, member.optimizer.global_step + 1)
            member.optimizer.settle()
            if member.optimizer.statistics.steps_alone:
                first_alone_s.append(member.peer.time())
        longest.train_until(member, member.optimizer.global_step + 10)
        member.optimizer.settle()

    for name in ("p0", "p1"):
        swarm.start(name, new_model, sgd, train, target_batch_size=36, batch_size_per_step=4, delay=delay)
    swarm.world.schedule(at(killed_s).kill("p1"), at(killed_s).call(lambda: swarm.done.add("p1")))
    swarm.run()
    assert longest.wait_s < WAIT_LIMIT_S
    assert first_alone_s[0] - killed_s < 20.0, "its record lives for 30 s, and is renewed each 10 s"
    assert swarm.members["p0"].optimizer.statistics.samples_dropped == 0
    assert_it_learns_and_agrees(swarm, ["p0"])


@pytest.mark.parametrize("fault", few_of(["partition", "freeze"], 1, pytest.mark.long))
def test_a_silent_peer_is_not_taken_for_dead_before_its_record_expires(fault: str) -> None:
    """No machine says that it is gone: the peer pauses, and when the cut is over they go on together."""
    swarm, longest = Swarm(seed=13), Longest()
    train_all(swarm, longest, ["p0", "p1"], 25)
    during = between(30.0, 48.0)
    swarm.world.schedule(during.partition({"p0"}, {"p1"}) if fault == "partition" else during.freeze("p1"))
    swarm.run()
    for member in swarm.members.values():
        counts = member.optimizer.statistics
        assert (counts.steps_alone, counts.samples_dropped) == (0, 0), (member.name, counts)
    assert_it_learns_and_agrees(swarm, ["p0", "p1"])


@pytest.mark.long
def test_a_newcomer_joins_a_group_though_its_download_takes_longer_than_a_step() -> None:
    """It makes the steps that were made meanwhile; no step waits for it."""
    swarm, longest = Swarm(seed=14), Longest()

    def big_model() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Linear(300, 300)

    def train(member: Member) -> None:
        longest.train_until(member, 60)

    for name in ("p0", "p1", "late"):
        swarm.start(name, big_model, adam, train, target_batch_size=48, batch_size_per_step=4)
    swarm.world.network.set_bandwidth("late", up_mbit_s=2.0, down_mbit_s=2.0)  # 1.1 MB take 4.4 s, and a step 3 s
    swarm.world.schedule(at(0.05).kill("late"), at(20.0).restart("late"))
    swarm.run(1200.0)
    late = swarm.members["late"].optimizer.statistics
    assert late.rounds_committed >= 20, late
    assert late.states_loaded <= 4, late
    assert longest.wait_s < WAIT_LIMIT_S
    for name in ("p0", "p1"):
        counts = swarm.members[name].optimizer.statistics
        assert (counts.samples_dropped, counts.steps_alone, counts.states_loaded) == (0, 0, 0), (name, counts)


def newcomer_on_a_slow_link(seed: int, target_batch_size: int, num_steps: int) -> Swarm:
    """Two peers train; "late" comes back after 20 s, and a download takes it 18 s."""
    swarm, longest = Swarm(seed), Longest()

    def big_model() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Linear(300, 300)

    def train(member: Member) -> None:
        while member.name == "late":
            member.step(quadratic(member.model))
        longest.train_until(member, num_steps)

    for name in ("p0", "p1", "late"):
        swarm.start(name, big_model, adam, train, target_batch_size=target_batch_size, batch_size_per_step=4)
    swarm.world.network.set_bandwidth("late", up_mbit_s=0.5, down_mbit_s=0.5)
    swarm.world.schedule(at(0.05).kill("late"), at(20.0).restart("late"))
    swarm.done.add("late")
    swarm.run(2400.0)
    for name in ("p0", "p1"):
        counts = swarm.members[name].optimizer.statistics
        assert (counts.samples_dropped, counts.steps_alone, counts.states_loaded) == (0, 0, 0), (name, counts)
    return swarm


@pytest.mark.sweep
def test_a_newcomer_that_cannot_keep_up_says_what_would_help(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("manyhands").setLevel(logging.WARNING)
    swarm = newcomer_on_a_slow_link(seed=15, target_batch_size=48, num_steps=30)
    assert swarm.members["late"].optimizer.statistics.rounds_committed == 0
    assert "this peer cannot keep up with the run" in caplog.text
    named = re.search(r"target_batch_size=(\d+) instead of 48", caplog.text)
    assert named is not None, caplog.text
    caplog.clear()
    swarm = newcomer_on_a_slow_link(seed=16, target_batch_size=int(named[1]), num_steps=12)
    assert swarm.members["late"].optimizer.statistics.rounds_committed > 3
    assert "cannot keep up" not in caplog.text
