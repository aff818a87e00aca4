"""Alone, paused or forked: what peers do that cannot see, or cannot reach, the others of their run."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

import manyhands
from manyhands.base.address import Address
from manyhands.checkpoints.checkpoint_dir import read_checkpoint_info
from manyhands.optim.optimizer import FAILURES_UNTIL_ADVICE
from manyhands.optim.run.belief import FOUNDING_ROUNDS
from manyhands.peer import Presence
from manyhands.testing import Host, between
from tests.simulation.swarm_of_trainers import Member, Swarm
from tests.simulation.test_delay import sgd
from tests.simulation.test_drop_in import new_model
from tests.sweeps import few_of

pytestmark = pytest.mark.usefixtures("one_thread")

END_S = 400.0
TARGET = 48


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("manyhands").setLevel(logging.ERROR)


def start(
    swarm: Swarm,
    names: list[str],
    seen: dict[str, list[tuple[float, int]]],
    end_s: float = END_S,
    batch_s: float = 0.5,
    **options: Any,
) -> None:
    """Trainers that note when they were at which step; each computes 8 samples a second."""

    def train(member: Member) -> None:
        while member.peer.time() < end_s:
            member.peer.sleep(batch_s)
            (sum(parameter.square().sum() for parameter in member.model.parameters())).backward()  # type: ignore[union-attr]
            member.optimizer.step()
            member.optimizer.zero_grad()
            member.check_samples()
            seen.setdefault(member.name, []).append((member.peer.time(), member.optimizer.global_step))
        member.wait_for(max(steps[-1][1] for steps in seen.values()))

    for name in names:
        swarm.start(
            name, new_model, sgd, train, target_batch_size=TARGET, batch_size_per_step=int(8 * batch_s), **options
        )


def step_at(steps: list[tuple[float, int]], time: float) -> int:
    return max((step for when, step in steps if when <= time), default=0)


def assert_one_branch(swarm: Swarm) -> None:
    by_step: dict[int, set[str]] = {}
    for member in swarm.members.values():
        by_step.setdefault(member.optimizer.global_step, set()).add(member.optimizer.state_digest())
    assert all(len(digests) == 1 for digests in by_step.values()), by_step
    assert max(by_step) - min(by_step) <= 1


@pytest.mark.long
def test_of_two_halves_that_both_went_on_the_branch_with_more_steps_wins() -> None:
    swarm, seen = Swarm(seed=21), {}
    many, few = ["p0", "p1", "p2"], ["p3", "p4"]
    start(swarm, [*many, *few], seen)
    swarm.world.schedule(between(60.0, 200.0).partition(many, few))
    swarm.run(END_S + 60)
    for name in (*many, *few):
        assert step_at(seen[name], 195.0) > step_at(seen[name], 65.0) + 5, "both go on"
    assert step_at(seen["p0"], 195.0) > step_at(seen["p3"], 195.0)
    assert sum(swarm.members[name].optimizer.statistics.samples_dropped for name in many) == 0
    for name in few:
        assert swarm.members[name].optimizer.statistics.states_loaded >= 1
        steps = [step for _, step in seen[name]]
        assert steps == sorted(steps)
    assert_one_branch(swarm)


@pytest.mark.long
def test_the_checkpoints_of_the_side_that_lost_are_set_aside_and_those_from_before_the_split_are_not(
    tmp_path: Path,
) -> None:
    """The lonely peer makes steps and checkpoints during the cut, then loads the state of the others."""
    swarm, lineages = Swarm(seed=22), {}

    def train(member: Member) -> None:
        checkpoints = None
        if member.name == "p3":
            checkpoints = manyhands.Checkpoints(tmp_path, member.optimizer, member.model, every=4, keep=4)
        while member.peer.time() < 130.0:
            member.peer.sleep(0.5)
            (sum(parameter.square().sum() for parameter in member.model.parameters())).backward()  # type: ignore[union-attr]
            member.optimizer.step()
            member.optimizer.zero_grad()
            step = member.optimizer.global_step
            lineages.setdefault(member.name, {})[step] = member.optimizer.state_dict()["manyhands"]["lineage"]
            if checkpoints is not None:
                checkpoints.save_if_due()

    for name in ("p0", "p1", "p2", "p3"):
        swarm.start(name, new_model, sgd, train, target_batch_size=TARGET, batch_size_per_step=4)
    swarm.world.schedule(between(15.0, 80.0).partition(["p0", "p1", "p2"], ["p3"]))
    swarm.run(200.0)
    assert swarm.members["p3"].optimizer.statistics.steps_alone > 0
    kept = {path: read_checkpoint_info(path).place for path in tmp_path.glob("checkpoint-*")}
    aside = {path: read_checkpoint_info(path).place for path in tmp_path.glob("other-*/checkpoint-*")}
    others = lineages["p0"] | lineages["p1"] | lineages["p2"]
    assert all(others[place.step] == place.lineage for place in kept.values())
    assert aside
    assert all(others.get(place.step) != place.lineage for place in aside.values())


def test_a_peer_that_sees_nobody_goes_on_alone_and_comes_back_to_the_others() -> None:
    """In ``make test`` although it takes 3 s: records expire after 30 s, and all go on for some steps after that."""
    swarm, seen = Swarm(seed=22), {}
    others, lonely = ["p0", "p1"], "p2"
    start(swarm, [*others, lonely], seen, end_s=105.0, batch_s=1.0)
    swarm.world.schedule(between(15.0, 85.0).partition(others, [lonely]))
    swarm.run(165.0)
    counts = swarm.members[lonely].optimizer.statistics
    assert counts.steps_alone >= 5
    assert step_at(seen[lonely], 43.0) <= step_at(seen[lonely], 17.0) + 1, "not before their records have expired"
    assert counts.states_loaded >= 1
    assert sum(swarm.members[name].optimizer.statistics.samples_dropped for name in others) == 0
    assert_one_branch(swarm)


@pytest.mark.long
@pytest.mark.parametrize(("seed", "cut_s", "healed_s"), few_of([(9, 22.79, 89.36), (12, 23.72, 92.48)]))
def test_a_peer_that_comes_back_from_a_long_cut_costs_the_others_no_samples(
    seed: int, cut_s: float, healed_s: float
) -> None:
    """The lonely peer has the lowest id, or is in the way of another one, before it has dialled all others again."""
    swarm, seen = Swarm(seed=seed), {}
    others, lonely = ["p0", "p1", "p2"], "p3"
    start(swarm, [*others, lonely], seen, end_s=115.0)
    swarm.world.schedule(between(cut_s, healed_s).partition(others, [lonely]))
    swarm.run(175.0)
    assert [swarm.members[name].optimizer.statistics.samples_dropped for name in others] == [0, 0, 0]
    assert swarm.members[lonely].optimizer.statistics.states_loaded == 1
    assert_one_branch(swarm)


@pytest.mark.long
def test_a_peer_that_sees_others_but_reaches_none_pauses_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A coordinator hands the records on. No branch is made, and no sample is lost.

    In ``make test`` although it takes 3 s: the advice comes after failures that are further and further apart.
    """
    logging.getLogger("manyhands").setLevel(logging.WARNING)
    swarm, seen = Swarm(seed=23), {}

    swarm.start_coordinator()
    start(swarm, ["p0", "p1"], seen, end_s=270.0, batch_s=1.0)
    swarm.world.schedule(between(30.0, 220.0).partition({"p0"}, {"p1"}))
    swarm.run(330.0)
    for name in ("p0", "p1"):
        counts = swarm.members[name].optimizer.statistics
        assert (counts.steps_alone, counts.samples_dropped, counts.states_loaded) == (0, 0, 0), (name, counts)
        assert step_at(seen[name], 215.0) <= step_at(seen[name], 32.0) + 1, "it pauses"
        assert step_at(seen[name], 270.0) > step_at(seen[name], 215.0) + 5, "and goes on"
        assert counts.rounds_aborted >= FAILURES_UNTIL_ADVICE
    assert "This peer does not step alone" in caplog.text
    assert "see docs/reference/errors.md#" in caplog.text
    assert_one_branch(swarm)


@pytest.mark.long
def test_a_peer_with_allow_solo_that_reaches_nobody_goes_on_alone() -> None:
    swarm, seen = Swarm(seed=24), {}
    swarm.start_coordinator()
    start(swarm, ["p0"], seen, end_s=270.0, batch_s=1.0, allow_solo=True)
    start(swarm, ["p1"], seen, end_s=270.0, batch_s=1.0)
    swarm.world.schedule(between(30.0, 220.0).partition({"p0"}, {"p1"}))
    swarm.run(330.0)
    bold, patient = (swarm.members[name].optimizer.statistics for name in ("p0", "p1"))
    assert bold.steps_alone >= 5
    assert (bold.samples_dropped, bold.states_loaded) == (0, 0)
    assert patient.steps_alone == 0
    assert 1 <= patient.states_loaded <= 3, "it follows; meanwhile the other one may make steps before it dials again"
    assert_one_branch(swarm)


@pytest.mark.parametrize("seed", few_of([1, 2, 3, 4]))
@pytest.mark.parametrize("num_few", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_run_that_was_begun_twice_becomes_one(seed: int, num_few: int) -> None:
    """Two DHTs do not know each other at first, so no peer is a member on both sides."""
    swarm, seen, begun = Swarm(seed=seed), {}, {}
    many, few = ["p0", "p1", "p2"][: 1 + num_few], ["p3", "p4"][:num_few]
    ours: list[Address] = []
    theirs: list[Address] = []

    async def link(host: Host) -> None:
        presence = Presence(swarm.world.transport(host), rng=swarm.world.rng("link"), wall_clock=host.wall_clock)
        try:
            await asyncio.sleep(12.0)
            begun.update({name: steps[-1][1] for name, steps in seen.items()})
            await presence.start([*ours, *theirs], [Address.of(host.ip, 0)])
            await asyncio.Event().wait()
        finally:
            await presence.stop()

    start(swarm, many, seen, end_s=60.0, initial_peers=ours)
    start(swarm, few, seen, end_s=60.0, initial_peers=theirs)
    swarm.world.start("link", link)
    swarm.run(120.0)
    assert all(0 < step <= FOUNDING_ROUNDS for step in begun.values()), begun
    assert_one_branch(swarm)
