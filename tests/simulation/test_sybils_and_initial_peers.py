"""Strangers in more networks than a run has trainers say that it is elsewhere; a newcomer was given one trainer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import pytest

from manyhands.access.coordinator import Coordinator
from manyhands.base.errors import ManyhandsError
from manyhands.optim.run.run_records import declare_run
from manyhands.peer import Presence
from manyhands.testing import Host
from tests.simulation.charted import ChartedRun
from tests.simulation.strangers import HONEST, SPOILT, Stranger
from tests.unit.access.world import RUN, charter_of

pytestmark = pytest.mark.usefixtures("one_thread")

STRANGERS = tuple(f"stranger{number}" for number in range(4))
COME_S, JUMP_S, NEWCOMER_S, END_S = 60.0, 90.0, 100.0, 170.0


async def idle(presence: Presence, coordinator: Coordinator) -> None:
    """It trains nothing."""


def attacked() -> ChartedRun:
    """An open run."""
    run = ChartedRun(charter_of("open"), batch_s=2.0)
    run.start_coordinator(idle)

    async def program(host: Host) -> None:
        await asyncio.sleep(COME_S)
        presence = await run.presence(host)
        declare_run(presence.dht, RUN)
        stranger = Stranger(run, presence, JUMP_S)
        while True:
            with contextlib.suppress(ManyhandsError):
                await stranger.publish(run.world.loop.time())
            await asyncio.sleep(1.0)

    for name in HONEST:
        run.start(name)
    for name in STRANGERS:
        run.world.start(name, program)
    run.start("newcomer", NEWCOMER_S, by="a")
    return run


@pytest.mark.long
def test_newcomers_follow_the_trainer_that_they_were_given_and_members_each_other() -> None:
    run = attacked()
    run.world.run(END_S)
    for name in (*HONEST, "newcomer"):
        optimizer = run.optimizers[name]
        assert max(tensor.abs().max().item() for tensor in run.models[name].parameters()) < SPOILT / 2, name
        assert optimizer.statistics.rounds_committed >= 12, name
        assert optimizer.statistics.states_loaded == (name == "newcomer"), name
        assert optimizer.statistics.steps_alone == 0, name
    assert max(run.optimizers[name].global_step for name in HONEST) - run.optimizers["newcomer"].global_step <= 1
    times = [now for now, _ in run.steps["a"] if now >= COME_S]
    assert max(later - earlier for earlier, later in itertools.pairwise([*times, END_S])) < 12.0
