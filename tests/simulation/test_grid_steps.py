"""Global steps of runs that are too large for one group, in virtual time: several rounds, and one update for all."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from manyhands.optim.optimizer import Optimizer
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


@pytest.mark.parametrize(("num_peers", "max_group_size", "num_rounds"), [(12, 4, 2), (12, 3, 3)])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
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
            averaging=replace(PLAIN, max_group_size=max_group_size),
        )  # fmt: skip
    swarm.run()
    plain = plain_steps(name, NUM_STEPS, 1)
    for member in swarm.members.values():
        assert_equal_parameters(member.model, plain)
        counts = member.optimizer.statistics
        assert (counts.samples_used, counts.samples_dropped) == (counts.samples_computed, 0)
        assert (counts.rounds_committed, counts.states_loaded) == (NUM_STEPS, 0), counts
    assert len({member.optimizer._collaboration.tracker.position() for member in swarm.members.values()}) == 1
    assert all(key.startswith({2: "4x3 ", 3: "3x2x2 "}[num_rounds]) for key in keys), keys
