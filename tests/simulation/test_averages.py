"""Averagers without an optimizer, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec
import pytest
import torch

from manyhands.averaging.attendance_record import LAST_ROUND, AttendanceRecord, attendance_key, first_position
from manyhands.averaging.messages import Position
from manyhands.averaging.tensor_list import TensorList
from manyhands.base.address import Address
from manyhands.base.errors import ManyhandsError
from manyhands.peer import Presence
from manyhands.testing import Host, World
from tests.simulation.averages import NUMEL, start_averages
from tests.simulation.worlds import join

NAMES = ["p0", "p1", "p2"]


def world_of(seed: int) -> World:
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    world = World(seed)
    world.network.default_link.latency_s = 0.02
    world.network.default_link.jitter_s = 0.005
    return world


def test_without_faults_all_are_in_every_round() -> None:
    world = world_of(1)
    averages = start_averages(world, NAMES)
    world.run(60.0)
    assert averages.num_rounds >= 30
    assert all(time > 57 and num_members == 3 for time, num_members in averages.times.values()), averages.times


@pytest.mark.parametrize("seed", range(3))
def test_a_peer_that_publishes_made_up_places_does_not_stop_the_others(seed: int) -> None:
    """Every two seconds another round number, up to the last one, and it never comes to a round."""
    world = world_of(seed)
    initial_peers: list[Address] = []
    averages = start_averages(world, NAMES, initial_peers)
    rng = world.rng("lies")

    async def lie(host: Host) -> None:
        await asyncio.sleep(5.0)
        presence = Presence(world.transport(host), rng=rng, wall_clock=host.wall_clock)
        try:
            await presence.endpoint.listen([Address.of(host.ip, 0)])
            await join(presence.dht, initial_peers)
            while True:
                step = rng.choice([rng.randint(0, LAST_ROUND), LAST_ROUND, LAST_ROUND + 1])
                record = msgspec.to_builtins(
                    honest | {"position": Position(step, rng.randbytes(32))}, builtin_types=(bytes,)
                )
                with contextlib.suppress(ManyhandsError):  # refused: nobody believes it
                    await presence.dht.store(attendance_key("simulated"), record, 30.0, subkey=presence.peer_id)
                await asyncio.sleep(2.0)
        finally:
            await presence.stop()

    tensors = TensorList([torch.zeros(NUMEL)]).fingerprint()
    honest = msgspec.structs.asdict(AttendanceRecord(first_position("simulated"), tensors, "", 0, False, []))
    world.start("liar", lie)
    world.run(90.0)
    assert averages.num_rounds >= 20
    assert all(time > 75 and num_members == 3 for time, num_members in averages.times.values()), averages.times
