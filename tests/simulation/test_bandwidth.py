"""Peers find out how fast their uplinks are, and share the work out by that."""

from __future__ import annotations

import asyncio
import random

import torch

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.rounds import RoundRunner
from manyhands.base.address import Address
from manyhands.rpc import Endpoint, RpcConfig
from manyhands.testing import Host, World
from tests.swarm import FixedRoster

NUMEL = 2_000_000
VECTOR_MBIT = NUMEL * 32 / 1e6


class Measured:
    """What came of the rounds: the seconds of each, and what the members believe of their uplinks in the end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.mbit_s: dict[str, float] = {}


def run_rounds(num_rounds: int, up_mbit_s: dict[str, float], declared: dict[str, float] | None = None) -> Measured:
    world, measured = World(1), Measured()
    ids = {name: world.identity(name).peer_id for name in up_mbit_s}
    endpoints: list[Endpoint] = []

    async def peer(host: Host) -> None:
        endpoint = Endpoint(
            world.transport(host), config=RpcConfig(heartbeat_period_s=0.1), rng=world.rng(f"endpoint of {host.name}")
        )
        roster = FixedRoster({peer_id: False for peer_id in ids.values() if peer_id != endpoint.peer_id})
        config = AveragingConfig(averaging_timeout_s=600.0, bandwidth_mbit_s=(declared or {}).get(host.name))
        averager = RoundRunner(endpoint, "simulated", b"", roster, config, random.Random(1))
        await endpoint.listen([Address.of(host.ip, 0)])
        endpoints.append(endpoint)
        await asyncio.sleep(0.1)  # of virtual time: all listen
        for other in endpoints:
            endpoint.learn(other.peer_id, other.addresses)
            if other.peer_id < endpoint.peer_id:
                await endpoint.connect(other.addresses[0])
        await asyncio.sleep(0.5)  # all know each other, and how far away they are
        vector_N = torch.arange(NUMEL, dtype=torch.float32)
        for _ in range(num_rounds):
            result = await averager.average(vector_N, 1.0)
            assert result.averaged_N is not None
            torch.testing.assert_close(result.averaged_N, vector_N)
            roster.at = result.manifest.position.after(result.manifest)
            if host.name == "p0":
                measured.seconds.append(result.seconds - result.matchmaking_s)
        measured.mbit_s[host.name] = averager._bandwidth.bandwidth / 125_000
        await asyncio.sleep(1.0)  # the others are done, too
        await averager.close()
        await endpoint.close()

    for name, mbit_s in up_mbit_s.items():
        world.start(name, peer)
        world.network.set_bandwidth(name, up_mbit_s=mbit_s, down_mbit_s=1000.0)
    world.run(600.0)
    assert measured.mbit_s.keys() == up_mbit_s.keys()
    return measured


def test_a_slow_uplink_is_measured_and_spared() -> None:
    up_mbit_s = {"p0": 100.0, "p1": 100.0, "p2": 20.0}
    measured = run_rounds(3, up_mbit_s)
    assert 18.0 < measured.mbit_s["p2"] < 40.0
    assert all(measured.mbit_s[name] > 1.3 * measured.mbit_s["p2"] for name in ("p0", "p1"))
    own_values_s = VECTOR_MBIT / 20.0
    assert measured.seconds[0] > 1.25 * own_values_s, "the slow one reduced a third"
    assert measured.seconds[-1] < 1.1 * own_values_s, "it does nothing but send its own values"


def test_a_declared_figure_counts_from_the_first_round() -> None:
    up_mbit_s = {"p0": 100.0, "p1": 20.0, "p2": 100.0}
    measured = run_rounds(1, up_mbit_s, up_mbit_s)
    assert measured.seconds[0] < 1.15 * VECTOR_MBIT / 20.0
