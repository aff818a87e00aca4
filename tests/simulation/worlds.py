"""Worlds that several tests use."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import torch

from manyhands.base.address import Address
from manyhands.base.errors import JoinFailed
from manyhands.dht import DhtConfig, DhtNode
from manyhands.optim.optimizer import Optimizer
from manyhands.peer import Presence
from manyhands.rpc import Endpoint
from manyhands.testing import Host, World, at, between
from manyhands.testing.blocking import SimPeer, run_blocking

KEY = "who is there"
RECORD_TTL_S = 20.0
PERIOD_S = 5.0
RETRY_S = 5.0


def dht_world(seed: int, num_peers: int = 6) -> tuple[World, dict[str, int]]:
    """Peers of one DHT over a jittery network; each publishes itself and counts whom it sees, every 5 s.

    Returns the world, and how many peers each host saw last. Some faults are scheduled already: a kill, a restart, and
    a partition of 20 s that cuts the first peer and its neighbour off from the rest.
    """
    world = World(seed)
    world.network.default_link.latency_s = 0.02
    world.network.default_link.jitter_s = 0.01
    initial_peers: list[Address] = []
    seen: dict[str, int] = {}

    async def peer(host: Host) -> None:
        endpoint = Endpoint(world.transport(host))
        await endpoint.listen([Address.of(host.ip, 0)])
        node = DhtNode(endpoint, DhtConfig(), rng=world.rng(f"dht of {host.name}"), wall_clock=host.wall_clock)
        if not initial_peers:
            initial_peers.extend(endpoint.addresses)
            await node.join([])
        else:
            await node.join(initial_peers)
        while True:
            await node.store(KEY, host.name, RECORD_TTL_S, subkey=endpoint.peer_id)
            seen[host.name] = len(await node.get(KEY))
            await asyncio.sleep(PERIOD_S)

    names = [f"p{number}" for number in range(num_peers)]
    for name in names:
        world.start(name, peer)
    world.schedule(
        at(12.5).kill("p2"),
        at(25).restart("p2"),
        between(30, 50).partition(set(names[:2]), set(names[2:])),
    )
    return world, seen


@dataclass
class Trainer:
    """What a simulated trainer shows of itself."""

    optimizer: Optimizer
    parameter: torch.nn.Parameter


def training_world(
    seed: int, num_peers: int, *, batch_s: float = 5.0, batch_size: int = 4, target_batch_size: int = 192
) -> tuple[World, dict[str, Trainer]]:
    """Trainers of one run, with the real DHT, matchmaking, averaging and optimizer, and a vector of 8 parameters.

    Each has a loss of its own, a pull towards its number; the mean over all is what the run should find. Nothing is
    scheduled yet.
    """
    world = World(seed)
    world.network.default_link.latency_s = 0.02
    world.network.default_link.jitter_s = 0.005
    initial_peers: list[Address] = []
    trainers: dict[str, Trainer] = {}

    async def peer(host: Host) -> None:
        rng = world.rng(f"peer {host.name}")
        presence = Presence(world.transport(host), rng=rng, wall_clock=host.wall_clock)
        await presence.endpoint.listen([Address.of(host.ip, 0)])
        while True:
            try:
                await presence.dht.join(initial_peers)
                break
            except JoinFailed:  # a user whose peer starts in a partition starts it again
                await asyncio.sleep(RETRY_S)
        initial_peers.extend(presence.endpoint.addresses[: 3 - len(initial_peers)])
        await run_blocking(lambda: train(SimPeer(presence), host.name, rng))

    def train(sim_peer: SimPeer, name: str, rng: random.Random) -> None:
        parameter = torch.nn.Parameter(torch.zeros(8))
        optimizer = Optimizer(
            torch.optim.SGD([parameter], lr=0.1),
            peer=sim_peer,
            run_id="simulated",
            target_batch_size=target_batch_size,
            batch_size_per_step=batch_size,
        )
        trainers[name] = Trainer(optimizer, parameter)
        goal = float(name.removeprefix("p"))
        while True:
            sim_peer.sleep(batch_s * rng.uniform(0.8, 1.2))
            parameter.grad = (parameter - goal).detach()
            optimizer.step()

    for number in range(num_peers):
        world.start(f"p{number}", peer)
    return world, trainers
