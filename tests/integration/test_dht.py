"""Nodes of the DHT over the memory transport and over TLS: what one peer stores, the others find."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
import pytest

from manyhands.base.address import Address
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ConfigError, DialReason, JoinFailed, Refused
from manyhands.base.identity import Identity, PeerId
from manyhands.dht import DhtConfig, DhtNode, Reason
from manyhands.dht.ids import distance, node_id
from manyhands.dht.initial_peers import InitialPeers
from manyhands.dht.messages import FIND, STORE, FindRequest, FindResponse, StoreRequest
from manyhands.dht.records import AgedRecord
from manyhands.rpc import Endpoint
from tests.integration.dht_swarm import CONFIG, TTL_S, Swarm, count_calls, drop, values
from tests.network import PATIENCE_S
from tests.unit.dht.examples import open_record


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    async with AsyncExitStack() as stack:
        yield Swarm(stack)


@pytest.mark.parametrize(("kind", "num_nodes"), [("memory", 12), ("tls", 3)])
async def test_every_node_finds_the_record_that_any_node_stores(swarm: Swarm, kind: str, num_nodes: int) -> None:
    nodes = [await swarm.add(kind=kind) for _ in range(num_nodes)]
    for number, node in enumerate(nodes):
        own_id = swarm.endpoint_of(node).peer_id
        assert await node.store("progress", {"step": number}, TTL_S, own_id) == min(5, num_nodes)
    expected = {swarm.endpoint_of(node).peer_id: {"step": number} for number, node in enumerate(nodes)}
    for node in nodes:
        found = await node.get("progress")
        assert {subkey: stored.value for subkey, stored in found.items()} == expected
        assert all(stored.owner == subkey for subkey, stored in found.items())
        assert all(TTL_S - 5 < stored.remaining_s <= TTL_S for stored in found.values())


async def test_everybody_hears_of_everybody_through_the_first_peer(swarm: Swarm) -> None:
    nodes = [await swarm.add() for _ in range(12)]
    for node in nodes:
        await node.refresh()
    assert [node.num_known_peers for node in nodes] == [11] * 12
    ids = {endpoint.peer_id for endpoint in swarm.endpoints}
    assert {contact.peer_id for contact in nodes[3].contacts()} == ids - {swarm.endpoints[3].peer_id}


async def test_a_record_is_at_the_nearest_peers_only(swarm: Swarm) -> None:
    for _ in range(12):
        await swarm.add()
    await swarm.nodes[4].store("key", 1, TTL_S)
    assert [node.num_records for node in swarm.nearest("key")] == [1] * 5 + [0] * 7


async def test_an_expired_record_is_not_read(swarm: Swarm) -> None:
    nodes = [await swarm.add() for _ in range(3)]
    await nodes[0].store("key", "short", 1.5, "short")
    await nodes[0].store("key", "long", TTL_S, "long")
    assert await values(nodes[1], "key") == {"short": "short", "long": "long"}
    await asyncio.sleep(1.6)
    assert await values(nodes[1], "key") == {"long": "long"}


async def test_a_later_value_replaces_and_none_deletes(swarm: Swarm) -> None:
    nodes = [await swarm.add() for _ in range(3)]
    await nodes[0].store("key", "first", TTL_S)
    await nodes[1].store("key", "second", TTL_S)
    assert await values(nodes[2], "key") == {"": "second"}
    await nodes[2].store("key", None, TTL_S)
    assert await values(nodes[0], "key") == {}


async def test_clocks_a_minute_apart_lose_nothing(swarm: Swarm) -> None:
    ahead = await swarm.add(clock_skew_s=30.0)
    behind = await swarm.add(clock_skew_s=-30.0)
    for node, other in ((ahead, behind), (behind, ahead)):
        own_id = swarm.endpoint_of(node).peer_id
        assert await node.store("signed", "mine", TTL_S, own_id) == 2
        assert (await values(other, "signed"))[own_id] == "mine"
        assert await node.store("open", own_id[-4:], TTL_S) == 2, "the last write counts, whoever's clock is ahead"
        assert await values(other, "open") == {"": own_id[-4:]}


async def test_a_peer_replaces_its_records_after_a_restart_with_an_earlier_clock(swarm: Swarm) -> None:
    others = [await swarm.add() for _ in range(2)]
    identity = Identity.generate()
    before = await swarm.add(identity=identity)
    await before.store("key", "before", TTL_S, identity.peer_id)
    await swarm.kill(before)
    after = await swarm.add(identity=identity, clock_skew_s=-50.0)
    assert await after.store("key", "after", TTL_S, identity.peer_id) == 3
    assert await values(others[0], "key") == {identity.peer_id: "after"}


async def test_the_death_of_holders_is_survived(swarm: Swarm) -> None:
    for _ in range(10):
        await swarm.add()
    await swarm.nodes[0].store("key", "value", TTL_S)
    by_distance = swarm.nearest("key")
    for holder in by_distance[:4]:
        await swarm.kill(holder)
    for survivor in by_distance[4:]:
        assert await values(survivor, "key") == {"": "value"}


async def test_lost_holders_are_replaced(swarm: Swarm) -> None:
    for _ in range(10):
        await swarm.add()
    await swarm.nodes[0].store("key", "value", TTL_S)
    *dead, heir, alone = swarm.nearest("key")[:6]
    for holder in dead:
        await swarm.kill(holder)
    assert heir.num_records == 1
    assert alone.num_records == 0
    for _ in range(CONFIG.max_failures):
        await heir.refresh()
    assert alone.num_records == 1


async def test_a_newcomer_near_a_key_is_given_its_records(swarm: Swarm) -> None:
    nodes = [await swarm.add() for _ in range(7)]
    keys = [f"key-{number}" for number in range(40)]
    for key in keys:
        await nodes[0].store(key, key, TTL_S)
    newcomer = await swarm.add()
    for node in nodes:
        await node.refresh()
    should_hold = {key for key in keys if newcomer in swarm.nearest(key)[:5]}
    assert should_hold
    for key in should_hold:
        assert await swarm.held_by(newcomer, key), key


async def test_records_that_were_handed_over_are_not_sent_again(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [await swarm.add() for _ in range(4)]
    await nodes[0].store("key", "value", TTL_S)
    await nodes[0].refresh()
    counts = count_calls(monkeypatch)
    await nodes[0].refresh()
    assert counts["dht.store"] == 0


async def test_a_holder_that_restarted_is_given_its_records_again(swarm: Swarm) -> None:
    node, holder = [await swarm.add() for _ in range(2)]
    await node.store("key", "value", TTL_S)
    await node.refresh()
    await swarm.kill(holder)
    again = await swarm.add(identity=swarm.endpoint_of(holder).identity)
    assert again.num_records == 0
    await node.refresh()
    assert again.num_records == 1


async def test_a_holder_that_missed_a_write_learns_of_it_when_it_hands_over(swarm: Swarm) -> None:
    nodes = [await swarm.add() for _ in range(2)]
    await swarm.store_at(nodes[0], [open_record("old", sequence=1)])
    await swarm.store_at(nodes[1], [open_record("new", sequence=2)])
    await nodes[0].refresh()
    assert await swarm.held_by(nodes[0], "key") == {"": open_record("new", sequence=2)}


async def test_a_peer_is_not_told_of_itself(swarm: Swarm) -> None:
    for _ in range(3):
        await swarm.add()
    asking, asked, other = swarm.endpoints
    answer = await asking.call(asked.peer_id, FIND, FindRequest(b"\0" * 32))
    assert [contact.peer_id for contact in answer.contacts] == [other.peer_id]


async def test_records_that_were_not_asked_for_are_refused(swarm: Swarm) -> None:
    nodes = [await swarm.add() for _ in range(2)]

    async def answer_beside_the_point(remote: PeerId, request: FindRequest) -> FindResponse:
        return FindResponse([], [AgedRecord(open_record("junk", key="another key"), 0.0)])

    swarm.endpoints[1].answer_with(FIND, answer_beside_the_point)
    assert await values(nodes[0], "key") == {}
    assert nodes[0].refusals == {Reason.MALFORMED: 1}


async def test_the_last_peer_still_has_its_own_records(swarm: Swarm) -> None:
    nodes = [await swarm.add() for _ in range(2)]
    await nodes[0].store("key", "value", TTL_S)
    await swarm.kill(nodes[1])
    assert await values(nodes[0], "key") == {"": "value"}
    assert await nodes[0].store("key", "alone", TTL_S) == 1


async def test_forged_records_are_refused_by_holders_and_readers(swarm: Swarm) -> None:
    nodes = [await swarm.add() for _ in range(3)]
    victim = swarm.endpoints[1]
    await nodes[1].store("key", "true", TTL_S, victim.peer_id)
    signed_by_another = open_record("forged", subkey=victim.peer_id, sequence=2**50).signed_by(
        swarm.endpoints[0].identity
    )
    forged = msgspec.structs.replace(signed_by_another, owner=victim.peer_id)
    answer = await swarm.endpoints[0].call(swarm.endpoints[2].peer_id, STORE, StoreRequest([AgedRecord(forged, 0.0)]))
    assert [(outcome.is_stored, outcome.code) for outcome in answer.outcomes] == [(False, "bad_signature")]
    assert nodes[2].refusals[Reason.BAD_SIGNATURE] == 1
    swarm.endpoints[0].answer_with(FIND, lambda remote, request: FindResponse([], [AgedRecord(forged, 0.0)]))
    assert await values(nodes[2], "key") == {victim.peer_id: "true"}
    assert nodes[2].refusals[Reason.BAD_SIGNATURE] == 2


async def test_another_peers_subkey_cannot_be_written(swarm: Swarm) -> None:
    nodes = [await swarm.add() for _ in range(2)]
    with pytest.raises(ConfigError, match="another peer's id"):
        await nodes[0].store("key", "theft", TTL_S, swarm.endpoints[1].peer_id)


async def test_clients_read_and_write_but_hold_nothing(swarm: Swarm) -> None:
    nodes = [await swarm.add() for _ in range(3)]
    clients = [await swarm.add(client_mode=True) for _ in range(2)]
    own_id = swarm.endpoint_of(clients[0]).peer_id
    assert await clients[0].store("key", "from a client", TTL_S, own_id) == 3
    for node in [*nodes, *clients]:
        assert await values(node, "key") == {own_id: "from a client"}
        await node.refresh()
    assert [client.num_records for client in clients] == [0, 0]
    client_ids = {swarm.endpoint_of(client).peer_id for client in clients}
    for node in [*nodes, *clients]:
        assert not client_ids & {contact.peer_id for contact in node.contacts()}


async def test_a_client_serves_nothing(swarm: Swarm) -> None:
    await swarm.add()
    client = swarm.endpoint_of(await swarm.add(client_mode=True))
    with pytest.raises(Refused, match="unknown_method"):
        await swarm.endpoints[0].call(client.peer_id, STORE, StoreRequest([AgedRecord(open_record(), 0.0)]))


async def test_a_peer_that_comes_back_as_a_client_leaves_the_tables(swarm: Swarm) -> None:
    first = await swarm.add()
    node = await swarm.add()
    await swarm.kill(node)
    for _ in range(CONFIG.max_failures):
        await first.refresh()
    client = await swarm.add(client_mode=True, identity=swarm.endpoint_of(node).identity)
    assert client.num_known_peers == 1
    assert first.num_known_peers == 0, "though addresses of it are remembered"


async def test_a_list_of_initial_peers_may_name_the_peer_itself(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    await swarm.add()
    own_address = Address.of("127.0.0.1", 1025)  # the next free port of the memory network
    node = await swarm.add(initial_peers=[own_address, *swarm.endpoints[0].addresses])
    assert swarm.endpoint_of(node).addresses == [own_address.with_peer(swarm.endpoint_of(node).peer_id)]
    assert node.initial_peers() == {swarm.endpoints[0].peer_id}
    dialled: list[Address] = []
    monkeypatch.setattr(Endpoint, "connect", lambda endpoint, address, *_: dialled.append(address))
    await node.refresh()
    assert dialled == [], "it does not look for itself"


@pytest.mark.parametrize("kind", ["memory", "tls"])
async def test_a_failed_join_names_each_address(swarm: Swarm, kind: str) -> None:
    first = await swarm.add(kind=kind)
    (address,) = swarm.endpoint_of(first).addresses
    stranger = Identity.generate().peer_id
    nobody = [Address.of("127.0.0.1", 3), Address.of("127.0.0.1", 4)]  # nothing listens there
    with pytest.raises(JoinFailed) as caught:
        await swarm.add(kind=kind, initial_peers=[*nobody, address.with_peer(stranger)])
    assert [(failure.address, failure.reason) for failure in caught.value.failures] == [
        (str(nobody[0]), DialReason.REFUSED),
        (str(nobody[1]), DialReason.REFUSED),
        (str(address.with_peer(stranger)), DialReason.WRONG_IDENTITY),
    ]


async def test_a_join_that_failed_can_be_tried_again(swarm: Swarm) -> None:
    first = await swarm.add()
    with pytest.raises(JoinFailed):
        await swarm.add(initial_peers=[Address.of("127.0.0.1", 9999)])
    await swarm.nodes[1].join(swarm.endpoints[0].addresses)
    assert first.num_known_peers == swarm.nodes[1].num_known_peers == 1


async def test_one_initial_peer_that_answers_is_enough_and_the_others_are_tried_again(swarm: Swarm) -> None:
    await swarm.add()
    later = Address.of("127.0.0.1", 500)
    node = await swarm.add(initial_peers=[later, *swarm.endpoints[0].addresses])
    assert node.num_known_peers == 1
    latecomer = await swarm.add(initial_peers=[], port=later.port)
    await node.refresh()
    expected = {swarm.endpoints[0].peer_id, swarm.endpoint_of(latecomer).peer_id}
    assert {contact.peer_id for contact in node.contacts()} == expected


async def test_an_initial_peer_that_turns_up_shows_its_part_of_the_swarm(swarm: Swarm) -> None:
    """Both parts are larger than what a lookup asks, and the initial peer is nobody's neighbour."""
    config = dataclasses.replace(CONFIG, k=3, replicas=2)
    for _ in range(11):
        await swarm.add(config=config)
    later = Address.of("127.0.0.1", 500)
    node = await swarm.add(config=config, initial_peers=[later, *swarm.endpoints[0].addresses])
    door = await swarm.add(config=config, initial_peers=[])
    addresses = swarm.endpoint_of(door).addresses
    there = [door, *[await swarm.add(config=config, initial_peers=addresses) for _ in range(11)]]
    await swarm.endpoint_of(door).listen([later])
    await node.refresh()
    point = node_id(swarm.endpoint_of(node).peer_id)
    nearest = min(there, key=lambda other: distance(node_id(swarm.endpoint_of(other).peer_id), point))
    assert nearest is not door
    assert swarm.endpoint_of(nearest).peer_id in {contact.peer_id for contact in node.contacts()}
    assert swarm.endpoint_of(node).peer_id in {contact.peer_id for contact in nearest.contacts()}


async def test_a_peer_that_lost_everybody_comes_back_through_its_initial_peers(swarm: Swarm) -> None:
    first = await swarm.add()
    node = await swarm.add()
    await drop(node, [swarm.endpoint_of(first)])
    assert node.num_known_peers == 0
    await node.refresh()
    assert node.num_known_peers == 1


async def test_upkeep_runs_by_itself(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: asyncio.Queue[None] = asyncio.Queue()

    async def refresh_and_tell(node: DhtNode) -> None:
        await refresh(node)
        rounds.put_nowait(None)

    refresh = DhtNode.refresh
    monkeypatch.setattr(DhtNode, "refresh", refresh_and_tell)
    first = await swarm.add(config=DhtConfig(refresh_period_s=0.05))
    await first.store("key", "value", TTL_S)
    second = await swarm.add()
    async with time_limit(PATIENCE_S, "waiting for the second node to be given the record"):
        while not second.num_records:
            await rounds.get()


async def test_upkeep_that_fails_is_seen(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = asyncio.Event()

    async def fail(node: DhtNode) -> None:
        failed.set()
        raise ZeroDivisionError

    monkeypatch.setattr(DhtNode, "refresh", fail)
    await swarm.add(config=DhtConfig(refresh_period_s=0.001))
    async with time_limit(PATIENCE_S, "waiting for the upkeep"):
        await failed.wait()
    await asyncio.sleep(0)
    assert "Background task 'dht: upkeep' failed" in caplog.text


async def test_a_closed_node_serves_no_more(swarm: Swarm) -> None:
    nodes = [await swarm.add() for _ in range(3)]
    await nodes[0].store("key", "value", TTL_S)
    await nodes[2].close()
    await nodes[2].close()
    assert await values(nodes[1], "key") == {"": "value"}
    assert await nodes[1].store("key", "again", TTL_S) == 2


async def test_a_node_that_knows_nobody_any_more_dials_the_initial_peers_at_once(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for its next attempt in the background, of which there is none here."""

    async def wait_for_ever(initial_peers: InitialPeers) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(InitialPeers, "keep_trying", wait_for_ever)
    first = await swarm.add()
    await first.store("key", "value", TTL_S)
    node = await swarm.add()
    await drop(node, [swarm.endpoint_of(first)])
    assert node.num_known_peers == 0
    async with time_limit(PATIENCE_S, "waiting for the node to find the others again"):
        while not await node.get("key"):
            await asyncio.sleep(0.001)
