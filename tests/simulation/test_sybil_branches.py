"""Identities on one machine claim addresses in more networks than a run has trainers, and say that it is elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import cast

import pytest
import torch

from manyhands.access.coordinator import Coordinator
from manyhands.base.errors import ManyhandsError
from manyhands.optim.loading import _load
from manyhands.optim.run.run_records import declare_run
from manyhands.peer import Peer, Presence
from manyhands.testing import Host, between
from manyhands.testing.blocking import SimPeer
from tests.simulation.charted import ChartedRun
from tests.simulation.strangers import AHEAD, HONEST, SPOILT, Stranger
from tests.unit.access.world import RUN, charter_of

pytestmark = pytest.mark.usefixtures("one_thread")

STRANGERS = tuple(f"stranger{number}" for number in range(4))
COME_S, JUMP_S, NEWCOMER_S, END_S = 30.0, 50.0, 60.0, 120.0
JOIN_S = 12.0


async def idle(presence: Presence, coordinator: Coordinator) -> None:
    """It trains nothing."""


def attacked(claims: str, ahead: int = AHEAD) -> ChartedRun:
    """An open run whose machines are in networks of their own.

    Args:
        claims: where the strangers say that they are, with a place for their number.
    """
    run = ChartedRun(charter_of("open"), batch_s=2.0)
    for number, name in enumerate(("first", *HONEST, "newcomer", "machine")):
        run.world.network.move(run.world.host(name).name, f"45.{number}.1.2")

    async def program(host: Host) -> None:
        await asyncio.sleep(COME_S)
        strangers = []
        for number, name in enumerate(STRANGERS):
            presence = await run.presence(host, run.world.identity(name))
            declare_run(presence.dht, RUN)
            strangers.append(Stranger(run, presence, JUMP_S, [claims.format(number)], ahead))
        while True:
            for stranger in strangers:
                with contextlib.suppress(ManyhandsError):
                    await stranger.publish(run.world.loop.time())
            await asyncio.sleep(0.5)

    run.start_coordinator(idle)
    for name in HONEST:
        run.start(name)
    run.world.start("machine", program)
    run.start("newcomer", NEWCOMER_S)
    return run


@pytest.mark.long
@pytest.mark.parametrize("claims", ["/ip4/46.{}.1.2/tcp/31000", "/ip4/192.168.{}.2/tcp/31000"])
def test_identities_of_one_machine_mislead_nobody_whatever_addresses_they_claim(claims: str) -> None:
    check_that_nobody_is_misled(attacked(claims))


@pytest.mark.long
def test_identities_of_one_machine_do_not_mislead_a_peer_that_only_loads_the_state() -> None:
    run, loaded = attacked("/ip4/46.{}.1.2/tcp/31000"), list[tuple[int, torch.Tensor]]()

    async def program(host: Host) -> None:
        await asyncio.sleep(NEWCOMER_S)
        model, presence = torch.nn.Linear(2, 1), await run.presence(host)
        state = await _load(cast(Peer, SimPeer(presence)), RUN, model)
        loaded.append((state.global_step, model.weight.detach()))
        await presence.stop()

    run.world.start("onlooker", program)
    run.world.run(NEWCOMER_S + 10.0)
    ((step, weight),) = loaded
    assert step <= run.optimizers["a"].global_step
    assert weight.abs().max() < SPOILT / 2


@pytest.mark.long
def test_one_machine_does_not_say_what_the_state_of_a_step_is() -> None:
    check_that_nobody_is_misled(attacked("/ip4/46.{}.1.2/tcp/31000", ahead=0))


def check_that_nobody_is_misled(run: ChartedRun) -> None:
    run.world.run(END_S)
    for name in (*HONEST, "newcomer"):
        optimizer = run.optimizers[name]
        assert max(tensor.abs().max().item() for tensor in run.models[name].parameters()) < SPOILT / 2, name
        assert optimizer.statistics.states_loaded == (name == "newcomer"), name
        assert optimizer.statistics.steps_alone == 0, name
        assert optimizer.statistics.samples_dropped == 0, name
    assert run.steps["newcomer"][0][0] < NEWCOMER_S + JOIN_S
    assert max(run.optimizers[name].global_step for name in HONEST) - run.optimizers["newcomer"].global_step <= 1
    times = [now for now, _ in run.steps["a"] if now >= COME_S]
    assert max(later - earlier for earlier, later in itertools.pairwise([*times, END_S])) < 12.0


@pytest.mark.long
def test_a_newcomer_that_reaches_nobody_begins_no_run_of_its_own() -> None:
    """It hears of the others from the first peer, and is cut off from them for a while."""
    run = ChartedRun(charter_of("open"), batch_s=2.0)
    run.start_coordinator(idle)
    for name in HONEST:
        run.start(name)
    run.start("newcomer", NEWCOMER_S)
    run.world.schedule(between(COME_S, NEWCOMER_S + 20.0).partition(["newcomer"], HONEST))
    run.world.run(END_S)
    optimizer = run.optimizers["newcomer"]
    assert run.steps["newcomer"][0][0] > NEWCOMER_S + 20.0
    assert (optimizer.statistics.states_loaded, optimizer.statistics.steps_alone) == (1, 0)
    assert max(run.optimizers[name].global_step for name in HONEST) - optimizer.global_step <= 1
