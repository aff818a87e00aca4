"""Relays that mean harm to those whose bytes they forward: nothing of it is read, and another relay takes over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest

from manyhands.averaging.allreduce.streams import PartnerStreams
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import NAME_BYTES, Group, Member, Position
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.errors import PeerError, PeerLost, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint, RpcConfig
from manyhands.rpc.dialled_back_streams import MAX_OF_ONE_PEER
from manyhands.rpc.relayed_streams import RELAYED
from manyhands.rpc.ways import Way, relayed_by
from manyhands.runtime import TaskOwner
from tests.hostile.relays import Spoil, Spoiling, delays, drops, floods, reorders
from tests.integration.test_relays import clients_and_relays, echoed, seems_symmetric, send_back
from tests.network import ECHO, PATIENCE_S, Text, until
from tests.wire import WatchedEndpoint

QUICK = RpcConfig(relay_mbit_s=8000.0, heartbeat_period_s=0.5, heartbeat_timeout_s=3.0)
HANDSHAKE_BYTES = 16_000
"""More than the handshake of a stream and its hello."""


@dataclass
class Pair:
    """Two clients that are relayed by the first of two relays."""

    one: WatchedEndpoint
    other: WatchedEndpoint
    hostile: WatchedEndpoint
    honest: WatchedEndpoint
    relay: Spoiling


@asynccontextmanager
async def relayed_pair() -> AsyncIterator[Pair]:
    """The relay that was asked first is the hostile one."""
    async with clients_and_relays("tls", num_relays=2, config=QUICK) as (one, other, relays):
        spoiling = {relay.peer_id: Spoiling(relay.wire) for relay in relays}
        other.accept_bulk("echo", send_back)
        assert await echoed(one, other)
        hostile, honest = sorted(relays, key=lambda relay: one.way_to(other.peer_id) != relayed_by(relay.peer_id))
        yield Pair(one, other, hostile, honest, spoiling[hostile.peer_id])


async def fails(one: Endpoint, other: Endpoint, relay: PeerId) -> Way:
    """Have a stream through a relay lack data; returns the way that the two are connected then."""
    before = one.num_streams, other.num_streams
    stream = await one.open_bulk(other.peer_id, "echo", b"3", PATIENCE_S)
    assert one.way_to(other.peer_id) == relayed_by(relay)
    one.fell_short(stream)
    one.release(stream)
    await until(lambda: one.way_to(other.peer_id) not in (None, relayed_by(relay)), "another relay has taken over")
    await until(lambda: (one.num_streams, other.num_streams) == before, "the old connection is gone")
    way = one.way_to(other.peer_id)
    assert way is not None
    return way


async def way_of_next_answer(here: Endpoint, there: Endpoint, text: str = "hello") -> Way | None:
    """Call until there is an answer; returns the way that the connection takes then."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while True:
        with suppress(Unavailable):
            await here.call(there.peer_id, ECHO, Text(text))
            return here.way_to(there.peer_id)
        assert asyncio.get_running_loop().time() < deadline, "no answer"
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("spoil", [drops, delays, reorders, floods])
async def test_a_relay_that_spoils_a_connection_is_replaced(spoil: Spoil) -> None:
    async with relayed_pair() as pair:
        pair.relay.spoil = spoil
        with pytest.raises(Unavailable):
            await pair.one.call(pair.other.peer_id, ECHO, Text("hello"), 0.5)
        assert await way_of_next_answer(pair.one, pair.other) == relayed_by(pair.honest.peer_id)
        assert pair.other.way_to(pair.one.peer_id) == relayed_by(pair.honest.peer_id)


@pytest.mark.parametrize("spoil", [drops, reorders])
async def test_a_relay_that_spoils_all_but_the_handshakes_is_replaced(spoil: Spoil) -> None:
    async with relayed_pair() as pair:
        pair.relay.spoil, pair.relay.spoils_from = spoil, HANDSHAKE_BYTES
        assert await way_of_next_answer(pair.one, pair.other, "x" * 40_000) == relayed_by(pair.honest.peer_id)


@pytest.mark.parametrize("spoil", [drops, delays, reorders, floods])
async def test_a_bulk_stream_that_a_relay_spoils_from_the_first_byte_goes_through_another_one(spoil: Spoil) -> None:
    async with relayed_pair() as pair:
        pair.relay.spoil = spoil
        stream = await pair.one.open_bulk(pair.other.peer_id, "echo", b"3", 5.0)
        received = bytearray(3)
        await asyncio.gather(stream.send(b"abc"), stream.receive_into(memoryview(received)))
        pair.one.release(stream)
        assert received == b"abc"
        assert pair.honest.counters["relayed_streams"] > 0


@pytest.mark.parametrize("spoil", [reorders, floods])
async def test_nothing_that_a_relay_has_changed_in_a_bulk_stream_is_read(spoil: Spoil) -> None:
    async with relayed_pair() as pair:
        stream = await pair.one.open_bulk(pair.other.peer_id, "echo", b"200000", PATIENCE_S)
        pair.relay.spoil = spoil
        with pytest.raises(PeerLost):
            await asyncio.gather(stream.send(bytes(200_000)), stream.receive_into(memoryview(bytearray(200_000))))
        pair.one.release(stream)


async def test_after_a_round_in_which_a_relay_has_dropped_the_values_the_streams_go_through_another_one() -> None:
    async with relayed_pair() as pair:
        tasks = TaskOwner("test")
        config = AveragingConfig(averaging_timeout_s=PATIENCE_S)
        ends = [PartnerStreams(RunEndpoint(end, "run"), config, tasks) for end in (pair.one, pair.other)]
        members = [Member(end.peer_id, [], is_client=True, weight=1.0) for end in (pair.one, pair.other)]
        group = Group(b"group", pair.one.peer_id, Position(0, b""), members)
        ways = []
        for name in (b"1" * NAME_BYTES, b"2" * NAME_BYTES):
            before = pair.hostile.counters["relayed_streams"], pair.honest.counters["relayed_streams"]
            connecting = (end.connect(group, rank, 1 - rank, 0, name, PATIENCE_S) for rank, end in enumerate(ends))
            streams = await asyncio.gather(*connecting)
            after = pair.hostile.counters["relayed_streams"], pair.honest.counters["relayed_streams"]
            ways.append((after[0] - before[0], after[1] - before[1]))
            for endpoint, end, stream in zip((pair.one, pair.other), ends, streams, strict=True):
                endpoint.fell_short(stream.stream)
                end.give_back(stream, is_used_up=False, within_s=1.0)
        assert ways[0] == (1, 0)
        assert ways[1][0] == 0
        assert ways[1][1] >= 1, "the stream, and control connections that are replaced"
        for end in ends:
            end.close()
        await tasks.close()


async def test_a_relay_that_has_spoiled_averages_loses_its_control_connections_too() -> None:
    """Else each of them would hang until its heartbeats are missed, in another round."""
    async with relayed_pair() as pair:
        lost: list[PeerId] = []
        pair.one.on_lost.append(lost.append)
        stream = await pair.one.open_bulk(pair.other.peer_id, "echo", b"3", PATIENCE_S)
        assert pair.one.way_to(pair.other.peer_id) == relayed_by(pair.hostile.peer_id)
        pair.relay.spoil = drops
        pair.one.fell_short(stream)
        pair.one.release(stream)
        honest = relayed_by(pair.honest.peer_id)
        await until(lambda: pair.one.way_to(pair.other.peer_id) == honest, "the other relay has taken over")
        assert await echoed(pair.one, pair.other)
        assert not lost


async def test_of_relays_that_have_all_failed_the_last_to_fail_is_asked_last() -> None:
    """Else the nearest one would be asked for each stream, although another one has failed by chance."""
    async with relayed_pair() as pair:
        for relay, next_one in ((pair.hostile, pair.honest), (pair.honest, pair.hostile)):
            assert await fails(pair.one, pair.other, relay.peer_id) == relayed_by(next_one.peer_id)
        stream = await pair.one.open_bulk(pair.other.peer_id, "echo", b"3", PATIENCE_S)
        before = pair.hostile.counters["relayed_streams"]
        pair.one.fell_short(stream)
        later = await pair.one.open_bulk(pair.other.peer_id, "echo", b"3", PATIENCE_S)
        assert pair.hostile.counters["relayed_streams"] == before, "although the connection still leads through it"
        for one in (stream, later):
            pair.one.release(one)


async def test_once_a_relay_has_failed_those_that_the_user_named_are_asked_before_other_volunteers() -> None:
    """An attacker may run any number of volunteers near this peer, and each would spoil a round."""
    async with clients_and_relays("tls", num_relays=5, config=QUICK) as (one, other, relays):
        for client in (one, other):
            seems_symmetric(client)  # still, although the relays have seen it otherwise
        other.accept_bulk("echo", send_back)
        assert await echoed(one, other)
        first = one.way_to(other.peer_id)
        assert first is not None
        named = next(relay for relay in relays if relayed_by(relay.peer_id) != first)
        await one.connect(named.addresses[0])
        stream = await one.open_bulk(other.peer_id, "echo", b"3", PATIENCE_S)
        assert named.counters["relayed_streams"] == 0, "the one of the connection is asked first"
        one.fell_short(stream)
        later = await one.open_bulk(other.peer_id, "echo", b"3", PATIENCE_S)
        assert named.counters["relayed_streams"] >= 1
        for each in (stream, later):
            one.release(each)
        await until(lambda: one.way_to(other.peer_id) not in (None, first), "another relay has taken over")
        assert await echoed(one, other)


@pytest.mark.long
async def test_a_relay_cannot_make_a_client_keep_more_than_some_streams_that_lead_nowhere() -> None:
    async with relayed_pair() as pair:
        target: PeerId = pair.other.peer_id
        before = pair.other.num_streams

        async def lead_nowhere() -> bool:
            try:
                await pair.hostile.open_bulk(target, RELAYED, b"")
            except (Unavailable, PeerError):
                return False
            return True

        opened = await asyncio.gather(*(lead_nowhere() for _ in range(2 * MAX_OF_ONE_PEER)))
        assert sum(opened) <= MAX_OF_ONE_PEER
        assert await way_of_next_answer(pair.one, pair.other) is not None
        await until(lambda: pair.other.num_streams <= before, "the streams have ended, as no peer has come")
