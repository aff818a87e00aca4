"""Strangers in more networks than a run has trainers say that it is elsewhere; a coordinator vouches for trainers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import msgspec
import pytest
import torch

from manyhands.access.coordinator import Coordinator
from manyhands.averaging.messages import Position
from manyhands.averaging.state.content import State, StateHeader, state_of
from manyhands.averaging.state.server import StateServer
from manyhands.base.errors import ManyhandsError
from manyhands.monitor import RunMonitor
from manyhands.optim.run.progress import ProgressRecord
from manyhands.optim.run.progress_reader import ProgressReader, progress_key
from manyhands.optim.run.records import declare_run
from manyhands.peer import Presence
from manyhands.testing import Host, between
from tests.simulation.charted import ChartedRun
from tests.simulation.test_monitoring import WatchingPeer
from tests.unit.access.world import RUN, charter_of

pytestmark = pytest.mark.usefixtures("one_thread")

HONEST = ("a", "b", "c")
STRANGERS = tuple(f"stranger{number}" for number in range(4))
COME_S, JUMP_S, NEWCOMER_S, END_S = 60.0, 90.0, 100.0, 170.0
AHEAD = 50
SPOILT = 1000.0
"""A parameter of the strangers' model."""


async def watch(presence: Presence, coordinator: Coordinator) -> None:
    await RunMonitor(WatchingPeer(presence), RUN, lambda event: None).start()


class Stranger:
    """Says at first that it is where the others are; later, that it is ahead, and hands out a state of its own."""

    def __init__(self, run: ChartedRun, presence: Presence) -> None:
        self._run = run
        self._presence = presence
        self._reader = ProgressReader(presence.endpoint, presence.dht, RUN)
        self._honest = [run.presences[name].peer_id for name in HONEST]
        self._claimed = Position(0, b"")
        StateServer(presence.endpoint, RUN, self._state, lambda: self._claimed)

    def _state(self) -> State:
        honest = self._run.optimizers["a"]._replica.capture()
        header, tensors = honest.header, [tensor.clone() for tensor in honest.tensors]
        tensors[0].fill_(SPOILT)
        samples = 32 * self._claimed.step
        return state_of(StateHeader(self._claimed, samples, header.tensors, header.scalars, b""), tensors)

    async def publish(self, now: float) -> None:
        await self._reader.refresh()
        records = [record for peer_id, record in self._reader.records().items() if peer_id in self._honest]
        position = max((record.position for record in records), key=lambda position: position.step)
        if now >= JUMP_S:
            position = Position(position.step + AHEAD, b"elsewhere")
        self._claimed = position
        addresses = [str(address) for address in self._presence.endpoint.addresses]
        record = ProgressRecord(position, 0, 1.0, 32 * position.step, False, addresses, 30.0)
        value = msgspec.to_builtins(record, builtin_types=(bytes,))
        await self._presence.dht.store(progress_key(RUN), value, 30.0, subkey=self._presence.peer_id)


def attacked() -> ChartedRun:
    """An open run with a coordinator that watches it."""
    run = ChartedRun(charter_of("open"), batch_s=2.0)
    run.start_coordinator(watch)

    async def program(host: Host) -> None:
        await asyncio.sleep(COME_S)
        presence = await run.presence(host)
        declare_run(presence.dht, RUN)
        stranger = Stranger(run, presence)
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
