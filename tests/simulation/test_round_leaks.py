"""Many rounds with faults in one process: no memory, no task and no stream stays behind."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest
import torch

from manyhands.averaging.allreduce.butterfly import Butterfly
from manyhands.averaging.round.exchange import Contribution, Exchange
from manyhands.averaging.round.round_machine import Round
from manyhands.testing import World
from tests.simulation.rounds import NUMEL, start_rounds
from tests.smaller import smaller
from tests.sweeps import few_of

NAMES = ["p0", "p1", "p2", "p3"]
NUM_LOOKS = 12
KINDS = (Round, Butterfly, Contribution, Exchange, torch.Tensor)


def kept(world: World) -> dict[str, int]:
    """What is there now, by kind."""
    gc.collect()
    things = [thing for thing in gc.get_objects() if type(thing) in KINDS]
    return {
        "rounds": sum(not isinstance(thing, torch.Tensor) for thing in things),
        "vectors": sum(isinstance(thing, torch.Tensor) and thing.numel() == NUMEL for thing in things),
        "tasks": len(asyncio.all_tasks(world.loop)),
        "streams": len(world.network.streams),
    }


@pytest.mark.long
@pytest.mark.parametrize("end_s", few_of([30.0, 200.0]))
def test_rounds_with_faults_leave_nothing_behind(end_s: float) -> None:
    """One each second: two hundred in ``make sim``."""
    logging.getLogger("manyhands").setLevel(logging.CRITICAL)
    world = World(5)
    world.network.default_link.latency_s = 0.005
    rng = world.rng("faults")
    commits = start_rounds(world, NAMES)
    seen: list[dict[str, int]] = []
    num_before: list[int] = []

    def disturb() -> None:
        world.network.reset(*rng.sample(NAMES, 2))
        if world.loop.now < end_s:
            world.loop.call_outside(world.loop.now + rng.uniform(0.1, 0.6), disturb)

    def look() -> None:
        seen.append(kept(world))
        seen[-1]["vectors"] -= len(commits.means)  # those the test itself keeps
        num_before.append(commits.num_rounds)

    world.loop.call_outside(1.0, disturb)
    for number in range(NUM_LOOKS):  # each peer may be in a round just then, but not always
        world.loop.call_outside(20.0 + 0.4 * number, look)
        world.loop.call_outside(end_s + 0.4 * number, look)
    with smaller(chunk_numel=4096):
        world.run(end_s + 20.0, stop_within_s=20.0)
    assert num_before[-1] - num_before[0] >= end_s - 20.0, num_before
    for what in seen[0]:
        before, after = (min(look[what] for look in looks) for looks in (seen[:NUM_LOOKS], seen[NUM_LOOKS:]))
        assert after <= before + 8, (what, before, after)
