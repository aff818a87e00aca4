"""What strangers publish under a key costs its readers a limited number of bytes, and hides no known peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Set
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from manyhands.base.identity import Identity, PeerId
from manyhands.base.rate import BURST_S, Buckets
from manyhands.dht import DhtNode
from manyhands.dht.config import MAX_FOUND_BYTES
from manyhands.dht.messages import FIND, FindRequest
from manyhands.dht.rate_limit import READ_BYTES_PER_S
from manyhands.dht.records import AgedRecord, Record, encode_value
from tests.integration.dht_swarm import CONFIG, TTL_S, Swarm
from tests.unit.dht.examples import WALL_NOW

KEY = "run.progress"
STRANGERS = [Identity.from_seed(number.to_bytes(32, "little")) for number in range(1, 301)]
LARGE = encode_value(b"x" * 24_000)
AT_ONCE = READ_BYTES_PER_S * BURST_S


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    async with AsyncExitStack() as stack:
        yield Swarm(stack)


class Invited:
    """The members of a run by invitation."""

    def __init__(self, *members: str) -> None:
        self.members = set(members)
        self.looked_up: set[str] = set()

    def known(self) -> Collection[str]:
        return self.members

    async def look_up(self, peer_ids: Set[PeerId]) -> bool:
        self.looked_up |= peer_ids
        return False

    async def introduce(self, holder: PeerId) -> bool:
        return False

    def takes(self, record: Record) -> bool:
        return record.owner in self.members


def large_records(sequence: int = 1) -> list[Record]:
    """Seven megabytes."""
    return [
        Record(
            key=KEY, subkey=identity.peer_id, value=LARGE, sequence=sequence, issued_at=WALL_NOW, ttl_s=TTL_S
        ).signed_by(identity)
        for identity in STRANGERS
    ]


async def add_attacker(swarm: Swarm, host: str, records: list[Record]) -> DhtNode:
    """A node that shows what it likes."""
    attacker = await swarm.add(host=host, config=replace(CONFIG, max_requests_per_s_of_peer=1e6))
    if records:
        swarm.show(attacker, records)
    return attacker


def count_bytes(swarm: Swarm, reader: DhtNode) -> list[int]:
    """The bytes of the records in each answer that a node gets from now on."""
    sizes: list[int] = []
    endpoint = swarm.endpoint_of(reader)
    call = endpoint.call

    async def counted(peer_id: PeerId, method: Any, *rest: Any) -> Any:
        answer = await call(peer_id, method, *rest)
        if method is FIND:
            sizes.append(sum(aged.record.num_bytes for aged in answer.records))
        return answer

    endpoint.call = counted  # type: ignore[method-assign]
    return sizes


async def read(reader: DhtNode, **options: Any) -> set[str]:
    return set(await reader.get(KEY, **options))


def most_bytes(began: float) -> float:
    """Of what one network shows; a page may exceed the limit."""
    return AT_ONCE + READ_BYTES_PER_S * (asyncio.get_running_loop().time() - began) + MAX_FOUND_BYTES


async def add_members(swarm: Swarm, num: int = 3) -> tuple[list[DhtNode], set[str]]:
    nodes = [await swarm.add(host=f"127.0.{number}.1") for number in range(1, num + 1)]
    ids: set[str] = {swarm.endpoint_of(node).peer_id for node in nodes}
    for node in nodes:
        await node.store(KEY, "here", TTL_S, subkey=swarm.endpoint_of(node).peer_id)
    return nodes, ids


@pytest.mark.parametrize("is_by_invitation", [True, False])
async def test_reads_of_a_flooded_key_are_bounded_and_show_the_known_peers(
    swarm: Swarm, is_by_invitation: bool
) -> None:
    nodes, ids = await add_members(swarm)
    for node in nodes:
        node.met["run"] = lambda: ids
        if is_by_invitation:
            node.members["run"] = Invited(*ids)
    for number in (101, 102):
        await add_attacker(swarm, f"127.0.{number}.1", large_records())
    sizes, began = count_bytes(swarm, nodes[0]), asyncio.get_running_loop().time()
    for number in range(20):
        found = await read(nodes[0], quickly=number % 2 > 0)
        assert ids <= found
        assert not is_by_invitation or found == ids
    assert sum(sizes) <= 2 * most_bytes(began) + 20 * 5 * 3 * 400


async def test_a_read_of_certain_owners_reads_no_others(swarm: Swarm) -> None:
    nodes, ids = await add_members(swarm)
    await add_attacker(swarm, "127.0.101.1", large_records())
    sizes = count_bytes(swarm, nodes[0])
    wanted = {*sorted(ids)[:2], STRANGERS[7].peer_id}
    assert await read(nodes[0], owners=wanted) == wanted
    assert await read(nodes[0], owners=sorted(ids)[:1]) == {*sorted(ids)[:1]}
    assert sum(sizes) < 4 * len(LARGE)
    assert await read(nodes[0], owners=()) == set()


async def test_a_holder_that_shows_more_than_was_asked_for_shows_one_page_of_it(swarm: Swarm) -> None:
    nodes, ids = await add_members(swarm, 1)
    attacker = await add_attacker(swarm, "127.0.101.1", [])
    shown = swarm.show(attacker, large_records())
    swarm.endpoint_of(attacker).answer_with(
        FIND, lambda remote, request: shown(remote, msgspec.structs.replace(request, owners=None))
    )
    sizes = count_bytes(swarm, nodes[0])
    assert await read(nodes[0], owners=ids) == ids
    assert sum(sizes) < 2 * MAX_FOUND_BYTES


@pytest.mark.parametrize("is_by_invitation", [True, False])
async def test_a_holder_that_shows_strangers_alone_is_asked_once(swarm: Swarm, is_by_invitation: bool) -> None:
    nodes, ids = await add_members(swarm, 4)
    for node in nodes:
        node.met["run"] = lambda: ids
        if is_by_invitation:
            node.members["run"] = Invited(*ids)
    attacker = await swarm.add(host="127.0.101.1")
    strangers = [AgedRecord(record, 0.0) for record in large_records()[:20]]
    attackers = swarm.endpoint_of(attacker)
    answer: Any = attackers.handlers[FIND.name]

    def with_strangers(remote: PeerId, request: FindRequest) -> Any:
        response = answer(remote, request)
        if request.key != KEY:
            return response
        return msgspec.structs.replace(response, records=strangers if request.wants_records else [], digest=b"other")

    attackers.answer_with(FIND, with_strangers)
    assert ids <= await read(nodes[0])
    endpoint = swarm.endpoint_of(nodes[0])
    call, asked = endpoint.call, list[PeerId]()

    async def noted(peer_id: PeerId, *rest: Any) -> Any:
        asked.append(peer_id)
        return await call(peer_id, *rest)

    endpoint.call = noted  # type: ignore[method-assign]
    for number in range(10):
        assert ids <= await read(nodes[0], quickly=number % 2 > 0)
    assert attackers.peer_id not in asked
    assert asked, "of the others, most are asked in every second read"


class StoppedBuckets(Buckets):
    """Their clock moves when a test says so."""

    now = 0.0

    def take(self, sender: str, now: float) -> bool:
        return super().take(sender, StoppedBuckets.now)

    def charge(self, sender: str, num: int, now: float) -> None:
        super().charge(sender, num, StoppedBuckets.now)


async def test_later_reads_get_the_records_that_one_read_could_not_afford(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.dht.rate_limit.Buckets", StoppedBuckets)
    nodes, ids = await add_members(swarm, 1)
    await add_attacker(swarm, "127.0.101.1", large_records())
    found = await read(nodes[0])
    assert len(found) < len(STRANGERS)
    for _ in range(4):
        assert await read(nodes[0]) == found, "nothing more is read, and nothing is forgotten"
        StoppedBuckets.now += 2 * BURST_S
        before = found
        found = await read(nodes[0])
        assert before <= found
    assert found == ids | {identity.peer_id for identity in STRANGERS}


async def test_the_members_of_a_run_are_asked_about_a_few_owners_of_each_page(swarm: Swarm) -> None:
    nodes, ids = await add_members(swarm, 1)
    await add_attacker(swarm, "127.0.101.1", large_records())
    invited = nodes[0].members["run"] = Invited(*ids)
    assert await read(nodes[0]) == ids
    assert 0 < len(invited.looked_up) <= 128 * (AT_ONCE / MAX_FOUND_BYTES + 2)
