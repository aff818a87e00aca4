"""Worlds that several tests use."""

from __future__ import annotations

import asyncio

from manyhands.base.address import Address
from manyhands.dht import DhtConfig, DhtNode
from manyhands.rpc import Endpoint
from manyhands.testing import Host, World, at, between

KEY = "who is there"
RECORD_TTL_S = 20.0
PERIOD_S = 5.0


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
