"""Keys with thousands of records, schemas, and what becomes of those who want too much."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from manyhands.base.errors import ConfigError, Refused
from manyhands.base.identity import Identity
from manyhands.base.rate import BURST_S
from manyhands.dht import DhtConfig, Entry, Reason, Schema
from manyhands.dht.messages import (
    FIND,
    PING,
    STORE,
    TOO_MANY_REQUESTS,
    FindRequest,
    FindResponse,
    PingRequest,
    StoreRequest,
)
from manyhands.dht.records import AgedRecord
from tests.integration.dht_swarm import TTL_S, Swarm, values
from tests.sweeps import few_of
from tests.unit.dht.examples import open_record, owned_record

NUM_SUBKEYS = 2500
GREETING = Schema(str, is_owned=True, max_ttl_s=100.0)


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    async with AsyncExitStack() as stack:
        yield Swarm(stack)


def config(**fields: Any) -> DhtConfig:
    return DhtConfig(request_timeout_s=1.0, refresh_period_s=1000.0, **fields)


def names(prefix: str, num: int) -> list[Entry]:
    return [Entry("key", number, TTL_S, f"{prefix}{number:05}") for number in range(num)]


async def code_of(storing: Coroutine[Any, Any, object]) -> str:
    """Why all holders refused, or that they did not."""
    try:
        await storing
    except Refused as error:
        return error.code
    return "stored"


# pages and bulk calls


@pytest.mark.parametrize("quickly", few_of([False, True], 1, pytest.mark.long))
async def test_a_key_with_thousands_of_records_is_read_in_pages(swarm: Swarm, quickly: bool) -> None:
    for _ in range(7):
        await swarm.add()
    far = swarm.nearest("key")[-1]
    assert await far.store_many(names("", NUM_SUBKEYS)) == [5] * NUM_SUBKEYS
    for _ in range(3):  # once at all, then at those that were found
        found = await far.get("key", quickly=quickly)
        assert [found[subkey].value for subkey in sorted(found)] == list(range(NUM_SUBKEYS))
    await swarm.lose(swarm.nearest("key")[1], "key", ["00007"])
    assert len(await far.get("key")) == NUM_SUBKEYS, "a holder that missed one does not hide it"


async def test_a_holder_that_pages_for_ever_is_left(swarm: Swarm) -> None:
    node = await swarm.add()
    liar = Identity.from_seed(b"l" * 32)
    await swarm.add(identity=liar)
    endpoint = swarm.endpoints[1]
    num_asked = 0

    async def lead_nowhere(remote: str, request: FindRequest) -> FindResponse:
        nonlocal num_asked
        num_asked += 1
        shown = [AgedRecord(open_record(number, subkey=f"{number:05}"), 0.0) for number in range(100)]
        return FindResponse([], shown, is_more=True)

    endpoint.answer_with(FIND, lead_nowhere)
    for _ in range(3):
        assert len(await node.get("key")) == 100
    assert num_asked <= 3 * 3


async def test_many_keys_are_stored_and_read_with_one_call(swarm: Swarm) -> None:
    for _ in range(7):
        await swarm.add()
    entries = [Entry(f"key-{number}", number, TTL_S) for number in range(20)]
    assert await swarm.nodes[0].store_many(entries) == [5] * 20
    found = await swarm.nodes[6].get_many([*(entry.key for entry in entries), "key-0", "nothing"])
    assert {key: [stored.value for stored in of_key.values()] for key, of_key in found.items()} == {
        **{f"key-{number}": [number] for number in range(20)},
        "nothing": [],
    }


async def test_a_later_record_of_somebody_else_is_exceeded_in_bulk_too(swarm: Swarm) -> None:
    ahead = await swarm.add(clock_skew_s=50.0)
    behind = await swarm.add()
    await ahead.store("key", "early", TTL_S, subkey="b")
    assert await behind.store_many([Entry("key", name, TTL_S, name) for name in "abc"]) == [2, 2, 2]
    assert await values(ahead, "key") == {name: name for name in "abc"}


async def test_bulk_calls_that_need_more_requests_than_a_holder_takes_at_once_go_at_its_pace(swarm: Swarm) -> None:
    for _ in range(6):
        await swarm.add(config=DhtConfig(refresh_period_s=1000.0, max_requests_per_s_of_peer=22.0))
    keys = [f"key-{number}" for number in range(100)]  # ten requests each, of six nodes, which take 110 at once
    num_holders = await swarm.nodes[0].store_many([Entry(key, key, TTL_S) for key in keys])
    assert min(num_holders) >= 3, "a majority: a holder that is slow is passed over"
    found = await swarm.nodes[5].get_many(keys)
    assert [key for key in keys if not found[key]] == []
    assert sum(endpoint.counters["dht_requests_refused"] for endpoint in swarm.endpoints), "else this shows nothing"
    for node in swarm.nodes:
        await node.refresh()
    assert sum(node.num_records for node in swarm.nodes) >= 5 * len(keys), "those that were passed over have it now"


async def test_a_newcomer_is_given_more_records_than_it_takes_requests_at_once(swarm: Swarm) -> None:
    node = await swarm.add()
    await node.store_many(names("", 800))  # 67 requests
    newcomer = await swarm.add(config=config(max_requests_per_s_of_peer=10.0))
    await node.refresh()
    assert newcomer.num_records == 800


# schemas


async def test_nodes_of_a_run_neither_hold_nor_return_what_is_not_of_its_schema(swarm: Swarm) -> None:
    stranger, *members = [await swarm.add() for _ in range(4)]
    own_id = swarm.endpoints[0].peer_id
    await stranger.store("key", 13, TTL_S, subkey=own_id)
    await stranger.store("key", "unsigned", TTL_S, subkey="anybody")
    for node in members:
        node.declare("key", GREETING)
        assert not node.num_records, "dropped when it is declared"
    member_id = swarm.endpoints[1].peer_id
    assert await members[0].store("key", "hello", 90.0, subkey=member_id) == 4
    assert await values(members[1], "key") == {member_id: "hello"}
    assert members[1].refusals[Reason.OTHER_SCHEMA] >= 2, "the stranger shows them still"
    assert await stranger.store("key", 14, TTL_S, subkey=own_id) == 1, "held by itself only"
    assert await values(members[2], "key") == {member_id: "hello"}
    await members[0].store("key", None, 90.0, subkey=member_id)
    assert await values(members[1], "key") == {}, "what was deleted has no schema"


async def test_a_schema_counts_for_what_is_being_read_when_it_is_declared(swarm: Swarm) -> None:
    stranger, node = await swarm.add(), await swarm.add()
    await stranger.store("key", 13, TTL_S, subkey="anybody")
    reading = asyncio.create_task(node.get("key"))
    await asyncio.sleep(0)
    node.declare("key", GREETING)
    assert await reading == {}
    assert await values(node, "key") == {}


@pytest.mark.parametrize(
    ("value", "ttl_s", "subkey"), [(13, TTL_S, None), ("hello", 101.0, None), ("hello", TTL_S, "anybody")]
)
async def test_a_node_does_not_write_what_breaks_its_own_schema(
    swarm: Swarm, value: object, ttl_s: float, subkey: str | None
) -> None:
    node = await swarm.add()
    node.declare("key", GREETING)
    with pytest.raises(ConfigError, match=r"declared for 'key': str, signed by .* at most 100 s"):
        await node.store("key", value, ttl_s, subkey=subkey or swarm.endpoints[0].peer_id)


# limits


async def test_a_write_that_all_refuse_says_why(swarm: Swarm) -> None:
    for _ in range(3):
        await swarm.add(config=config(max_records=1))
    await swarm.nodes[0].store("first", 1, TTL_S)
    with pytest.raises(Refused, match="the 3 peers nearest to its key refused the record 'second'") as error:
        await swarm.nodes[0].store("second", 2, TTL_S)
    assert error.value.code == "storage_full"
    assert swarm.nodes[1].refusals[Reason.STORAGE_FULL] == 1


async def test_junk_leaves_room_for_what_is_signed(swarm: Swarm) -> None:
    small = config(max_records_per_key=40)
    for _ in range(3):
        await swarm.add(config=small)
    codes = [await code_of(swarm.nodes[2].store_many([entry])) for entry in names("junk", 30)]
    assert codes == ["stored"] * 20 + ["key_full"] * 10
    own_id = swarm.endpoints[0].peer_id
    assert await swarm.nodes[0].store("key", "here", TTL_S, subkey=own_id) == 3
    assert (await values(swarm.nodes[1], "key"))[own_id] == "here"


async def test_one_machine_takes_only_its_share(swarm: Swarm) -> None:
    """Over TLS, since there the machine is known: any number of key pairs, one address."""
    node = await swarm.add(kind="tls", config=config(max_records_per_source=5))
    for _ in range(4):
        await swarm.add(kind="tls", client_mode=True)
    codes = []
    for number in range(8):
        sender, own_id = swarm.nodes[1 + number % 4], swarm.endpoints[1 + number % 4].peer_id
        codes.append(await code_of(sender.store(f"key-{number}", number, TTL_S, subkey=own_id)))
    assert codes == ["stored"] * 5 + ["source_full"] * 3
    assert node.refusals[Reason.SOURCE_FULL] == 3
    assert await node.store("own", 1, TTL_S) == 1, "its own records come from no other machine"


async def test_all_addresses_of_an_ipv6_network_are_one_machine(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever rents one machine has 2^64 of them."""
    await swarm.add(config=config(max_records_per_source=2, max_requests_per_s_of_host=4.0))
    monkeypatch.setattr(swarm.endpoints[0], "host_of", lambda peer_id: f"2001:db8::{ord(peer_id[-1]):x}")
    codes: list[str] = []
    for number in range(1, 4):
        node = await swarm.add(client_mode=True)
        codes.append(await code_of(node.store(f"key-{number}", number, TTL_S, subkey=swarm.endpoints[number].peer_id)))
    assert codes == ["stored"] * 2 + ["source_full"]
    asking = [
        code_of(swarm.endpoints[1 + number % 3].call(swarm.endpoints[0].peer_id, PING, PingRequest(), 1.0))
        for number in range(30)
    ]
    assert [await one for one in asking].count(TOO_MANY_REQUESTS) >= 10


async def test_a_peer_that_asks_too_often_is_refused_and_others_are_not(swarm: Swarm) -> None:
    limited = config(max_requests_per_s_of_peer=4.0)
    node = await swarm.add(config=limited)
    await swarm.add()
    flooder, other = swarm.endpoints[1], await swarm.add()
    address = swarm.endpoints[0].peer_id
    codes = []
    for _ in range(100):
        try:
            await flooder.call(address, PING, PingRequest(), 1.0)
        except Refused as error:
            codes.append(error.code)
    assert 75 <= len(codes) <= 100 - 4 * BURST_S + 15, "the calls of joining count as well"
    assert set(codes) == {TOO_MANY_REQUESTS}
    assert swarm.endpoints[0].counters["dht_requests_refused"] == len(codes)
    assert await other.store("key", 1, TTL_S) >= 2
    contacts = {contact.peer_id for contact in swarm.nodes[1].contacts()}
    await swarm.nodes[1].get("key")
    assert address in contacts
    assert address in {contact.peer_id for contact in swarm.nodes[1].contacts()}, "who refuses is there"
    assert node.num_known_peers == 2


async def test_a_flood_of_forged_records_is_not_checked_for_long(swarm: Swarm) -> None:
    node = await swarm.add()
    await swarm.add()
    mallory, victim = swarm.endpoints[1], swarm.endpoints[0].peer_id
    forged = [
        AgedRecord(msgspec.structs.replace(owned_record(sequence=number), ttl_s=50.0), 0.0) for number in range(600)
    ]
    codes = [
        await code_of(mallory.call(victim, STORE, StoreRequest(forged[start : start + 12]), 1.0))
        for start in range(0, len(forged), 12)
    ]
    assert codes[0] == "stored", "heard, that is"
    assert codes[-1] == TOO_MANY_REQUESTS
    assert node.refusals[Reason.BAD_SIGNATURE] < 100


async def test_over_extended_and_replayed_records_are_refused_after_their_owner_left(swarm: Swarm) -> None:
    """A holder that has kept old records of a peer that is gone plays them back, and makes them live longer."""
    for _ in range(3):
        await swarm.add()
    mallory = swarm.endpoints[2]
    victim = swarm.endpoints[0].peer_id
    first, second = owned_record("first", sequence=1), owned_record("second", sequence=2)

    async def offer(record: AgedRecord) -> str:
        response = await mallory.call(victim, STORE, StoreRequest([record]), 1.0)
        return response.outcomes[0].code

    assert await offer(AgedRecord(first, 0.0)) == "accepted"
    assert await offer(AgedRecord(second, 0.0)) == "accepted"
    assert await offer(AgedRecord(first, 0.0)) == "stale"
    assert await offer(AgedRecord(msgspec.structs.replace(second, ttl_s=86400.0), 0.0)) == "bad_signature"
    assert await offer(AgedRecord(msgspec.structs.replace(second, sequence=3), 0.0)) == "bad_signature"
    assert await offer(AgedRecord(second, -1e9)) == "unchanged"
    found = await swarm.nodes[0].get("key")
    assert found[second.subkey].remaining_s <= second.ttl_s, "no age makes it live longer"
    swarm.wall_now += second.ttl_s + 61.0
    assert await offer(AgedRecord(second, 0.0)) == "expired", "not by the signed time, whatever its age is said to be"
