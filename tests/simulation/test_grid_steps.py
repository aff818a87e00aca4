"""Global steps of runs that are too large for one group, in virtual time: several rounds, and one update for all."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from manyhands.averaging.allreduce.butterfly import Butterfly
from manyhands.averaging.matchmaking.matchmaker import Matchmaker
from manyhands.averaging.round.round_machine import Round
from manyhands.base.errors import ManifestMismatch
from manyhands.optim.config import PARAMETERS_EVERY
from manyhands.optim.step.replica import Replica
from manyhands.testing import at
from tests.simulation.swarm_of_trainers import (
    PLAIN,
    Member,
    Swarm,
    assert_equal_parameters,
    cut,
    together,
)
from tests.simulation.test_exactness import MAKERS, Model, data_of_step, loss_of, schedule
from tests.sweeps import few_of

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 10
TARGET = 24


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("manyhands").setLevel(logging.ERROR)


def plain_steps(name: str, num_steps: int, batches: int) -> Model:
    """What one process finds that has all samples; ``batches`` of ``TARGET`` in a step."""
    model = Model()
    optimizer = MAKERS[name](model)
    scheduler = schedule(optimizer)
    for step in range(num_steps):
        for number in range(batches):
            (loss_of(model, data_of_step(100 * step + number)) / batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model


def in_grid(member: Member, num_peers: int) -> None:
    """Wait until all are seen, and have read of each other's seats."""
    together(num_peers, member)
    for _ in range(20):
        member.peer.sleep(0.5)
        member.optimizer.step(batch_size=0)


@pytest.mark.long
@pytest.mark.parametrize(("num_peers", "max_group_size", "num_rounds"), few_of([(12, 4, 2), (12, 3, 3)]))
@pytest.mark.parametrize("name", few_of(["AdamW", "SGD"]))
def test_twelve_peers_in_groups_make_the_steps_of_one_process(
    name: str, num_peers: int, max_group_size: int, num_rounds: int
) -> None:
    """In a grid of 4x3 and of 3x2x2 cells, all of which are taken; each peer has other numbers of samples."""
    swarm = Swarm(seed=num_rounds)
    sizes = [1, 2, 3] * (num_peers // 3)
    keys: set[str] = set()

    def train(member: Member) -> None:
        own = int(member.name[1:])
        in_grid(member, num_peers)
        for step in range(NUM_STEPS):
            batch = cut(data_of_step(100 * step), sizes)[own]
            member.step(loss_of(member.model, batch), batch_size=len(batch[0]))
            member.wait_for(step + 1)
            member.check_samples()
            manifest = member.optimizer.last_round
            assert manifest is not None
            keys.add(manifest.position.group_key)
            assert len(manifest.members) <= max_group_size
            assert sum(manifest.weights) == TARGET, "all know how many samples were in the step"

    for number in range(num_peers):
        swarm.start(
            f"p{number}", Model, MAKERS[name], train, target_batch_size=TARGET, scheduler=schedule,
            averaging=replace(PLAIN, max_group_size=max_group_size, aggregate="mean"),
        )  # fmt: skip
    swarm.run()
    plain = plain_steps(name, NUM_STEPS, 1)
    for member in swarm.members.values():
        assert_equal_parameters(member.model, plain)
        counts = member.optimizer.statistics
        assert (counts.samples_used, counts.samples_dropped) == (counts.samples_computed, 0)
        assert (counts.rounds_committed, counts.states_loaded) == (NUM_STEPS, 0), counts
    assert len({member.optimizer.replica.position for member in swarm.members.values()}) == 1
    assert all(key.startswith({2: "4x3 ", 3: "3x2x2 "}[num_rounds]) for key in keys), keys


@pytest.mark.sweep
def test_sixty_four_peers_in_groups_of_eight_make_the_steps_of_one_process() -> None:
    num_peers, num_steps, batches = 64, 4, 8  # three samples each
    swarm = Swarm(seed=64)

    def train(member: Member) -> None:
        own = int(member.name[1:])
        in_grid(member, num_peers)
        for step in range(num_steps):
            batch = cut(data_of_step(100 * step + own // 8), [3] * 8)[own % 8]
            member.step(loss_of(member.model, batch), batch_size=3)
            member.wait_for(step + 1)
            manifest = member.optimizer.last_round
            assert manifest is not None
            assert (len(manifest.members), sum(manifest.weights)) == (8, num_peers * 3)
            assert manifest.position.group_key.startswith("8x8 ")

    for number in range(num_peers):
        swarm.start(
            f"p{number}", Model, MAKERS["AdamW"], train, target_batch_size=3 * num_peers, scheduler=schedule,
            averaging=replace(PLAIN, max_group_size=8),
        )  # fmt: skip
    swarm.run()
    plain = plain_steps("AdamW", num_steps, batches)
    for member in swarm.members.values():
        assert_equal_parameters(member.model, plain)
        counts = member.optimizer.statistics
        assert (counts.samples_used, counts.rounds_committed) == (3 * num_steps, num_steps), counts


PHASES: dict[str, tuple[type, str]] = {
    "looking for a group": (Matchmaker, "find_group"),
    "averaging": (Butterfly, "run"),
    "voting": (Round, "_exchanged"),
    "updating": (Replica, "advance"),
}
LAST_STEP = 11
STATED = 0.01
"""Relative to the size of the parameters; what they are apart with one cell of twelve empty, and AdamW at lr 0.01."""


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters() if parameter.requires_grad])


def apart(vectors: list[torch.Tensor]) -> float:
    """The root mean square distance from their mean, as a fraction of its size."""
    stacked = torch.stack(vectors).double()
    mean = stacked.mean(dim=0)
    return float((stacked - mean).square().sum(dim=1).mean().sqrt() / mean.norm())


@pytest.mark.long
@pytest.mark.parametrize(
    ("phase", "number", "delay"),
    few_of([(phase, number, None) for number in (1, 0) for phase in PHASES] + [("averaging", 0, "gradients")]),
)
def test_a_grid_steps_on_without_a_peer_killed_in_the_midst_of_a_step(
    phase: str, number: int, delay: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others make this step and the next ones together, lose no sample, and stay near each other."""
    names, victim = [f"p{number}" for number in range(12)], "p5"
    swarm = Swarm(seed=number)
    owner, method = PHASES[phase]
    original: Callable[..., Any] = getattr(owner, method)
    held: dict[int, dict[str, torch.Tensor]] = {}
    told: list[float] = []
    longest = {"s": 0.0}

    def deadly(self: Any, *args: Any, **kwargs: Any) -> Any:
        member = swarm.members.get(victim)
        if member is not None and victim not in swarm.done and member.optimizer.global_step == 3:
            next_round = member.optimizer.collaboration.step_rounds.assignment.position().step
            if swarm.is_running(victim) and (next_round % 2 == number or phase == "updating"):
                swarm.done.add(victim)
                swarm.world.loop.call_soon(swarm.world.kill, victim)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, deadly)

    def train(member: Member) -> None:
        generator = torch.Generator().manual_seed(int(member.name[1:]))
        in_grid(member, 12)
        last = 0
        while member.optimizer.global_step < LAST_STEP or member.name == victim:
            words = torch.randint(11, (4,), generator=generator)
            member.peer.sleep(0.5)
            loss_of(member.model, (words, (3 * words + 1) % 11)).backward()  # type: ignore[no-untyped-call]
            before = member.peer.time()
            member.optimizer.step()
            longest["s"] = max(longest["s"], member.peer.time() - before)
            member.optimizer.zero_grad()
            member.check_samples()
            if member.optimizer.global_step > last:
                last = member.optimizer.global_step
                held.setdefault(last, {})[member.name] = flat(member.model)
                if member.optimizer.statistics.disagreement is not None:
                    told.append(member.optimizer.statistics.disagreement)
        member.optimizer.settle()

    for name in names:
        swarm.start(
            name, Model, MAKERS["AdamW"], train, target_batch_size=96, batch_size_per_step=4, delay=delay,
            averaging=replace(PLAIN, max_group_size=4),
        )  # fmt: skip
    swarm.run()
    others = [swarm.members[name].optimizer for name in names if name != victim]
    assert all(optimizer.statistics.samples_dropped == 0 for optimizer in others)
    assert longest["s"] < 10.0
    spreads = {step: apart(list(vectors.values())) for step, vectors in held.items()}
    assert all(len(held[step]) == 11 for step in range(5, LAST_STEP)), {step: len(held[step]) for step in held}
    assert max(spreads.values()) < STATED
    assert spreads[PARAMETERS_EVERY + 1] < spreads[PARAMETERS_EVERY] / 2, (
        "averaging the parameters brings them together"
    )
    assert 0 < max(told) < 10 * STATED, "and they are told how far apart they are"


@pytest.mark.long
def test_a_run_that_outgrows_one_group_and_shrinks_again_stays_together() -> None:
    """Four peers are one group of four; with eight more they stand in a grid; then the eight say goodbye.

    When the eight come, a peer may find its cell taken as the step begins: then that step is made without it.
    """
    swarm, early = Swarm(seed=1), ["p0", "p1", "p2", "p3"]
    late = [f"p{number}" for number in range(4, 12)]
    keys: dict[int, set[str]] = {}
    longest = {"s": 0.0}

    def train(member: Member) -> None:
        generator = torch.Generator().manual_seed(int(member.name[1:]))
        last = 0
        while member.optimizer.global_step < 30:
            if member.name in late and member.optimizer.global_step >= 18:
                member.optimizer.close()
                return
            words = torch.randint(11, (4,), generator=generator)
            member.peer.sleep(0.5)
            loss_of(member.model, (words, (3 * words + 1) % 11)).backward()  # type: ignore[no-untyped-call]
            before = member.peer.time()
            member.optimizer.step()
            longest["s"] = max(longest["s"], member.peer.time() - before)
            member.optimizer.zero_grad()
            member.check_samples()
            if member.optimizer.global_step > last and member.optimizer.last_round is not None:
                last = member.optimizer.global_step
                keys.setdefault(last, set()).add(member.optimizer.last_round.position.group_key.partition(" ")[0])

    def start(names: list[str]) -> None:
        for name in names:
            swarm.start(
                name, Model, MAKERS["SGD"], train, target_batch_size=96, batch_size_per_step=4,
                averaging=replace(PLAIN, max_group_size=4),
            )  # fmt: skip

    start(early)
    swarm.started.update(late)
    swarm.world.schedule(at(20.0).call(lambda: start(late)))
    swarm.run()
    assert keys[3] == {""}, "one group"
    assert keys[15] == {"4x3"}
    assert longest["s"] < 3.5, "one that is called before it predicts the target computes one batch more, of 0.5 s"
    counts = [swarm.members[name].optimizer.statistics for name in early]
    assert sum(count.states_loaded for count in counts) <= 1
    assert sum(count.samples_dropped for count in counts) <= 0.02 * sum(count.samples_computed for count in counts)
    assert apart([flat(swarm.members[name].model) for name in early]) < 1e-5


@pytest.mark.sweep
def test_a_peer_that_finds_its_group_full_goes_on_to_the_next_round() -> None:
    """Half of a grid leaves. Its groups are drawn at random then, and some have more members than a group may have."""
    swarm, leaving = Swarm(seed=2), [f"p{number}" for number in range(12, 24)]
    waits: dict[str, list[float]] = {}
    longest_group = 0

    def train(member: Member) -> None:
        nonlocal longest_group
        rng = random.Random(member.name)
        in_grid(member, 24)
        while member.optimizer.global_step < 16:
            if member.name in leaving and member.optimizer.global_step == 2:
                member.optimizer.close()
                return
            member.peer.sleep(rng.uniform(0.4, 0.6))
            (sum(parameter.square().sum() for parameter in member.model.parameters())).backward()  # type: ignore[union-attr]
            before = member.peer.time()
            member.optimizer.step()
            waits.setdefault(member.name, []).append(member.peer.time() - before)
            member.optimizer.zero_grad()
            member.check_samples()
            if member.optimizer.last_round is not None:
                longest_group = max(longest_group, len(member.optimizer.last_round.members))

    for number in range(24):
        swarm.start(
            f"p{number}", Model, MAKERS["SGD"], train, target_batch_size=288, batch_size_per_step=4,
            averaging=replace(PLAIN, max_group_size=6),
        )  # fmt: skip
    swarm.run()
    stayed = [swarm.members[f"p{number}"].optimizer.statistics for number in range(12)]
    assert longest_group == 6
    assert max(max(waits[f"p{number}"]) for number in range(12)) < 5.0
    assert sum(counts.states_loaded for counts in stayed) <= 6


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_trainers", "num_clients", "num_auxiliary", "max_group_size"), few_of([(20, 4, 2, 5), (64, 12, 4, 9)])
)
def test_a_large_run_with_firewalled_and_auxiliary_peers_stays_together(
    num_trainers: int, num_clients: int, num_auxiliary: int, max_group_size: int
) -> None:
    """Cells of the grid stay empty, batches take from 0.4 to 1.6 s, and what each peer has in a step differs."""
    swarm, goal = Swarm(seed=68), PARAMETERS_EVERY + 1
    trainers = [f"p{number}" for number in range(num_trainers)]
    helpers = [f"h{number}" for number in range(num_auxiliary)]
    longest = {"s": 0.0}
    told: list[float] = []
    ended: set[str] = set()

    def train(member: Member) -> None:
        rng, generator = random.Random(member.name), torch.Generator().manual_seed(int(member.name[1:]))
        in_grid(member, num_trainers)
        while member.optimizer.global_step < goal:
            words = torch.randint(11, (4,), generator=generator)
            member.peer.sleep(rng.uniform(0.4, 1.6))
            loss_of(member.model, (words, (3 * words + 1) % 11)).backward()  # type: ignore[no-untyped-call]
            before = member.peer.time()
            member.optimizer.step()
            longest["s"] = max(longest["s"], member.peer.time() - before)
            member.optimizer.zero_grad()
            member.check_samples()
            if (distance := member.optimizer.statistics.disagreement) is not None:
                told.append(distance)
        ended.add(member.name)

    def help_out(member: Member) -> None:
        while len(ended) < num_trainers:
            member.optimizer.step()
        assert member.optimizer.statistics.samples_computed == 0

    common: dict[str, Any] = {
        "target_batch_size": 24 * num_trainers,
        "averaging": replace(PLAIN, max_group_size=max_group_size),
    }
    for number, name in enumerate(trainers):
        is_client = number > 0 and number % 5 == 0 and number <= 5 * num_clients
        swarm.start(name, Model, MAKERS["SGD"], train, batch_size_per_step=4, client_mode=is_client, **common)
    for name in helpers:
        swarm.start(name, Model, MAKERS["SGD"], help_out, auxiliary=True, **common)
    swarm.run(900.0)
    counts = {name: swarm.members[name].optimizer.statistics for name in trainers}
    computed = sum(one.samples_computed for one in counts.values())
    assert sum(one.samples_dropped for one in counts.values()) <= 0.01 * computed
    assert sum(one.states_loaded for one in counts.values()) <= num_trainers // 10, (
        "nearly all make each step themselves"
    )
    assert longest["s"] < 15.0
    assert 0 < max(told) < STATED
    assert apart([flat(swarm.members[name].model) for name in trainers]) < STATED


def test_an_empty_cell_of_the_grid_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Three peers in groups of two: in each step each of them has nobody beside it in one of its two rounds."""
    caplog.set_level(logging.INFO, "manyhands")
    swarm = Swarm()

    def train(member: Member) -> None:
        in_grid(member, 3)
        while member.optimizer.global_step < 6:  # one that ended in the middle of a step would not come to it
            member.step(member.model(torch.randn(4, 4)).square().mean(), 0.5)
        member.optimizer.wait_for_others()
        assert member.optimizer.statistics.rounds_committed >= 6

    for number in range(3):
        swarm.start(
            f"peer {number}", lambda: torch.nn.Linear(4, 2), lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
            train, target_batch_size=TARGET, batch_size_per_step=4, averaging=replace(PLAIN, max_group_size=2),
        )  # fmt: skip
    swarm.run()
    told = [record for record in caplog.records if "rounds of this step committed here" in record.message]
    assert len(told) >= 6
    assert {record.levelname for record in told} == {"INFO"}


def test_all_must_have_the_same_size_of_groups() -> None:
    def train(member: Member) -> None:
        member.peer.sleep(5.0)

    swarm = Swarm()
    swarm.start("p0", Model, MAKERS["SGD"], train, target_batch_size=24, averaging=replace(PLAIN, max_group_size=4))
    swarm.start("p1", Model, MAKERS["SGD"], train, target_batch_size=24)
    with pytest.raises(ManifestMismatch, match="max_group_size"):
        swarm.run()
