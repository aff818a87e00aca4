"""What reading and writing cost, and that a majority of the holders is enough whatever became of the rest."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from manyhands.base.deadline import time_limit
from manyhands.base.identity import PeerId
from manyhands.dht import DhtNode, Entry
from manyhands.dht.ids import distance, node_id
from manyhands.dht.messages import FIND, STORE, FindRequest, FindResponse
from manyhands.dht.overlay import Overlay
from manyhands.dht.records import encode_value
from tests.integration.dht_swarm import CONFIG, TTL_S, Swarm, count_calls, drop, values
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


def record_requests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Note the requests of all nodes from now on."""
    requests: list[Any] = []
    ask = Overlay.ask

    async def remember(self: Overlay, peer_id: PeerId, method: Any, request: Any) -> Any:
        requests.append(request)
        return await ask(self, peer_id, method, request)

    monkeypatch.setattr(Overlay, "ask", remember)
    return requests


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
    await swarm.lose(holders[2], "key")
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
    assert heir.num_records == 2
    await node.get("key")
    counts = count_calls(monkeypatch)
    assert (await node.get("key", quickly=quickly))[""].value == 1
    assert counts["dht.find"] <= 3


async def test_a_node_that_has_looked_a_key_up_writes_and_reads_at_its_holders_only(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders, (node, reader, *_) = await nodes_around(swarm, "key")
    assert await node.store("key", 0, TTL_S) == 5
    counts = count_calls(monkeypatch)
    assert await node.store("key", 1, TTL_S) == 5
    assert counts == {"dht.store": 5}
    assert [holder.num_records for holder in holders] == [1] * 5
    counts.clear()
    assert await values(reader, "key") == {"": 1}
    assert counts == {"dht.find": 5}


async def test_a_lookup_for_a_key_asks_little_more_than_its_holders(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders, (node, *_) = await nodes_around(swarm, "key")
    counts = count_calls(monkeypatch)
    assert await node.store("key", 1, TTL_S) == 5
    assert counts == {"dht.find": 5, "dht.store": 5}
    assert [holder.num_records for holder in holders] == [1] * 5


@pytest.mark.parametrize("num_unknown", [1, 5])
async def test_a_writer_that_does_not_know_a_holder_hears_of_it_from_the_others(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, num_unknown: int
) -> None:
    holders, others = await nodes_around(swarm, "key")
    node = others[-1]
    await drop(node, [swarm.endpoint_of(holder) for holder in holders[:num_unknown]])
    assert await node.store("key", 1, TTL_S) >= 5
    assert [holder.num_records for holder in holders] == [1] * 5
    counts = count_calls(monkeypatch)
    assert await node.store("key", 2, TTL_S) == 5
    assert counts == {"dht.store": 5}
    for holder in holders:
        assert (await swarm.held_by(holder, "key"))[""].value == encode_value(2), "it knows them by now"


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
        endpoint.answer_with(method, say_nothing)
    async with time_limit(PATIENCE_S, "storing"):
        assert await node.store("key", 1, TTL_S) == 5
    assert [holder.num_records for holder in by_distance[:6]] == [1, 1, 0, 1, 1, 1]


async def test_a_holder_reads_what_it_holds_without_asking_for_it(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    (holder, *_), (other, *_) = await nodes_around(swarm, "key")
    await holder.store("key", 1, TTL_S)
    await other.store("key", 2, TTL_S)
    assert await values(holder, "key") == {"": 2}
    requests = record_requests(monkeypatch)
    assert await values(holder, "key") == {"": 2}
    assert [request.wants_records for request in requests] == [False, False]


@pytest.mark.parametrize("lost", [(0, 1), (3, 4), (1, 3)])
async def test_a_read_sees_what_a_majority_holds(swarm: Swarm, lost: tuple[int, ...]) -> None:
    """Ten times, since the holders to ask are drawn by chance."""
    holders, (node, *_) = await nodes_around(swarm, "key")
    await node.store("key", "old", TTL_S)
    await node.store("key", "new", TTL_S)
    assert await values(node, "key") == {"": "new"}
    for rank in lost:
        await swarm.lose(holders[rank], "key")
        if rank % 2:
            await swarm.store_at(holders[rank], [open_record("older still", sequence=1)])
    for _ in range(10):
        assert await values(node, "key") == {"": "new"}


async def test_holders_that_died_are_replaced_at_the_next_write(swarm: Swarm) -> None:
    holders, (heir, next_heir, node, *_) = await nodes_around(swarm, "key")
    await node.store("key", "before", TTL_S)
    for holder in holders[1:3]:
        await swarm.kill(holder)
    assert await values(node, "key") == {"": "before"}
    assert await node.store("key", "after", TTL_S) == 5
    assert heir.num_records == next_heir.num_records == 1
    for reader in (holders[0], holders[4], heir, node):
        assert await values(reader, "key") == {"": "after"}


async def test_writer_and_reader_follow_when_newcomers_come_nearer(swarm: Swarm) -> None:
    """They are clients, so only the holders can tell them, which are no longer among the nearest and say so."""
    await nodes_around(swarm, "key")
    writer, reader = [await swarm.add(client_mode=True) for _ in range(2)]
    await writer.store("key", "before", TTL_S)
    assert await values(reader, "key") == {"": "before"}
    num_before = len(swarm.nodes)
    while len(set(swarm.nearest("key")[:5]) & set(swarm.nodes[num_before:])) < 2:
        await swarm.add()
    assert await writer.store("key", "after", TTL_S) >= 5
    assert all(node.num_records == 1 for node in swarm.nearest("key")[:5])
    assert await values(reader, "key") == {"": "after"}


async def test_a_record_that_a_holder_shows_twice_counts_once(swarm: Swarm) -> None:
    """It has half of the records; a read asks a majority first, and then all, and may ask it both times."""
    holders, (node, *_) = await nodes_around(swarm, "key")
    await node.store_many([Entry("key", number, TTL_S, str(number)) for number in range(20)])
    await node.get("key")
    await swarm.lose(holders[2], "key", [str(number) for number in range(0, 20, 2)])
    for _ in range(12):
        assert len(await node.get("key")) == 20
    endpoint = swarm.endpoint_of(holders[2])
    asking = set[PeerId]()

    async def note(remote: PeerId, request: FindRequest, answer: Any = endpoint.handlers[FIND.name]) -> FindResponse:
        asking.add(remote)
        response: FindResponse = answer(remote, request)
        return response

    endpoint.answer_with(FIND, note)
    for _ in range(12):
        assert len(await node.get("key")) == 20
    assert not asking, "a reader asks the holders that have all"


async def test_a_holder_that_hides_records_is_found_out(swarm: Swarm) -> None:
    holders, (node, *_) = await nodes_around(swarm, "key")
    await node.store("key", "true", TTL_S)
    for liar in holders[:2]:
        endpoint = swarm.endpoint_of(liar)

        async def hide(
            remote: PeerId, request: FindRequest, answer: Any = endpoint.handlers[FIND.name]
        ) -> FindResponse:
            truth = answer(remote, request)
            return FindResponse(truth.contacts, [], truth.digest)

        endpoint.answer_with(FIND, hide)
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
    point = node_id(swarm.endpoints[0].peer_id)
    nearest = min(swarm.endpoints[1:], key=lambda endpoint: distance(node_id(endpoint.peer_id), point))
    await drop(swarm.nodes[0], [nearest])
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
