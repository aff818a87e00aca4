"""What peers without a lease can cost the members of a run by publishing records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from manyhands.access import Charter, SignedCharter
from manyhands.access import members as members_module
from manyhands.access import signed as signed_module
from manyhands.access.charters import read_charters
from manyhands.access.lease import Lease
from manyhands.access.messages import RECORD_TTL_S, CharterRecord, charter_key, leases_key
from manyhands.access.signed import Signed
from manyhands.base.deadline import time_limit
from manyhands.base.identity import Identity, PeerId
from manyhands.dht import DhtConfig
from manyhands.dht import records as records_module
from manyhands.dht.ids import distance, key_id, node_id
from manyhands.dht.issuing import Issuer
from manyhands.dht.messages import FIND, FindRequest, FindResponse
from manyhands.dht.quotas import SOURCE_SHARE, STRANGERS_SHARE
from manyhands.dht.records import AgedRecord, Record
from manyhands.peer import Presence
from tests.dht_requests import records_at, store_at
from tests.network import PATIENCE_S, identity_of
from tests.unit.access.world import (
    CHARTER,
    COORDINATOR,
    HOUR_S,
    LOOKS_OFTEN,
    RUN,
    START_S,
    World,
    members,
    new_world,
    token_of,
)

NUM = 40
STRANGERS = [identity_of(number) for number in range(1000, 1000 + NUM)]
PROGRESS = f"{RUN}.progress"
MADE_UP = bytes(range(63)) + b"\x00"


@pytest.fixture
def num_verified(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many signatures of leases and charters were verified since the last call."""
    verified: list[str] = []
    verify = signed_module.verify

    def counted(signer: Any, domain: str, *rest: Any) -> None:
        verified.append(domain)
        verify(signer, domain, *rest)

    def since() -> int:
        num = len(verified)
        verified.clear()
        return num

    monkeypatch.setattr(signed_module, "verify", counted)
    return since


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unknown owner makes a member look for leases at once."""
    monkeypatch.setattr(members_module, "LOOK_UP_PERIOD_S", 0.0)


def record_of(identity: Identity, key: str, value: Any, ttl_s: float = HOUR_S) -> Record:
    return Issuer(identity, DhtConfig(), lambda: START_S).issue(key, identity.peer_id, value, ttl_s)


def false_lease(identity: Identity) -> Record:
    """It says that the coordinator has signed it."""
    lease = Lease(CHARTER.digest, identity.peer_id, "trainer", START_S, START_S + HOUR_S)
    signed = Signed(COORDINATOR.peer_id, msgspec.msgpack.encode(lease), MADE_UP)
    return record_of(identity, leases_key(RUN), signed.encoded())


def foreign_charter(identity: Identity) -> Record:
    """A valid one of the same run, of another owner."""
    charter = SignedCharter.sign(identity, Charter(RUN, identity.peer_id, "invite", [identity.peer_id]))
    record = CharterRecord(charter.signed.encoded())
    return record_of(identity, charter_key(RUN), msgspec.to_builtins(record, builtin_types=(bytes,)), RECORD_TTL_S)


def progress_of(identity: Identity) -> Record:
    return record_of(identity, PROGRESS, "progress")


async def publish(attacker: Presence, records: Sequence[Record]) -> None:
    """Send records of any identities to all nodes that the attacker knows."""
    for contact in attacker.dht.contacts():
        await store_at(attacker.endpoint, contact.peer_id, records)


async def hold(world: World, attacker: Presence, records: Sequence[Record]) -> None:
    """A node that is not a member holds what it is sent, and shows it to all readers."""
    outcomes = await store_at(world.peers[0].endpoint, attacker.peer_id, records)
    assert [outcome.is_stored for outcome in outcomes] == [True] * len(records)


async def num_held(world: World, peer: Presence, key: str) -> int:
    """The number of records of a key that a node holds."""
    return len(await records_at(world.peers[0].endpoint, peer.peer_id, key))


@pytest.mark.usefixtures("no_pause")
async def test_a_false_lease_is_verified_once_by_each_member(num_verified: Callable[[], int]) -> None:
    async with new_world() as world:
        (one,) = await members(world, 10)
        attacker = await world.peer(20)
        await publish(attacker, [false_lease(stranger) for stranger in STRANGERS])
        await publish(attacker, [progress_of(stranger) for stranger in STRANGERS])
        assert await one.dht.get(PROGRESS) == {}
        num_verified()
        for _ in range(3):
            assert await one.dht.get(PROGRESS) == {}
        assert num_verified() == 0


@pytest.mark.usefixtures("no_pause")
async def test_leases_of_peers_that_publish_nothing_else_are_not_verified(num_verified: Callable[[], int]) -> None:
    async with new_world() as world:
        (one,) = await members(world, 10)
        attacker = await world.peer(20)
        await hold(world, attacker, [false_lease(stranger) for stranger in STRANGERS])
        await publish(attacker, [progress_of(STRANGERS[0])])
        num_verified()
        assert await one.dht.get(PROGRESS) == {}
        assert num_verified() == 1


async def test_strangers_cannot_make_members_look_for_leases_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with new_world() as world:
        (one,) = await members(world, 10)
        attacker = await world.peer(20)
        reads: list[str] = []
        get = one.dht.get

        async def counted(key: str, **options: Any) -> object:
            reads.append(key)
            return await get(key, **options)

        monkeypatch.setattr(one.dht, "get", counted)
        for stranger in STRANGERS[:4]:
            await publish(attacker, [progress_of(stranger)])
            assert await one.dht.get(PROGRESS) == {}
        assert 0 < reads.count(leases_key(RUN)) <= 2


async def test_two_reads_at_once_both_know_the_members() -> None:
    async with new_world() as world:
        (one,) = await members(world, 10)
        keys = [PROGRESS, f"{RUN}.metrics"]
        for key in keys:
            await one.dht.store(key, "here", 60.0, subkey=one.peer_id)
        (newcomer,) = await members(world, 11)
        found = await asyncio.gather(*map(newcomer.dht.get, keys))
        assert [set(records) for records in found] == [{one.peer_id}] * 2


async def test_charters_of_others_are_not_verified(num_verified: Callable[[], int]) -> None:
    async with new_world() as world:
        (one,) = await members(world, 10)
        attacker = await world.peer(20)
        foreign = [foreign_charter(stranger) for stranger in STRANGERS]
        await hold(world, attacker, foreign)
        await publish(attacker, foreign)
        num_verified()
        assert await read_charters(one.dht, RUN, publishers=CHARTER.coordinators)
        assert num_verified() == 1, "that of the coordinator"
        (newcomer,) = await members(world, 11)
        assert num_verified() < NUM
        friend = await world.peer(12)
        num_verified()
        assert [charter.digest for charter in await friend.named_charters(RUN)] == [CHARTER.digest]
        assert num_verified() == 1
        assert newcomer.members[RUN].charter.digest == CHARTER.digest


async def test_strangers_have_little_room_at_the_members_and_newcomers_count() -> None:
    room = int(DhtConfig().max_records_per_key * STRANGERS_SHARE)
    many = [identity_of(number) for number in range(2000, 2000 + room + NUM)]
    async with new_world() as world:
        (one,) = await members(world, 10)
        attacker = await world.peer(20)
        await publish(attacker, [progress_of(stranger) for stranger in many])
        assert await num_held(world, one, PROGRESS) == room * SOURCE_SHARE
        await one.dht.store(PROGRESS, "here", 60.0, subkey=one.peer_id)
        (newcomer,) = await members(world, 11)
        assert set(await newcomer.dht.get(PROGRESS)) == {one.peer_id}


async def test_a_node_that_becomes_a_member_drops_what_strangers_have_stored_there() -> None:
    room = int(DhtConfig().max_records_per_key * STRANGERS_SHARE)
    many = [identity_of(number) for number in range(2000, 2000 + room + NUM)]
    async with new_world() as world:
        await members(world)
        newcomer = await world.peer(10)
        await hold(world, newcomer, [progress_of(stranger) for stranger in many])
        await newcomer.join_run(world.ticket(token_of(100)))
        assert await num_held(world, newcomer, PROGRESS) == room * SOURCE_SHARE, "they came from one machine"


async def test_a_newcomer_that_had_no_room_has_it_soon() -> None:
    """A holder of its records may hold none of the leases: here it is the farthest from their key."""
    room = int(DhtConfig().max_records_per_key * STRANGERS_SHARE)
    nearest = sorted(
        range(10, 18), key=lambda number: distance(node_id(identity_of(number).peer_id), key_id(leases_key(RUN)))
    )
    async with new_world() as world:
        await members(world, *nearest[1:-1])
        (one,) = await members(world, nearest[-1], config=LOOKS_OFTEN)
        strangers = [progress_of(identity_of(number)) for number in range(2000, 2000 + room)]
        await store_at(world.peers[0].endpoint, one.peer_id, strangers)
        for peer in world.peers:
            await peer.dht.refresh()  # hands the charter to its holders
        (newcomer,) = await members(world, nearest[0])
        record = progress_of(identity_of(nearest[0]))
        assert [outcome.code for outcome in await store_at(newcomer.endpoint, one.peer_id, [record])] == ["source_full"]
        async with time_limit(PATIENCE_S, "for the lease to be looked up"):
            while not (await store_at(newcomer.endpoint, one.peer_id, [record]))[0].is_stored:
                await asyncio.sleep(0.05)


async def test_a_newcomer_that_finds_no_room_shows_its_lease_and_has_it_at_once() -> None:
    """The holder does not hold the leases, and does not look for them yet."""
    room = int(DhtConfig().max_records_per_key * STRANGERS_SHARE)

    def distance_from(key: str) -> Callable[[int], int]:
        return lambda number: distance(node_id(identity_of(number).peer_id), key_id(key))

    near, *others = sorted(range(10, 60), key=distance_from(leases_key(RUN)))
    at_progress = min(others[6:], key=distance_from(PROGRESS))
    async with new_world() as world:
        await members(world, *others[:6])
        (one,) = await members(world, at_progress)
        strangers = [progress_of(identity_of(number)) for number in range(2000, 2000 + room)]
        await store_at(world.peers[0].endpoint, one.peer_id, strangers)
        for peer in world.peers:
            await peer.dht.refresh()
        (newcomer,) = await members(world, near)
        assert one.members[RUN].lease_of(newcomer.peer_id) is None
        await newcomer.dht.store(PROGRESS, "progress", 60.0, subkey=newcomer.peer_id)
        assert one.members[RUN].lease_of(newcomer.peer_id) is not None
        assert newcomer.peer_id in await records_at(world.peers[0].endpoint, one.peer_id, PROGRESS)


async def test_signatures_of_strangers_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with new_world() as world:
        one, two = await members(world, 10, 11)
        await two.dht.store(PROGRESS, "here", 60.0, subkey=two.peer_id)
        attacker = await world.peer(20)
        strangers = [identity_of(number) for number in range(5000, 5000 + len(STRANGERS))]
        shown = [AgedRecord(progress_of(stranger), 0.0) for stranger in strangers]
        was_asked: list[PeerId] = []

        def show(remote: PeerId, request: FindRequest) -> FindResponse:
            if request.key != PROGRESS or not request.wants_records:
                return FindResponse([], [], b"another")
            was_asked.append(remote)
            return FindResponse([], shown)

        attacker.endpoint.unhandle(FIND)
        attacker.endpoint.handle(FIND, show)
        checked: list[str] = []
        verify = records_module.verify

        def counted(signer: Any, *rest: Any) -> None:
            checked.append(signer)
            verify(signer, *rest)

        monkeypatch.setattr(records_module, "verify", counted)
        assert set(await one.dht.get(PROGRESS)) == {two.peer_id}
        assert was_asked
        assert not {stranger.peer_id for stranger in strangers} & set(checked)
