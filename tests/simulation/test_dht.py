"""The DHT under faults, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from manyhands.base.address import Address
from manyhands.base.identity import PeerId
from manyhands.dht import Contact, DhtConfig, DhtNode, Entry
from manyhands.dht.ids import distance, id_from_bytes, key_id, node_id
from manyhands.dht.messages import FIND, STORE, FindRequest, FindResponse, StoreRequest, StoreResponse
from manyhands.dht.records import AgedRecord
from manyhands.rpc import Endpoint
from manyhands.testing import Host, World, at, between
from tests.intercepted import InterceptedEndpoint
from tests.simulation.worlds import KEY, dht_world, join
from tests.sweeps import few_of
from tests.unit.dht.examples import open_record


@pytest.mark.parametrize("seed", few_of(range(5), 2))
def test_two_halves_of_a_swarm_find_each_other_within_a_minute_of_the_end_of_a_partition(seed: int) -> None:
    world, seen = dht_world(seed)
    world.run(110.0)
    assert seen == {f"p{number}": 6 for number in range(6)}


def test_a_frozen_peer_is_missed_while_it_is_frozen_and_seen_again_after() -> None:
    world, seen = dht_world(seed=5)
    meanwhile: dict[str, int] = {}
    world.schedule(between(120, 150).freeze("p4"), at(145).call(lambda: meanwhile.update(seen)))
    world.run(200.0)
    assert {name: number for name, number in meanwhile.items() if name != "p4"} == dict.fromkeys(
        ("p0", "p1", "p2", "p3", "p5"), 5
    )
    assert set(seen.values()) == {6}


@pytest.mark.parametrize("skew_s", [-60.0, 60.0])
def test_clocks_that_differ_by_a_minute_lose_nothing(skew_s: float) -> None:
    world, seen = dht_world(seed=7)
    for name in ("p1", "p3"):
        world.host(name).skew_s = skew_s
    world.run(29.0)  # before the partition, after the restart of p2
    assert set(seen.values()) == {6}


def test_a_get_does_not_wait_for_a_holder_that_vanished() -> None:
    world = World(seed=3)
    world.network.default_link.latency_s = 0.02
    initial_peers: list[Address] = []
    nodes: dict[str, DhtNode] = {}
    took_s: list[float] = []

    async def peer(host: Host) -> None:
        endpoint = Endpoint(world.transport(host), rng=world.rng(f"endpoint of {host.name}"))
        nodes[host.name] = DhtNode(endpoint, DhtConfig(), rng=world.rng(host.name), wall_clock=host.wall_clock)
        await endpoint.listen([Address.of(host.ip, 0)])
        await join(nodes[host.name], initial_peers)
        initial_peers.extend(endpoint.addresses)
        if host.name == "p0":
            await asyncio.sleep(10.0)
            await nodes["p0"].store(KEY, 1, 100.0)
        await asyncio.sleep(20.0 - world.loop.time())
        if host.name == reader:
            started = world.loop.time()
            assert set(await nodes[reader].get(KEY)) == {""}
            took_s.append(world.loop.time() - started)
        await asyncio.sleep(1000.0)

    names = [f"p{number}" for number in range(12)]
    points = {name: node_id(world.identity(name).peer_id) for name in names}
    nearest, *_, reader = sorted(names[1:], key=lambda name: distance(points[name], key_id(KEY)))
    for name in names:
        world.start(name, peer)
    world.schedule(at(19.9).crash(nearest))
    world.run(40.0)
    [seconds] = took_s
    assert DhtConfig().slow_after_s < seconds < 2.0


def test_a_holder_whose_pages_never_end_holds_a_get_up_for_a_bounded_time() -> None:
    world = World(seed=3)
    initial_peers: list[Address] = []
    took_s: list[float] = []

    async def dawdle(remote: PeerId, request: FindRequest) -> FindResponse:
        await asyncio.sleep(2.0)
        number = int(request.after or 0) + 1
        record = open_record(number, key=KEY, subkey=f"{number:05}")
        return FindResponse([], [AgedRecord(record, 0.0)], is_more=True)

    async def peer(host: Host) -> None:
        endpoint = Endpoint(world.transport(host), rng=world.rng(f"endpoint of {host.name}"))
        node = DhtNode(endpoint, DhtConfig(), rng=world.rng(host.name), wall_clock=host.wall_clock)
        try:
            await endpoint.listen([Address.of(host.ip, 0)])
            if host.name == "liar":
                endpoint.unhandle(FIND)
                endpoint.handle(FIND, dawdle)
            await join(node, initial_peers)
            initial_peers.extend(endpoint.addresses)
            await asyncio.sleep(5.0)
            if host.name == "reader":
                started = world.loop.time()
                await node.get(KEY)
                took_s.append(world.loop.time() - started)
            await asyncio.sleep(190.0)
        finally:
            await node.close()
            await endpoint.close()

    world.start("liar", peer)
    world.start("reader", peer)
    world.run(100.0)
    assert took_s, "it still reads"
    assert took_s[0] < 45.0


def test_a_newcomer_that_takes_its_time_does_not_hold_up_upkeep_and_gets_all_in_the_end() -> None:
    world = World(seed=3)
    initial_peers: list[Address] = []
    nodes: dict[str, DhtNode] = {}
    rounds_s: list[float] = []

    async def peer(host: Host) -> None:
        endpoint = InterceptedEndpoint(world.transport(host), rng=world.rng(f"endpoint of {host.name}"))
        node = nodes[host.name] = DhtNode(endpoint, DhtConfig(), world.rng(host.name), host.wall_clock)
        try:
            await endpoint.listen([Address.of(host.ip, 0)])
            if host.name == "newcomer":
                hold = endpoint.handlers[STORE.name]

                async def dawdle(remote: PeerId, request: StoreRequest) -> StoreResponse:
                    await asyncio.sleep(2.0)
                    response: StoreResponse = hold(remote, request)  # type: ignore[assignment]
                    return response

                endpoint.answer_with(STORE, dawdle)
                await asyncio.sleep(4.0)
            await join(node, initial_peers)
            initial_peers.extend(endpoint.addresses)
            if host.name == "p0":
                await node.store_many([Entry(f"key{number}", number, 3600.0) for number in range(500)])
                await asyncio.sleep(5.0)
                for _ in range(4):
                    started = world.loop.time()
                    await node.refresh()
                    rounds_s.append(world.loop.time() - started)
            await asyncio.sleep(300.0)
        finally:
            await node.close()
            await endpoint.close()

    world.start("p0", peer)
    world.start("newcomer", peer)
    world.run(200.0)
    assert len(rounds_s) == 4
    assert max(rounds_s) < 40.0
    assert nodes["newcomer"].num_records == 500


def test_a_peer_that_names_nearer_ones_where_nobody_answers_hides_nothing() -> None:
    """It holds up a lookup, to its time limit; what the others hold is found all the same."""
    world = World(seed=3)
    world.network.default_link.latency_s = 0.02
    names = [f"p{number}" for number in range(10)]
    fakes = [world.identity(f"fake{number}").peer_id for number in range(200)]
    key = next(key for key in map(str, range(1000)) if nearest_of(names, world, key) == "p7")
    initial_peers: list[Address] = []
    done: list[tuple[int, object]] = []

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
            initial_peers.extend(endpoint.addresses)
            await asyncio.sleep(15.0)
            if host.name == "p7":
                endpoint.unhandle(FIND)
                endpoint.handle(FIND, lie)
            await asyncio.sleep(5.0)
            if host.name == "p1":
                num_holders = await node.store(key, "here", 600.0)
                done.append((num_holders, [stored.value for stored in (await node.get(key)).values()]))
            await asyncio.sleep(60.0)
        finally:
            await node.close()
            await endpoint.close()

    async def hole(host: Host) -> None:
        await asyncio.sleep(100.0)

    for name in names:
        world.start(name, peer)
    world.start("hole", hole)
    world.schedule(between(10, 90).partition({"hole"}, set(names)))
    world.run(70.0)
    assert [(num_holders >= 3, found) for num_holders, found in done] == [(True, ["here"])], done


def nearest_of(names: list[str], world: World, key: str) -> str:
    return min(names, key=lambda name: distance(node_id(world.identity(name).peer_id), key_id(key)))


@pytest.mark.parametrize(
    "num_peers", [pytest.param(8, marks=pytest.mark.long), pytest.param(40, marks=pytest.mark.sweep)]
)
def test_a_first_peer_that_takes_no_part_still_knows_where_it_reached_most_others_after_long(num_peers: int) -> None:
    """Newcomers ask it (docs/adr/0056-the-initial-peers-decide-for-newcomers.md). It neither stores nor reads."""
    world, endpoints, known = World(seed=1), list[Endpoint](), list[int]()
    world.network.default_link.latency_s = 0.05

    async def peer(host: Host) -> None:
        endpoint = Endpoint(world.transport(host), rng=world.rng(f"endpoint of {host.name}"))
        node = DhtNode(endpoint, DhtConfig(), rng=world.rng(host.name), wall_clock=host.wall_clock)
        await endpoint.listen([Address.of(host.ip, 0)])
        await join(node, endpoints[0].addresses if endpoints else [])
        endpoints.append(endpoint)
        while endpoint is endpoints[0]:
            await asyncio.sleep(60.0)
            known.append(sum(bool(endpoint.reached_host(other.peer_id)) for other in endpoints[1:]))
        while True:
            await asyncio.sleep(world.rng(f"{host.name} at {world.loop.time()}").uniform(5.0, 15.0))
            await node.store(KEY, 1, 30.0)
            await node.get(KEY)

    for number in range(num_peers + 1):
        world.start(f"p{number}", peer)
    world.run(1500.0)
    print(known)
    assert min(known[1:]) > num_peers / 2
