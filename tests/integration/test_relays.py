"""Two peers that cannot dial each other meet through a relay: real sockets, and objects of one process."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest

from manyhands.base.address import Address
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ConfigError, Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint, RpcConfig, punched_streams
from manyhands.rpc.frames import Hello, Reject, receive_frame, send_frame
from manyhands.rpc.relayed_streams import MAX_OF_ONE_PAIR, RELAY, RELAYED, RelayRequest
from manyhands.rpc.ways import DIRECT, relayed_by
from manyhands.transport import Stream, Transport
from manyhands.transport.api import Pay
from tests.network import (
    ECHO,
    KINDS,
    PATIENCE_S,
    Text,
    endpoints,
    free_port,
    identity_of,
    serve_echo,
    transport_of,
    until,
)
from tests.wire import WatchedEndpoint

VOLUNTEER = RpcConfig(relay_mbit_s=8000.0)


@asynccontextmanager
async def clients_and_relays(
    kind: str, *, num_relays: int = 1, config: RpcConfig = VOLUNTEER
) -> AsyncIterator[tuple[WatchedEndpoint, WatchedEndpoint, list[WatchedEndpoint]]]:
    """Two endpoints in client mode that are connected to all relays, and the relays."""
    async with endpoints(num_relays + 2, kind=kind, clients=[0, 1], config=config) as (one, other, *relays):
        await let_relay([one, other], relays)
        yield one, other, relays


async def let_relay(clients: list[WatchedEndpoint], relays: list[WatchedEndpoint]) -> None:
    """Connect these clients to all relays; through these alone they reach each other, and answer."""
    for client in clients:
        serve_echo(client)
        seems_symmetric(client)
        for relay in relays:
            await client.call_on(relay.peer_id, 5.0)


def one_volunteer(number: int) -> Callable[..., WatchedEndpoint]:
    """Returns what makes endpoints of which only that with this number relays bulk streams, and so is asked first."""
    volunteer = identity_of(number).peer_id

    def make(transport: Transport, *, client_mode: bool, config: None) -> WatchedEndpoint:
        is_volunteer = transport.identity.peer_id == volunteer
        return WatchedEndpoint(transport, client_mode=client_mode, config=VOLUNTEER if is_volunteer else None)

    return make


def seems_symmetric(client: Endpoint) -> None:
    """Make it believe that its router takes another port for each connection, so that it does not punch holes.

    It has no IPv6 then, whatever this machine has.
    """
    client.outside.public_ip6 = lambda: ""
    for number in range(90, 98):
        client.outside.note(identity_of(number).peer_id, ("30.0.0.1", 5000), ("192.168.1.2", 4000))


async def echoed(endpoint: Endpoint, other: Endpoint) -> str:
    return (await endpoint.call(other.peer_id, ECHO, Text("hello"))).text


async def send_back(remote: PeerId, header: bytes, stream: Stream) -> None:
    size = int(header)
    data = bytearray(size)
    await stream.receive_into(memoryview(data))
    await stream.send(data)
    await stream.wait_closed()


@pytest.mark.parametrize("kind", KINDS)
async def test_clients_call_each_other_through_a_relay(kind: str) -> None:
    async with clients_and_relays(kind) as (one, other, [relay]):
        assert await echoed(one, other) == f"hello from {other.peer_id}"
        assert await echoed(other, one) == f"hello from {one.peer_id}"
        assert one.way_to(other.peer_id) == relayed_by(relay.peer_id) == other.way_to(one.peer_id)
        assert one.way_to(relay.peer_id) == DIRECT
        assert relay.counters["relayed_streams"] == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_a_bulk_stream_through_a_relay_carries_the_same_bytes(kind: str) -> None:
    data = bytes(range(256)) * 40_000
    async with clients_and_relays(kind) as (one, other, [relay]):
        other.accept_bulk("echo", send_back)
        await one.call_on(other.peer_id, 5.0)
        stream = await one.open_bulk(other.peer_id, "echo", str(len(data)).encode())
        received = bytearray(len(data))
        await asyncio.gather(stream.send(data), stream.receive_into(memoryview(received)))
        one.release(stream)
        assert received == data
        assert relay.counters["relayed_bytes"] > 2 * len(data)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_target_opens_bulk_streams_through_the_relay_too(kind: str) -> None:
    async with clients_and_relays(kind) as (one, other, _):
        one.accept_bulk("echo", send_back)
        await one.call_on(other.peer_id, 5.0)
        stream = await other.open_bulk(one.peer_id, "echo", b"3")
        received = bytearray(3)
        await asyncio.gather(stream.send(b"abc"), stream.receive_into(memoryview(received)))
        other.release(stream)
        assert received == b"abc"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_peer_that_is_no_volunteer_relays_control_streams_only(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with clients_and_relays(kind, config=RpcConfig()) as (one, other, [relay]):
        other.accept_bulk("echo", send_back)
        assert await echoed(one, other)
        with pytest.raises(Unavailable, match="relays no bulk data"):
            await one.open_bulk(other.peer_id, "echo", b"3")
        assert relay.counters["refused_relays"] == 1
        assert f"it is relayed by {relay.peer_id}, which forwards no averages without --relay" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
async def test_another_relay_takes_over_from_one_that_is_gone(kind: str) -> None:
    async with clients_and_relays(kind, num_relays=2) as (one, other, relays):
        await echoed(one, other)
        first = next(relay for relay in relays if one.way_to(other.peer_id) == relayed_by(relay.peer_id))
        second = next(relay for relay in relays if relay is not first)
        await first.close()
        await until(lambda: not one.is_connected(other.peer_id), "the connection is lost")
        assert await echoed(one, other)
        assert one.way_to(other.peer_id) == relayed_by(second.peer_id)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_relay_of_a_peer_that_has_left_is_asked_first_as_before(kind: str) -> None:
    """The peer has said goodbye, so the relay has done nothing wrong."""
    make = one_volunteer(3)
    async with endpoints(5, kind=kind, clients=[0, 1, 2], make=make) as (one, leaver, third, *relays):
        await let_relay([one, leaver, third], relays)
        await echoed(one, leaver)
        way = one.way_to(leaver.peer_id)
        assert way == relayed_by(relays[0].peer_id)
        await leaver.close()
        await until(lambda: not one.is_connected(leaver.peer_id), "the goodbye has come")
        await echoed(one, third)
        assert one.way_to(third.peer_id) == way


async def meet_through(relay: WatchedEndpoint, client: WatchedEndpoint, listening: WatchedEndpoint) -> None:
    """Connect both to the relay; the client knows only a wrong address of the other one, which is all it announces."""
    bound = listening.addresses[0]
    listening.announce([Address.of("127.0.0.1", free_port())])
    client.learn(listening.peer_id, listening.addresses)
    await client.connect(relay.addresses[0])
    await relay.connect(bound)


@asynccontextmanager
async def relayed_pair() -> AsyncIterator[tuple[WatchedEndpoint, WatchedEndpoint, WatchedEndpoint, Address]]:
    """A client, its relay, the peer that it reaches so, and where that one listens, which the client does not know."""
    async with endpoints(3, kind="tls", clients=[0], are_acquainted=False) as (client, relay, listening):
        seems_symmetric(client)
        serve_echo(listening)
        bound = listening.addresses[0]
        await meet_through(relay, client, listening)
        assert await echoed(client, listening)
        assert client.way_to(listening.peer_id) == relayed_by(relay.peer_id)
        yield client, relay, listening, bound


async def test_a_relayed_connection_to_a_peer_that_can_be_dialled_by_now_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that was down, or not in reach, when it was dialled."""
    monkeypatch.setattr(punched_streams, "PAUSES_S", (0.05,))
    async with relayed_pair() as (client, relay, listening, bound):
        await client.listen([Address.of("127.0.0.1", 0)])
        client.set_client_mode(is_on=False)
        client.learn(listening.peer_id, [bound])
        await until(lambda: client.way_to(listening.peer_id) == DIRECT, "the client has dialled")
        assert not listening.is_client(client.peer_id), "it says what it announces now"
        await relay.close()
        assert await echoed(client, listening)


async def test_a_relayed_peer_that_announces_an_address_is_dialled_there_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that has become an ordinary peer, or has moved: the attempts before were in vain."""
    monkeypatch.setattr(punched_streams, "PAUSES_S", (600.0,))
    async with relayed_pair() as (client, _, listening, bound):
        listening.announce([bound])
        await until(lambda: client.way_to(listening.peer_id) == DIRECT, "the client has dialled")


async def test_a_second_announcement_of_a_relayed_peer_has_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the one that matters, as of a router that has mapped the port. But a peer could announce for ever."""
    monkeypatch.setattr(punched_streams, "PAUSES_S", (600.0,))
    monkeypatch.setattr(punched_streams, "EARLY_PERIOD_S", 1.0)
    async with relayed_pair() as (client, _, listening, bound):
        began = asyncio.get_running_loop().time()
        wrong = Address.of("127.0.0.1", free_port())
        listening.announce([wrong])
        await until(lambda: client.addresses_of(listening.peer_id)[0].port == wrong.port, "the client was told")
        listening.announce([bound])
        await until(lambda: client.way_to(listening.peer_id) == DIRECT, "the client has dialled")
        assert asyncio.get_running_loop().time() - began >= 1.0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_can_dial_only_one_peer_reaches_the_others_through_it(kind: str) -> None:
    """As behind a firewall that lets connections to port 443 out."""
    async with endpoints(3, kind=kind, clients=[0], config=VOLUNTEER, are_acquainted=False) as swarm:
        client, relay, listening = swarm
        serve_echo(client)
        seems_symmetric(client)
        serve_echo(listening)
        listening.accept_bulk("echo", send_back)
        client.accept_bulk("echo", send_back)
        await meet_through(relay, client, listening)
        assert await echoed(client, listening)
        assert await echoed(listening, client)
        for here, there in ((client, listening), (listening, client)):
            stream = await here.open_bulk(there.peer_id, "echo", b"3")
            received = bytearray(3)
            await asyncio.gather(stream.send(b"abc"), stream.receive_into(memoryview(received)))
            here.release(stream)
            assert received == b"abc"
        assert client.way_to(listening.peer_id) == relayed_by(relay.peer_id)
        assert relay.counters["relayed_streams"] == 3


async def test_the_error_says_that_the_relay_is_no_volunteer_also_where_the_other_peer_has_addresses() -> None:
    """Else people look for what is wrong with these addresses."""
    async with endpoints(3, kind="tls", clients=[0], are_acquainted=False) as (client, relay, listening):
        seems_symmetric(client)
        listening.accept_bulk("echo", send_back)
        bound = listening.addresses[0]
        listening.announce([Address.of("127.0.0.1", free_port())])
        client.learn(listening.peer_id, listening.addresses)
        await client.connect(relay.addresses[0])
        await relay.connect(bound)
        with pytest.raises(
            Unavailable, match=r"this peer relays no bulk data; started with --relay.*connection refused"
        ):
            await client.open_bulk(listening.peer_id, "echo", b"3")


@pytest.mark.parametrize("kind", KINDS)
async def test_the_first_stream_to_a_peer_that_cannot_be_dialled_may_be_a_bulk_stream(kind: str) -> None:
    async with endpoints(3, kind=kind, clients=[0], config=VOLUNTEER, are_acquainted=False) as swarm:
        client, relay, listening = swarm
        seems_symmetric(client)
        listening.accept_bulk("echo", send_back)
        client.learn(listening.peer_id, [Address.of("127.0.0.1", free_port())])
        await client.connect(relay.addresses[0])
        await relay.connect(listening.addresses[0])
        stream = await client.open_bulk(listening.peer_id, "echo", b"3")
        received = bytearray(3)
        await asyncio.gather(stream.send(b"abc"), stream.receive_into(memoryview(received)))
        client.release(stream)
        assert received == b"abc"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_relay_cannot_pass_another_peer_off_as_the_target_and_nothing_of_the_attempt_stays(kind: str) -> None:
    async with endpoints(4, kind=kind, clients=[0, 1, 3], config=VOLUNTEER) as (one, other, relay, third):
        for client in (one, other, third):
            seems_symmetric(client)
            await client.call_on(relay.peer_id, 5.0)
        honest = relay.wire.forward

        async def to_third(from_one: Stream, to_other: Stream, chunk_bytes: int, pay: Pay) -> None:
            to_other.abort()
            to_third = await relay.open_bulk(third.peer_id, RELAYED, b"")
            try:
                await honest(from_one, to_third, chunk_bytes, pay)
            finally:
                relay.release(to_third)

        relay.wire.forward = to_third  # type: ignore[method-assign]
        before = one.num_streams, relay.num_streams
        with pytest.raises(Unavailable, match=f"found {third.peer_id}"):
            await one.call_on(other.peer_id, 5.0)
        assert one.num_streams == before[0]
        await until(lambda: relay.num_streams == before[1], "the relay forwards nothing")


async def answer_of(relay: Endpoint, header: bytes, number: int = 50, kind: str = "tls") -> Reject:
    """What a relay answers to a stranger's request."""
    transport = transport_of(number, kind, None)  # type: ignore[arg-type]
    stream = await transport.dial_bulk(relay.addresses[0], 5.0)
    try:
        await send_frame(stream, Hello(RELAY, header=header))
        answer = await receive_frame(stream)
    finally:
        stream.abort()
        transport.close()
    assert isinstance(answer, Reject)
    return answer


def header_for(peer_id: PeerId, *, is_bulk: bool = False) -> bytes:
    return msgspec.msgpack.encode(RelayRequest(peer_id, is_bulk))


async def test_a_relay_refuses_targets_that_it_is_not_connected_to() -> None:
    async with endpoints(1, kind="tls", config=VOLUNTEER) as [relay]:
        stranger = identity_of(51).peer_id
        relay.learn(stranger, [Address.of("203.0.113.1", 4000)])
        for target in (stranger, relay.peer_id, identity_of(50).peer_id):
            assert (await answer_of(relay, header_for(target))).code == "not_connected"
        assert relay.counters["refused_relays"] == 3


class Invited:
    """The gate of a run that knows some peers."""

    def __init__(self, *known: PeerId) -> None:
        self.known = known

    def check(self, peer_id: PeerId, *, for_observers: bool) -> None:
        if peer_id not in self.known:
            raise Refused(peer_id, "no_lease", "it was not invited")


async def test_in_a_run_by_invitation_a_relay_serves_its_members_alone() -> None:
    async with clients_and_relays("tls") as (one, other, [relay]):
        relay.gates["run"] = Invited(one.peer_id)  # type: ignore[assignment]
        with pytest.raises(Unavailable, match="relays for its members only"):
            await echoed(one, other)
        relay.gates["run"] = Invited(one.peer_id, other.peer_id)  # type: ignore[assignment]
        await asyncio.sleep(1.0)  # a failed dial is not repeated at once
        assert await echoed(one, other)


async def test_a_request_that_cannot_be_read_is_a_violation() -> None:
    async with endpoints(1, kind="tls", config=VOLUNTEER) as [relay]:
        with pytest.raises(Unavailable):
            await answer_of(relay, b"\xc1")
        assert relay.counters["protocol_violations"] == 1


async def test_one_pair_has_a_limited_number_of_relayed_streams_and_they_are_counted_until_they_end() -> None:
    async with clients_and_relays("tls") as (one, other, _):
        other.accept_bulk("echo", send_back)
        await one.call_on(other.peer_id, 5.0)
        streams = [await one.open_bulk(other.peer_id, "echo", b"3") for _ in range(MAX_OF_ONE_PAIR - 1)]
        with pytest.raises(Unavailable, match=f"{MAX_OF_ONE_PAIR} for this pair"):
            await one.open_bulk(other.peer_id, "echo", b"3")
        one.release(streams.pop())
        async with time_limit(PATIENCE_S, "until the stream has ended at the relay, and counts no more"):
            while len(streams) < MAX_OF_ONE_PAIR - 1:
                with suppress(Unavailable):
                    streams.append(await one.open_bulk(other.peer_id, "echo", b"3"))
        for stream in streams:
            one.release(stream)


async def test_volunteers_are_asked_first() -> None:
    """Although one of the others is likely to be nearer."""
    make = one_volunteer(2)  # the first to be connected, when all is slower
    async with endpoints(8, kind="tls", clients=[0, 1], make=make) as (one, other, *relays):
        volunteer = relays[0]
        await let_relay([one, other], relays)
        assert await echoed(one, other)
        assert one.way_to(other.peer_id) == relayed_by(volunteer.peer_id)
        assert one.carries_bulk(other.peer_id)


async def test_a_relay_keeps_to_its_rate() -> None:
    """2 Mbit/s: 500 KB take 2 s, less the burst of a tenth of a second."""
    async with clients_and_relays("tls", config=RpcConfig(relay_mbit_s=2.0)) as (one, other, _):
        other.accept_bulk("echo", send_back)
        await one.call_on(other.peer_id, 5.0)
        stream = await one.open_bulk(other.peer_id, "echo", b"500000")
        began = asyncio.get_running_loop().time()
        await stream.send(bytes(500_000))
        await stream.receive_into(memoryview(bytearray(1)))
        one.release(stream)
        assert asyncio.get_running_loop().time() - began > 1.8


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
async def test_many_streams_of_one_address_leave_another_one_its_part_of_the_rate() -> None:
    """Peer ids cost nothing, so a relay does not count by them."""
    config = RpcConfig(relay_mbit_s=10.0)
    async with endpoints(7, kind="tls", clients=range(6), config=config, are_acquainted=False) as (*clients, relay):
        one, greedy, *others = clients
        await relay.listen([Address.of("::1", 0)])
        for client in clients:
            family = "ip6" if client is greedy else "ip4"
            client.learn(relay.peer_id, [place for place in relay.bound_addresses if place.protocol == family])
        await let_relay(clients, [relay])
        assert (relay.host_of(one.peer_id), relay.host_of(greedy.peer_id)) == ("127.0.0.1", "::1")
        for other in others:
            other.accept_bulk("echo", send_back)
        streams = [await greedy.open_bulk(other.peer_id, "echo", b"5000000") for other in others]
        stream = await one.open_bulk(others[0].peer_id, "echo", b"1000000")
        sending = [asyncio.ensure_future(greedy_stream.send(bytes(5_000_000))) for greedy_stream in streams]
        before = relay.counters["relayed_bytes"]
        await stream.send(bytes(1_000_000))
        await stream.receive_into(memoryview(bytearray(1)))
        assert relay.counters["relayed_bytes"] - before < 3_500_000, "half would be 2 MB, a fifth 5 MB"
        for greedy_stream in streams:
            greedy.release(greedy_stream)
        one.release(stream)
        await asyncio.gather(*sending, return_exceptions=True)


async def test_the_round_trip_through_a_relay_is_that_to_the_other_end() -> None:
    async with clients_and_relays("tls") as (one, other, [relay]):
        forward = relay.wire.forward

        async def late(from_one: Stream, to_other: Stream, chunk_bytes: int, pay: Pay) -> None:
            async def pay_late(num_bytes: int) -> None:
                await asyncio.sleep(0.02)
                await pay(num_bytes)

            await forward(from_one, to_other, chunk_bytes, pay_late)

        relay.wire.forward = late  # type: ignore[method-assign]
        assert await echoed(one, other)
        assert one.rtt_s(other.peer_id) > 0.04


async def test_closing_ends_what_a_relay_forwards() -> None:
    async with clients_and_relays("tls") as (one, other, [relay]):
        await echoed(one, other)
        await relay.close()
        await until(lambda: not one.is_connected(other.peer_id), "the relayed connection is lost")
        await until(lambda: not other.is_connected(one.peer_id), "the relayed connection is lost")


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_rate_of_nothing_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="relay_mbit_s"):
        RpcConfig(relay_mbit_s=rate)
