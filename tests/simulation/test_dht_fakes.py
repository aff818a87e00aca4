"""Peers that name others where nobody answers."""

from __future__ import annotations

import asyncio

import pytest

from manyhands.base.address import Address
from manyhands.base.identity import PeerId
from manyhands.dht import Contact, DhtConfig, DhtNode
from manyhands.dht.ids import distance, id_from_bytes, key_id, node_id
from manyhands.dht.messages import FIND, FindRequest, FindResponse
from manyhands.rpc import Endpoint
from manyhands.testing import Host, World, between
from tests.simulation.worlds import join
from tests.sweeps import few_of

KEY = "key"
NUM_FAKES = 200


@pytest.mark.parametrize(("num_peers", "num_liars"), few_of([(10, 3), (10, 1), (40, 1), (40, 4)]))
def test_peers_that_name_the_same_fakes_slow_a_lookup_by_little(num_peers: int, num_liars: int) -> None:
    """The peers nearest to a key name others that are nearer still, at a machine that drops all packets."""
    world = World(seed=3)
    world.network.default_link.latency_s = 0.02
    names = [f"p{number}" for number in range(num_peers)]
    fakes = [world.identity(f"fake{number}").peer_id for number in range(NUM_FAKES)]
    by_distance = sorted(names, key=lambda name: distance(node_id(world.identity(name).peer_id), key_id(KEY)))
    liars, readers = by_distance[:num_liars], by_distance[:-6:-1]
    initial_peers: list[Address] = []
    took_s: list[float] = []

    def lie(remote: PeerId, request: FindRequest) -> FindResponse:
        target = id_from_bytes(request.target)
        nearest = sorted(fakes, key=lambda peer_id: distance(node_id(peer_id), target))[:20]
        return FindResponse([Contact(peer_id, [str(Address.of(world.host("hole").ip, 31337))]) for peer_id in nearest])

    async def peer(host: Host) -> None:
        endpoint = Endpoint(world.transport(host), rng=world.rng(f"endpoint of {host.name}"))
        node = DhtNode(endpoint, DhtConfig(), rng=world.rng(host.name), wall_clock=host.wall_clock)
        try:
            await endpoint.listen([Address.of(host.ip, 0)])
            await join(node, initial_peers)
            initial_peers.extend(endpoint.addresses[: 3 - len(initial_peers)])
            await asyncio.sleep(15.0)
            if host.name in liars:
                endpoint.unhandle(FIND)
                endpoint.handle(FIND, lie)
            await asyncio.sleep(5.0)
            if host.name == readers[0]:
                began = world.loop.time()
                await node.store(KEY, "here", 600.0)
                took_s.append(world.loop.time() - began)
            if host.name in readers:  # each looks up the holders
                await asyncio.sleep(10.0 + 5.0 * readers.index(host.name))
                began = world.loop.time()
                assert (await node.get(KEY))[""].value == "here"
                took_s.append(world.loop.time() - began)
            await asyncio.sleep(100.0)
        finally:
            await node.close()
            await endpoint.close()

    for name in names:
        world.start(name, peer)
    world.start("hole", lambda host: asyncio.sleep(1000.0))
    world.schedule(between(10, 1000).partition({"hole"}, set(names)))
    world.run(110.0)
    assert len(took_s) == 6
    assert max(took_s) < 2 * DhtConfig().slow_after_s, took_s
