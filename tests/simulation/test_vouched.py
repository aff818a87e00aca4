"""Strangers in more networks than a run has trainers say that it is elsewhere; a coordinator vouches for trainers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import pytest
import torch

from manyhands.access.coordinator import Coordinator
from manyhands.base.errors import ManyhandsError
from manyhands.monitor import RunMonitor
from manyhands.optim.run.records import declare_run
from manyhands.peer import Presence
from manyhands.testing import Host, between
from tests.simulation.charted import ChartedRun
from tests.simulation.strangers import HONEST, SPOILT, Stranger
from tests.simulation.test_monitoring import WatchingPeer
from tests.unit.access.world import RUN, charter_of

pytestmark = pytest.mark.usefixtures("one_thread")

STRANGERS = tuple(f"stranger{number}" for number in range(4))
COME_S, JUMP_S, NEWCOMER_S, END_S = 60.0, 90.0, 100.0, 170.0


async def watch(presence: Presence, coordinator: Coordinator) -> None:
    await RunMonitor(WatchingPeer(presence), RUN, lambda event: None).start()


def attacked() -> ChartedRun:
    """An open run with a coordinator that watches it."""
    run = ChartedRun(charter_of("open"), batch_s=2.0)
    run.start_coordinator(watch)

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
    run.start("newcomer", NEWCOMER_S)
    return run


def test_newcomers_and_members_stay_with_the_trainers_that_the_coordinator_has_long_seen() -> None:
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


@pytest.mark.long
@pytest.mark.parametrize("alone", ["a", "c"])
def test_a_split_heals_as_ever_whoever_was_vouched_for_meanwhile(alone: str) -> None:
    """The smaller part has the coordinator, which comes to vouch for that one alone."""
    run, cut_s, heal_s, end_s = ChartedRun(charter_of("open"), batch_s=2.0), 80.0, 320.0, 420.0
    run.start_coordinator(watch)
    for name in HONEST:
        run.start(name)
    others = [name for name in HONEST if name != alone]
    run.world.schedule(between(cut_s, heal_s).partition([alone, "first"], others))
    run.world.loop.call_at(heal_s, lambda: vouched.extend(run.presences[alone].vouched(RUN)))
    vouched: list[str] = []
    run.world.run(end_s)
    assert vouched == [run.presences[alone].peer_id]
    assert run.optimizers[alone].statistics.states_loaded == 1, "the two have made more steps"
    assert [run.optimizers[name].statistics.states_loaded for name in others] == [0, 0]
    steps = [run.optimizers[name].global_step for name in HONEST]
    assert max(steps) - min(steps) <= 1
    held = [list(run.models[name].parameters()) for name in HONEST if run.optimizers[name].global_step == max(steps)]
    assert all(torch.equal(one, other) for model in held for one, other in zip(held[0], model, strict=True))
