"""Identities cost nothing, but checking their signatures does: a network has so many checks a second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import msgspec
import pytest

from manyhands.base.identity import Identity
from manyhands.base.rate import BURST_S
from manyhands.dht import DhtNode, Reason, rate_limit
from manyhands.dht.messages import FIND, FindRequest, FindResponse
from manyhands.dht.rate_limit import MAX_CHECKS_PER_S
from manyhands.dht.records import AgedRecord, Record
from tests.dht_requests import store_at
from tests.integration.dht_swarm import CONFIG, TTL_S, Swarm, values
from tests.unit.dht.examples import WALL_NOW

KEY = "run.progress"
AT_ONCE = int(MAX_CHECKS_PER_S * BURST_S)
IDENTITIES = [Identity.from_seed(number.to_bytes(32, "little")) for number in range(1, 2 * AT_ONCE)]
ATTACKER = "127.0.100.1"


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    async with AsyncExitStack() as stack:
        yield Swarm(stack)


def signed(number: int) -> list[Record]:
    """A record of each identity; a higher number is a later one."""
    return [
        Record(
            key=KEY, subkey=identity.peer_id, value=bytes([number]), sequence=number, issued_at=WALL_NOW, ttl_s=TTL_S
        ).signed_by(identity)
        for identity in IDENTITIES
    ]


async def add_attacker(swarm: Swarm) -> DhtNode:
    """A node that holds, and shows to others, whatever is sent to it."""
    attacker = await swarm.add(host=ATTACKER, config=replace(CONFIG, max_requests_per_s_of_peer=1e6))
    attacker.met["run"] = lambda: {identity.peer_id for identity in IDENTITIES}
    return attacker


def most_since(began: float) -> float:
    return AT_ONCE + MAX_CHECKS_PER_S * (asyncio.get_running_loop().time() - began) + 12


@pytest.mark.parametrize("kind", ["memory", "tls"])
async def test_a_network_changes_a_limited_number_of_signed_records_at_a_holder(swarm: Swarm, kind: str) -> None:
    holder = await swarm.add(kind=kind, host="127.0.1.1")
    attacker = await swarm.add(kind=kind, host=ATTACKER)
    records, began = signed(1), asyncio.get_running_loop().time()
    await store_at(swarm.endpoint_of(attacker), swarm.endpoint_of(holder).peer_id, records)
    assert AT_ONCE <= holder.num_records <= most_since(began)
    assert swarm.endpoints[0].counters["dht_requests_refused"]

    newcomer = await swarm.add(kind=kind, host="127.0.2.1")
    newcomer_id = swarm.endpoint_of(newcomer).peer_id
    await newcomer.store(KEY, "here", TTL_S, subkey=newcomer_id)
    assert newcomer_id in await swarm.held_by(holder, KEY), "another network has its own limit"
    await attacker.store(KEY, "not signed", TTL_S, subkey="anything")
    assert "anything" in await swarm.held_by(holder, KEY), "costs no check"


async def test_a_peer_that_was_met_does_not_wait_for_the_others_of_its_network(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limit, "MAX_CHECKS_PER_S", 0.01)  # one check, and none for a long time
    holder = await swarm.add(host="127.0.1.1")
    first, friend, stranger = [await swarm.add(host=f"127.0.100.{number}") for number in (1, 2, 3)]
    first_id, friend_id = (swarm.endpoint_of(node).peer_id for node in (first, friend))
    holder.met["run"] = lambda: {friend_id}
    await first.store(KEY, "here", TTL_S, subkey=first_id)
    await asyncio.gather(*(node.store(KEY, "here", TTL_S, subkey=swarm.endpoint_of(node).peer_id)
                           for node in (friend, stranger)))  # fmt: skip
    assert (await swarm.held_by(holder, KEY)).keys() == {first_id, friend_id}


@pytest.mark.long
async def test_a_holder_makes_a_reader_check_a_limited_number_of_changed_records(swarm: Swarm) -> None:
    """It shows them all; the reader takes random ones of strangers, keeps what it knows of the others, and takes all of
    the peers that it has met."""
    attacker = await add_attacker(swarm)
    reader = await swarm.add(client_mode=True)
    await swarm.store_at(attacker, signed(1))
    began = asyncio.get_running_loop().time()
    first = await values(reader, KEY)
    assert AT_ONCE <= len(first) <= most_since(began)

    met = {identity.peer_id for identity in IDENTITIES[:50]}
    reader.met["run"] = lambda: met
    await swarm.store_at(attacker, signed(2))
    second = await values(reader, KEY)
    changed = {subkey for subkey, value in second.items() if value == 2}
    assert met <= changed
    assert len(changed - met) <= most_since(began) - AT_ONCE
    assert first.keys() <= second.keys(), "their last records count until they expire"


async def test_forged_records_of_a_peer_that_was_met_are_checked_once(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limit, "MAX_CHECKS_PER_S", 0.01)  # one check, and none for a long time
    await swarm.add(host=ATTACKER)
    reader, endpoint = await swarm.add(client_mode=True), swarm.endpoints[0]
    friend_id, stranger_id = (identity.peer_id for identity in IDENTITIES[:2])
    reader.met["run"] = lambda: {friend_id}
    of_friend, of_stranger = signed(1)[:2]
    shown = [of_stranger]

    async def show(remote: str, request: FindRequest) -> FindResponse:
        return FindResponse([], [AgedRecord(record, 0.0) for record in shown])

    endpoint.answer_with(FIND, show)
    assert set(await reader.get(KEY)) == {stranger_id}, "the check that this network has"
    shown[:] = [msgspec.structs.replace(of_friend, sequence=number) for number in range(2, 500)]
    assert friend_id not in await reader.get(KEY)
    assert reader.refusals == {Reason.BAD_SIGNATURE: 1}


async def test_a_newcomer_is_read_while_a_holder_shows_a_thousand_changes_at_each_look(swarm: Swarm) -> None:
    attacker = await add_attacker(swarm)
    honest = await swarm.add(host="127.0.1.1")
    reader = await swarm.add(client_mode=True)
    await swarm.store_at(attacker, signed(1))
    await reader.get(KEY)
    newcomer = await swarm.add(host="127.0.2.1")
    newcomer_id = swarm.endpoint_of(newcomer).peer_id
    await newcomer.store(KEY, "here", TTL_S, subkey=newcomer_id)
    assert newcomer_id in await swarm.held_by(honest, KEY)
    for number in (2, 3):
        await swarm.store_at(attacker, signed(number))
        assert (await values(reader, KEY)).get(newcomer_id) == "here"
