"""What reading and writing cost, and that a majority of the holders is enough whatever became of the rest."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from manyhands.base.deadline import time_limit
from manyhands.base.identity import PeerId
from manyhands.dht import DhtNode, Entry
from manyhands.dht.ids import distance, node_id
from manyhands.dht.messages import FIND, STORE, FindRequest, FindResponse
from manyhands.dht.overlay import Overlay
from manyhands.rpc import Endpoint
from tests.integration.dht_swarm import CONFIG, TTL_S, Swarm, values
from tests.network import PATIENCE_S
from tests.unit.dht.examples import open_record

NUM_NODES = 12


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    async with AsyncExitStack() as stack:
        yield Swarm(stack)


async def nodes_around(swarm: Swarm, key: str) -> tuple[list[DhtNode], list[DhtNode]]:
    """Twelve nodes that know each other: the holders of a key, and the others."""
    for _ in range(NUM_NODES):
        await swarm.add()
    for node in swarm.nodes:
        await node.refresh()
    by_distance = swarm.nearest(key)
    return by_distance[: CONFIG.replicas], by_distance[CONFIG.replicas :]


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()
    call = Endpoint.call

    async def counted(self: Endpoint, peer_id: PeerId, method: Any, request: Any, timeout_s: float = 5.0) -> Any:
        counts[method.name] += 1
        return await call(self, peer_id, method, request, timeout_s)

    monkeypatch.setattr(Endpoint, "call", counted)
    return counts


def lose_record(nodes: Sequence[DhtNode]) -> None:
    """Have holders forget what they hold, as if they had missed the write."""
    for node in nodes:
        node._storage.__init__(CONFIG)  # type: ignore[misc]


async def test_a_node_that_reads_and_writes_a_key_again_asks_its_holders_only(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (node, *_) = await nodes_around(swarm, "key")
    await node.store("key", 1, TTL_S)
    assert await values(node, "key") == {"": 1}, "this read finds that all holders have the record"
    counts = count_calls(monkeypatch)
    await node.store("key", 2, TTL_S)
    assert counts == {"dht.store": 5}
    counts.clear()
    assert await values(node, "key") == {"": 2}
    assert counts == {"dht.find": 3}


async def test_a_quick_read_asks_one_holder_and_another_the_next_time(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders, (node, *_) = await nodes_around(swarm, "key")
    await node.store("key", 1, TTL_S)
    assert await values(node, "key") == {"": 1}
    lose_record([holders[2]])
    counts = count_calls(monkeypatch)
    found = [await node.get("key", quickly=True) for _ in range(40)]
    assert counts == {"dht.find": 40}
    assert 0 < sum(not values for values in found) < 30, "sometimes it meets the holder that missed the write"
    await node.store("key", 1, TTL_S)
    assert (await holders[0].get("key", quickly=True))[""].value == 1, "it has yet to find out that it is a holder"
    counts.clear()
    assert (await holders[0].get("key", quickly=True))[""].value == 1
    assert counts == {}


@pytest.mark.parametrize("quickly", [False, True])
async def test_readers_do_not_rely_on_a_new_holder_before_it_has_the_records(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, quickly: bool
) -> None:
    holders, (heir, node, *_) = await nodes_around(swarm, "key")
    await node.store("key", 1, TTL_S)
    await node.get("key")
    for holder in holders[:4]:
        await swarm.kill(holder)
    for number in range(10):
        assert (await node.get("key", quickly=quickly))[""].value == 1
        await node.store("key", number, TTL_S, "another")
    for _ in range(CONFIG.max_failures):
        await holders[4].refresh()
    assert len(heir._storage) == 2
    await node.get("key")
    counts = count_calls(monkeypatch)
    assert (await node.get("key", quickly=quickly))[""].value == 1
    assert counts["dht.find"] <= 3


async def test_a_node_that_knows_all_peers_writes_without_a_lookup_and_reads_from_the_holders_only(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders, (node, reader, *_) = await nodes_around(swarm, "key")
    counts = count_calls(monkeypatch)
    assert await node.store("key", 1, TTL_S) == 5
    assert counts == {"dht.store": 5}
    assert [len(holder._storage) for holder in holders] == [1] * 5
    counts.clear()
    assert await values(reader, "key") == {"": 1}
    assert counts == {"dht.find": 5}


async def test_a_lookup_for_a_key_asks_little_more_than_its_holders(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders, (node, *_) = await nodes_around(swarm, "key")
    monkeypatch.setattr(node._overlay.table, "may_hold_all", lambda: False)  # as in a large swarm
    counts = count_calls(monkeypatch)
    assert await node.store("key", 1, TTL_S) == 5
    assert counts == {"dht.find": 5, "dht.store": 5}
    assert [len(holder._storage) for holder in holders] == [1] * 5


@pytest.mark.parametrize("num_unknown", [1, 5])
async def test_a_writer_that_does_not_know_a_holder_hears_of_it_from_the_others(swarm: Swarm, num_unknown: int) -> None:
    holders, others = await nodes_around(swarm, "key")
    node, others = others[-1], others[:-1]
    for holder in holders[:num_unknown]:
        for _ in range(CONFIG.max_failures):
            node._overlay.table.failed(swarm.endpoint_of(holder).peer_id)
    assert await node.store("key", 1, TTL_S) >= 5
    assert [len(holder._storage) for holder in holders] == [1] * 5
    assert node._reader._holder_cache.recall("key", 0.0) == tuple(
        swarm.endpoint_of(holder).peer_id for holder in holders
    )


async def test_a_writer_does_not_wait_for_a_presumed_holder_that_says_nothing(swarm: Swarm) -> None:
    config = dataclasses.replace(CONFIG, request_timeout_s=20.0, slow_after_s=0.1)
    for _ in range(NUM_NODES):
        await swarm.add(config=config)
    *_, node = by_distance = swarm.nearest("key")
    silent = by_distance[2]
    endpoint = swarm.endpoint_of(silent)

    async def say_nothing(remote: PeerId, request: Any) -> Any:
        await asyncio.Event().wait()

    for method in (FIND, STORE):
        endpoint.unhandle(method)
        endpoint.handle(method, say_nothing)
    async with time_limit(PATIENCE_S, "storing"):
        assert await node.store("key", 1, TTL_S) == 5
    assert [len(holder._storage) for holder in by_distance[:6]] == [1, 1, 0, 1, 1, 1]


async def test_a_holder_reads_what_it_holds_without_asking_for_it(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    (holder, *_), (other, *_) = await nodes_around(swarm, "key")
    await holder.store("key", 1, TTL_S)
    await other.store("key", 2, TTL_S)
    assert await values(holder, "key") == {"": 2}
    asked: list[FindRequest] = []
    ask = Overlay.ask

    async def remember(self: Overlay, peer_id: PeerId, method: Any, request: Any) -> Any:
        asked.append(request)
        return await ask(self, peer_id, method, request)

    monkeypatch.setattr(Overlay, "ask", remember)
    assert await values(holder, "key") == {"": 2}
    assert [request.wants_records for request in asked] == [False, False]


@pytest.mark.parametrize("lost", [(0, 1), (3, 4), (1, 3)])
async def test_a_read_sees_what_a_majority_holds(swarm: Swarm, lost: tuple[int, ...]) -> None:
    """Ten times, since the holders to ask are drawn by chance."""
    holders, (node, *_) = await nodes_around(swarm, "key")
    await node.store("key", "old", TTL_S)
    await node.store("key", "new", TTL_S)
    assert await values(node, "key") == {"": "new"}
    now = asyncio.get_running_loop().time()
    for rank in lost:
        lose_record([holders[rank]])
        if rank % 2:
            holders[rank]._storage.put(open_record("older still", sequence=1), now + TTL_S, now)
    for _ in range(10):
        assert await values(node, "key") == {"": "new"}


async def test_holders_that_died_are_replaced_at_the_next_write(swarm: Swarm) -> None:
    holders, (heir, next_heir, node, *_) = await nodes_around(swarm, "key")
    await node.store("key", "before", TTL_S)
    for holder in holders[1:3]:
        await swarm.kill(holder)
    assert await values(node, "key") == {"": "before"}
    assert await node.store("key", "after", TTL_S) == 5
    assert len(heir._storage) == len(next_heir._storage) == 1
    for reader in (holders[0], holders[4], heir, node):
        assert await values(reader, "key") == {"": "after"}


async def test_writer_and_reader_follow_when_newcomers_come_nearer(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hear of them from the holders, which are no longer among the nearest and say so."""
    _, (writer, reader, *_) = await nodes_around(swarm, "key")
    await writer.store("key", "before", TTL_S)
    assert await values(reader, "key") == {"": "before"}
    for node in (writer, reader):  # so that only the holders can tell them
        node._overlay.seen = lambda peer_id: None  # type: ignore[method-assign]
    num_before = len(swarm.nodes)
    while len(set(swarm.nearest("key")[:5]) & set(swarm.nodes[num_before:])) < 2:
        await swarm.add()
    assert await writer.store("key", "after", TTL_S) >= 5
    assert all(len(node._storage) == 1 for node in swarm.nearest("key")[:5])
    assert await values(reader, "key") == {"": "after"}


async def test_a_record_that_a_holder_shows_twice_counts_once(swarm: Swarm) -> None:
    """It has half of the records; a read asks a majority first, and then all, and may ask it both times."""
    holders, (node, *_) = await nodes_around(swarm, "key")
    await node.store_many([Entry("key", number, TTL_S, str(number)) for number in range(20)])
    await node.get("key")
    storage, now = holders[2]._storage, asyncio.get_running_loop().time()
    for held in storage.get("key", now)[::2]:
        storage._drop("key", held.record.subkey, held)
    for _ in range(12):
        assert len(await node.get("key")) == 20
    assert node._reader._holder_cache.recall_complete("key", now) == ()


async def test_a_holder_that_hides_records_is_found_out(swarm: Swarm) -> None:
    holders, (node, *_) = await nodes_around(swarm, "key")
    await node.store("key", "true", TTL_S)
    for liar in holders[:2]:
        endpoint, answer = swarm.endpoint_of(liar), liar._handlers._on_find

        async def hide(remote: PeerId, request: FindRequest, answer: Any = answer) -> FindResponse:
            truth = answer(remote, request)
            return FindResponse(truth.contacts, [], truth.digest)

        endpoint.unhandle(FIND)
        endpoint.handle(FIND, hide)
    for _ in range(10):
        assert await values(node, "key") == {"": "true"}


async def test_upkeep_of_a_swarm_in_which_nobody_comes_or_goes_costs_next_to_nothing(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    await nodes_around(swarm, "key")
    counts = count_calls(monkeypatch)
    for _ in range(16):
        await swarm.nodes[0].refresh()
    num_first = counts.total()
    assert counts["dht.ping"] == 0, "the heartbeats show that the others are there"
    assert num_first < 5 * 2 * NUM_NODES
    newcomer = await swarm.add()
    counts.clear()
    await swarm.nodes[0].refresh()
    assert counts["dht.find"] == 1, "somebody came: it is asked whom else it knows"
    assert newcomer.num_known_peers == NUM_NODES
    table, own_id = swarm.nodes[0]._overlay.table, swarm.endpoints[0].peer_id
    nearest = table.nearest(node_id(own_id), 1)[0].peer_id
    for _ in range(CONFIG.max_failures):
        table.failed(nearest)
    counts.clear()
    await swarm.nodes[0].refresh()
    assert counts["dht.find"] >= 2 * CONFIG.replicas, "somebody went: it looks around again"


async def test_a_neighbour_from_another_part_of_the_swarm_is_noticed(swarm: Swarm) -> None:
    """Two islands meet in one peer; the others hear of it by and by, whoever tells them."""
    await nodes_around(swarm, "key")
    node = swarm.nodes[1]
    for _ in range(5):
        await node.refresh()  # from now on it is quiet
    first = await swarm.add(initial_peers=[])
    for _ in range(4):
        await swarm.add(initial_peers=swarm.endpoint_of(first).addresses)
    assert node.num_known_peers == NUM_NODES - 1
    await first.join(swarm.endpoints[1].addresses)
    await node.refresh()
    own_id = swarm.endpoints[1].peer_id
    others = [endpoint.peer_id for endpoint in swarm.endpoints if endpoint.peer_id != own_id]
    nearest = sorted(others, key=lambda peer_id: distance(node_id(peer_id), node_id(own_id)))[: 2 * CONFIG.replicas]
    assert set(nearest) <= {contact.peer_id for contact in node.contacts()}
