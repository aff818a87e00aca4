"""Reads of a part of the records of a key, which cost the same however many there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from manyhands.base.identity import Identity
from manyhands.dht.messages import FIND
from tests.integration.dht_swarm import Swarm
from tests.unit.dht.examples import owned_record

KEY = "run.progress"
OWNERS = [Identity.from_seed(number.to_bytes(32, "little")) for number in range(1, 121)]


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    async with AsyncExitStack() as stack:
        yield Swarm(stack)


async def test_a_part_is_a_fair_sample_and_says_how_many_records_there_are(swarm: Swarm) -> None:
    holder = await swarm.add()
    reader = await swarm.add(client_mode=True)
    await swarm.store_at(holder, [owned_record(owner=owner, key=KEY) for owner in OWNERS])
    num_seen: Counter[str] = Counter()
    for _ in range(200):
        part = await reader.get_part(KEY, 12)
        assert (len(part.values), part.num_shown, part.num_held) == (12, 12, 120)
        num_seen.update(part.values.keys())
    assert num_seen.keys() == {owner.peer_id for owner in OWNERS}
    assert max(num_seen.values()) < 60, "20 times on average"


async def test_a_part_of_few_records_is_all_of_them(swarm: Swarm) -> None:
    holder = await swarm.add()
    reader = await swarm.add(client_mode=True)
    records = [owned_record(owner=owner, key=KEY) for owner in OWNERS[:12]]
    await swarm.store_at(holder, records)
    for _ in range(3):
        part = await reader.get_part(KEY, 12)
        assert part.values.keys() == {record.subkey for record in records}
        assert part.num_shown == part.num_held == 12


async def test_a_node_that_holds_the_key_itself_sends_no_request(swarm: Swarm) -> None:
    holder, other = [await swarm.add() for _ in range(2)]
    for node in (holder, other):
        await swarm.store_at(node, [owned_record(owner=owner, key=KEY) for owner in OWNERS[:30]])
    assert len(await holder.get(KEY)) == 30
    swarm.endpoint_of(other).unhandle(FIND)
    part = await holder.get_part(KEY, 12)
    assert (len(part.values), part.num_shown, part.num_held) == (12, 12, 30)


async def test_when_the_holder_is_gone_the_part_comes_from_another_one(swarm: Swarm) -> None:
    holders = [await swarm.add() for _ in range(3)]
    reader = await swarm.add(client_mode=True)
    for holder in holders:
        await swarm.store_at(holder, [owned_record(owner=owner, key=KEY) for owner in OWNERS])
    assert (await reader.get_part(KEY, 12)).num_held == 120
    await swarm.kill(holders[0])
    for _ in range(6):
        assert (await reader.get_part(KEY, 12)).num_held == 120
