"""Whole runs in virtual time: the real DHT, matchmaking, averaging and optimizer, with faults."""

from __future__ import annotations

import logging
import random
from collections import Counter
from typing import Any

import pytest

from manyhands.rpc import Endpoint
from manyhands.testing import Fault, World, at, between
from tests.simulation.worlds import Trainer, training_world
from tests.sweeps import few_of

PEERS = ("p0", "p1", "p2", "p3")
QUIET_FROM_S, END_S = 260.0, 400.0


def chance(seed: int) -> list[Fault]:
    """A handful of faults, all over before the last 140 s."""
    rng = random.Random(f"faults {seed}")
    faults: list[Fault] = []
    for name in rng.sample(PEERS[1:], 2):  # p0 welcomes those who restart
        start = rng.uniform(20, 200)
        if rng.random() < 0.5:
            faults += [at(start).kill(name), at(start + rng.uniform(1, 50)).restart(name)]
        else:
            faults.append(between(start, start + rng.uniform(5, 50)).freeze(name))
    split = rng.sample(PEERS, 2)
    start = rng.uniform(20, 200)
    faults.append(between(start, start + rng.uniform(2, 50)).partition(split, set(PEERS) - set(split)))
    faults.append(at(rng.uniform(20, 250)).reset(*rng.sample(PEERS, 2)))
    return faults


def assert_nobody_disagrees(trainers: dict[str, Trainer]) -> None:
    by_step: dict[int, set[str]] = {}
    for trainer in trainers.values():
        by_step.setdefault(trainer.optimizer.global_step, set()).add(str(trainer.parameter.tolist()))
    assert all(len(values) == 1 for values in by_step.values()), by_step
    assert max(by_step) - min(by_step) <= 1, by_step
    assert all(trainer.optimizer.statistics.parameters_reloaded == 0 for trainer in trainers.values())


def assert_no_sample_is_lost(trainers: dict[str, Trainer]) -> None:
    for name, trainer in trainers.items():
        done = trainer.optimizer.statistics
        accounted = done.samples_used + done.samples_dropped + trainer.optimizer.samples_accumulated
        assert accounted == done.samples_computed, (name, done)


def run(world: World, until_s: float) -> None:
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    world.run(until_s)


@pytest.mark.long
def test_without_faults_every_sample_is_used() -> None:
    world, trainers = training_world(seed=1, num_peers=4)
    run(world, END_S)
    assert_nobody_disagrees(trainers)
    assert_no_sample_is_lost(trainers)
    for trainer in trainers.values():
        done = trainer.optimizer.statistics
        assert trainer.optimizer.global_step >= 5
        assert done.samples_dropped == done.rounds_aborted == done.steps_alone == 0
        assert abs(trainer.parameter[0].item() - 1.5 * (1 - 0.9**trainer.optimizer.global_step)) < 0.15


@pytest.mark.parametrize("seed", few_of(range(6)))
def test_after_any_faults_all_peers_agree_and_go_on(seed: int) -> None:
    world, trainers = training_world(seed, num_peers=4)
    steps_then: list[int] = []
    world.schedule(
        *chance(seed),
        at(QUIET_FROM_S).call(lambda: steps_then.append(max(t.optimizer.global_step for t in trainers.values()))),
    )
    run(world, END_S)
    assert set(trainers) == set(PEERS)
    assert_no_sample_is_lost(trainers)
    assert_nobody_disagrees(trainers)
    assert trainers["p0"].optimizer.global_step > steps_then[0], "the run goes on"


@pytest.mark.long
@pytest.mark.parametrize("seed", few_of(range(3)))
def test_a_step_is_made_when_the_target_is_reached_and_not_much_later(seed: int) -> None:
    """Though peers publish and read seldom: a batch takes 5 s, a step about 40 s."""
    num_peers, batch_size, target = 8, 4, 256
    world, trainers = training_world(seed, num_peers, batch_size=batch_size, target_batch_size=target)
    sizes: dict[bytes, float] = {}

    def note() -> None:
        manifest = trainers["p0"].optimizer.last_round
        if manifest is not None and len(manifest.members) == num_peers:
            sizes[manifest.group_id] = sum(manifest.weights)

    world.schedule(*(at(float(second)).call(note) for second in range(60, int(END_S), 5)))
    run(world, END_S)
    assert len(sizes) >= 6
    for samples in sizes.values():
        assert target <= samples, "not before the peers have said that they have so many"
        assert samples <= target + 1.5 * num_peers * batch_size, "each finishes the batch that it has begun, at most"
    for trainer in trainers.values():
        assert trainer.optimizer.statistics.rounds_aborted == 0


@pytest.mark.long
def test_peers_say_little_while_the_target_is_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight peers, a batch each 5 s and a step about each minute: fewer than two calls for each peer and second."""
    num_peers, from_s, until_s = 8, 120, 300
    world, trainers = training_world(1, num_peers, target_batch_size=num_peers * 48)
    counts: Counter[str] = Counter()
    steps: list[int] = []
    call = Endpoint.call

    async def counted(self: Endpoint, peer_id: Any, method: Any, *args: Any) -> Any:
        counts[method.name] += 1
        return await call(self, peer_id, method, *args)

    def begin() -> None:
        counts.clear()
        steps.append(trainers["p0"].optimizer.global_step)

    monkeypatch.setattr(Endpoint, "call", counted)
    world.schedule(at(from_s).call(begin))
    run(world, until_s)
    assert trainers["p0"].optimizer.global_step - steps[0] >= 2
    assert counts.total() < 2 * num_peers * (until_s - from_s), counts
