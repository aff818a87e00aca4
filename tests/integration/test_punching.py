"""Two peers that cannot dial each other both dial at the same time, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from manyhands.base.address import Address
from manyhands.base.errors import DialFailed, DialReason, Refused
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint, RpcConfig, dial_rules, punched_streams
from manyhands.rpc.outside import OutsideView
from manyhands.rpc.punched_streams import PUNCH, PunchRequest
from manyhands.rpc.ways import PUNCHED, relayed_by
from manyhands.transport import Stream, TlsTransport, tcp
from manyhands.transport.api import Port
from tests.integration.test_interfaces import UNSHARE, has_namespaces
from tests.integration.test_relays import VOLUNTEER, clients_and_relays, echoed, seems_symmetric, send_back
from tests.network import endpoints, free_port, identity_of, serve_echo, until
from tests.wire import WatchedEndpoint


@asynccontextmanager
async def punched_pair(
    config: RpcConfig | None = None,
) -> AsyncIterator[tuple[WatchedEndpoint, WatchedEndpoint, WatchedEndpoint]]:
    """Two clients that met through a relay and are connected without it now, and the relay."""
    async with endpoints(3, kind="tls", clients=[0, 1], config=config) as (one, other, relay):
        for client in (one, other):
            serve_echo(client)
            client.accept_bulk("echo", send_back)
            await client.call_on(relay.peer_id, 5.0)
        assert await echoed(one, other)
        await until(lambda: one.way_to(other.peer_id) == PUNCHED, "the two are connected without the relay")
        yield one, other, relay


def seems_to_keep_ports(client: Endpoint) -> None:
    """Make it believe that no router is before it, and that the others see it at a loopback address."""
    for number in range(100, 108):
        client.outside.note(identity_of(number).peer_id, ("127.0.0.1", 4000), ("127.0.0.1", 4000))


class PortOfMemory:
    """A port, for a transport that has none."""

    number = 5000

    def close(self) -> None:
        pass


def places_dialled(one: Endpoint, other: WatchedEndpoint) -> Callable[..., Awaitable[list[str]]]:
    """A function that asks another endpoint to connect to some places; returns those that it would connect to."""
    told: asyncio.Queue[list[str]] = asyncio.Queue()

    async def tell(port: Port, places: Sequence[Address], peer_id: PeerId, timeout_s: float) -> Stream:
        told.put_nowait([str(place) for place in places])
        raise DialFailed(f"peer {peer_id}", DialReason.REFUSED)

    async def dialled(*places: str) -> list[str]:
        await one.call(other.peer_id, PUNCH, PunchRequest(list(places)))
        return await told.get()

    other.wire.take_port = PortOfMemory  # type: ignore[method-assign,assignment]
    other.wire.accept_from = tell  # type: ignore[method-assign]
    return dialled


async def test_a_relayed_connection_is_replaced_by_a_punched_one() -> None:
    async with punched_pair() as (one, other, relay):
        assert other.way_to(one.peer_id) == PUNCHED
        assert await echoed(one, other)
        assert await echoed(other, one)
        await until(lambda: one.num_streams == 2, "the relayed connection has ended")
        await relay.close()
        assert await echoed(one, other)


async def test_bulk_streams_of_a_punched_pair_are_punched_too_in_both_directions() -> None:
    data = bytes(range(256)) * 4000
    async with punched_pair() as (one, other, relay):
        for here, there in ((one, other), (other, one)):
            stream = await here.open_bulk(there.peer_id, "echo", str(len(data)).encode())
            received = bytearray(len(data))
            await asyncio.gather(stream.send(data), stream.receive_into(memoryview(received)))
            here.release(stream)
            assert received == data
        assert relay.counters["relayed_streams"] == 1, "only the first control stream"
        assert one.counters["punched_streams"] == 2
        assert other.counters["punched_streams"] == 1


async def test_a_peer_behind_a_symmetric_router_stays_relayed_and_is_not_tried() -> None:
    async with endpoints(3, kind="tls", clients=[0, 1]) as (one, other, relay):
        for client in (one, other):
            serve_echo(client)
            await client.call_on(relay.peer_id, 5.0)
        seems_symmetric(other)
        assert await echoed(one, other)
        await until(lambda: one.counters["punches_failed"] == 2, "two attempts were refused")
        assert one.way_to(other.peer_id) == relayed_by(relay.peer_id)


@pytest.mark.parametrize(
    ("reason", "seen_at", "obstacle"),
    [
        (DialReason.UNREACHABLE, "30.0.0.9", "a router refuses what it does not expect"),
        (DialReason.TIMED_OUT, "30.0.0.9", "no answer: a router drops"),
        (DialReason.TIMED_OUT, "30.0.0.1", "both are behind one router"),
    ],
)
async def test_what_stands_in_the_way_of_a_relayed_pair_is_known(
    reason: DialReason, seen_at: str, obstacle: str
) -> None:
    async with endpoints(3, kind="tls", clients=[0, 1]) as (one, other, relay):
        for client in (one, other):
            serve_echo(client)
            await client.call_on(relay.peer_id, 5.0)
        for client, host in ((one, "30.0.0.1"), (other, seen_at)):
            for number in range(100, 108):
                client.outside.note(identity_of(number).peer_id, (host, 4000), ("192.168.1.2", 4000))

        async def fail(port: Port, places: Sequence[Address], peer_id: PeerId, *_: object, **__: object) -> Stream:
            port.close()
            raise DialFailed(f"peer {peer_id}", reason)

        one.wire.dial_from = fail  # type: ignore[method-assign]
        assert await echoed(one, other)
        await until(lambda: one.counters["punches_failed"] > 0, "an attempt has failed")
        assert one.obstacle_to(other.peer_id).startswith(obstacle)
        assert one.obstacle_to(relay.peer_id) == ""


async def test_another_peer_at_the_named_place_is_not_taken_for_the_target() -> None:
    """A liar names the place of a peer that connects from there: its identity does not fit."""
    transports = [TlsTransport(identity_of(number)) for number in range(3)]
    caller, liar, _ = transports
    ports = [transport.take_port() for transport in transports[:2]]
    places = [Address.of("127.0.0.1", port.number) for port in ports]
    accepting = asyncio.ensure_future(liar.accept_from(ports[1], [places[0]], caller.identity.peer_id, 2.0))
    with pytest.raises(DialFailed, match=f"found {liar.identity.peer_id}"):
        await caller.dial_from(ports[0], [places[1]], identity_of(2).peer_id, 2.0, is_bulk=False)
    (await accepting).abort()
    for transport in transports:
        transport.close()


async def test_a_router_that_answers_that_it_refuses_does_not_end_the_attempt() -> None:
    """Some refuse what their machine has not asked for yet, in place of dropping it; the other end comes later."""
    transports = [TlsTransport(identity_of(number)) for number in range(2)]
    caller, target = transports
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refusing = Address.of("127.0.0.1", closed.getsockname()[1])
    ports = [transport.take_port() for transport in transports]
    dialling = caller.dial_from(ports[0], [refusing], target.identity.peer_id, 5.0, is_bulk=False)
    dialled = asyncio.ensure_future(dialling)
    await asyncio.sleep(0.05)
    assert not dialled.done()
    places = [Address.of("127.0.0.1", ports[0].number)]
    accepted = await target.accept_from(ports[1], places, caller.identity.peer_id, 5.0)
    assert (await dialled).remote == target.identity.peer_id
    for one in (accepted, dialled.result()):
        one.abort()
    for transport in transports:
        transport.close()


async def test_an_attempt_without_the_other_end_fails_in_time() -> None:
    transport = TlsTransport(identity_of(0))
    port = transport.take_port()
    began = asyncio.get_running_loop().time()
    with pytest.raises(DialFailed, match="timed out"):
        await transport.dial_from(port, [Address.of("127.0.0.1", 9)], identity_of(1).peer_id, 0.3, is_bulk=True)
    assert asyncio.get_running_loop().time() - began < 2.0
    with socket.create_server(("127.0.0.1", port.number)):
        pass  # the port is free again
    transport.close()


async def test_a_closed_port_leaves_nothing_in_the_event_loop() -> None:
    """The next socket gets its file descriptor, perhaps before the attempts have seen that they are cancelled."""
    loop = asyncio.get_running_loop()
    port = tcp.TcpPort()
    attempts = [asyncio.ensure_future(attempt) for attempt in port.connections([])]
    await asyncio.sleep(0.01)
    port.close()
    pairs = [socket.socketpair() for _ in attempts]
    for one, other in pairs:
        one.setblocking(False)
        other.send(b"hello")
        assert await loop.sock_recv(one, 5) == b"hello"
    receiving = asyncio.ensure_future(loop.sock_recv(pairs[0][0], 5))
    await asyncio.sleep(0)
    for attempt in attempts:
        attempt.cancel()
    await asyncio.wait(attempts)
    pairs[0][1].send(b"again")
    assert await asyncio.wait_for(receiving, 1.0) == b"again"
    for pair in pairs:
        for sock in pair:
            sock.close()


async def test_places_that_may_not_be_dialled_are_refused() -> None:
    async with clients_and_relays("tls", config=RpcConfig()) as (one, other, _):
        await one.call_on(other.peer_id, 5.0)
        seems_to_keep_ports(other)
        for place in (
            "/ip4/127.0.0.1/tcp/22",
            "/ip4/169.254.169.254/tcp/8000",
            "/dns4/example.org/tcp/443",
            "nonsense",
        ):
            with pytest.raises(Refused, match="may be dialled"):
                await one.call(other.peer_id, PUNCH, PunchRequest([place]))


async def test_inside_places_are_dialled_only_if_both_peers_are_in_one_network() -> None:
    async with endpoints(2) as (one, other):
        await other.listen([Address.of("192.168.1.7", 4000)])
        other.outside.note(one.peer_id, ("30.0.0.9", 4000), ("192.168.1.7", 4000))
        inside, outside = "/ip4/192.168.1.1/tcp/8080", "/ip4/30.0.0.9/tcp/5000"
        dialled = places_dialled(one, other)
        assert await dialled("/ip4/30.0.0.8/tcp/5000", inside) == ["/ip4/30.0.0.8/tcp/5000"], "behind another router"
        with pytest.raises(Refused, match="may be dialled"):
            await dialled(inside)
        assert await dialled(outside, inside) == [outside, inside], "behind the same router"
        other.outside.note(one.peer_id, ("192.168.1.7", 4000), ("192.168.1.7", 4000))
        assert await dialled(inside) == [inside], "both are seen in that network"


async def test_places_are_not_dialled_more_often_than_addresses_that_others_name() -> None:
    async with endpoints(2) as (one, other):
        other.outside.note(one.peer_id, ("30.0.0.9", 4000), ("192.168.1.7", 4000))
        dialled = places_dialled(one, other)
        for _ in range(dial_rules.HEARD_BURST_OF_HOST):
            assert await dialled("/ip4/30.0.0.1/tcp/80")
        with pytest.raises(Refused, match="may be dialled"):
            await dialled("/ip4/30.0.0.1/tcp/80")


async def test_a_target_makes_a_limited_number_of_attempts_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(punched_streams, "MAX_UNDER_WAY", 3)
    monkeypatch.setattr(punched_streams, "CONNECT_TIMEOUT_S", 1.0)
    async with clients_and_relays("tls", config=RpcConfig()) as (one, other, _):
        await one.call_on(other.peer_id, 5.0)
        seems_to_keep_ports(other)
        request = PunchRequest([f"/ip4/127.0.0.1/tcp/{free_port()}"])
        for _ in range(2):
            asked = (one.call(other.peer_id, PUNCH, request) for _ in range(20))  # in one read
            refused = [one for one in await asyncio.gather(*asked, return_exceptions=True) if isinstance(one, Refused)]
            assert len(refused) == 17
            assert all("3 such attempts already" in str(one) for one in refused)
            await until(lambda: not num_attempts(), "they are over")


def num_attempts() -> int:
    """Of all endpoints here that another one has asked for."""
    return sum("connecting at the same time" in task.get_name() for task in asyncio.all_tasks())


async def test_a_relayed_pair_tries_again_at_once_when_the_router_is_known_to_keep_ports() -> None:
    async with endpoints(4, kind="tls", clients=[0, 1]) as (one, other, relay, last):
        for client in (one, other):
            serve_echo(client)
            await client.call_on(relay.peer_id, 5.0)
        seems_symmetric(one)
        assert await echoed(one, other)
        await asyncio.sleep(0.05)
        assert one.counters["punches_failed"] == 0, "it has not tried"
        for number in range(100, 104):  # as it joins another network, whose router keeps ports
            one.outside.note(identity_of(number).peer_id, ("127.0.0.1", 4000), ("127.0.0.1", 4000))
        assert not one.outside.is_known
        await one.call_on(last.peer_id, 5.0)  # which sees it too: now most have seen that
        assert one.outside.is_known
        await until(lambda: one.way_to(other.peer_id) == PUNCHED, "the two are connected without the relay", 0.9)


async def test_a_pair_tries_again_at_once_if_one_has_moved_during_a_vain_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(punched_streams, "PAUSES_S", (600.0,))
    async with endpoints(4, kind="tls", clients=[0, 1]) as (one, other, relay, last):
        for client in (one, other):
            serve_echo(client)
        one.outside.note(identity_of(100).peer_id, ("192.168.0.9", 4000), ("192.168.0.2", 4000))
        for client in (one, other):
            await client.call_on(relay.peer_id, 5.0)
        has_begun = asyncio.Event()
        accept_from = other.wire.accept_from

        async def not_at_first(port: Port, places: Sequence[Address], peer_id: PeerId, timeout_s: float) -> Stream:
            other.wire.accept_from = accept_from  # type: ignore[method-assign]
            has_begun.set()
            await asyncio.sleep(timeout_s)  # its port takes connections meanwhile, and says nothing
            raise DialFailed(f"peer {peer_id}", DialReason.TIMED_OUT)

        other.wire.accept_from = not_at_first  # type: ignore[method-assign]
        assert await echoed(one, other)
        await has_begun.wait()
        router = one.outside.router
        await one.call_on(last.peer_id, 5.0)  # now most see it without a router
        assert one.outside.router != router
        assert one.counters["punches_failed"] == 0, "the attempt goes on"
        await until(lambda: one.way_to(other.peer_id) == PUNCHED, "the two are connected without the relay")


async def test_a_bulk_stream_that_the_other_end_refuses_to_punch_goes_through_a_relay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many streams of one group begin at the same time."""
    async with punched_pair(VOLUNTEER) as (one, other, _):
        monkeypatch.setattr(punched_streams, "MAX_UNDER_WAY", 0)
        stream = await one.open_bulk(other.peer_id, "echo", b"3")
        await stream.send(b"abc")
        answer = bytearray(3)
        await stream.receive_into(memoryview(answer))
        assert answer == b"abc"
        one.release(stream)
        assert other.counters["refused_punches"] == 1


def test_a_new_address_of_the_router_counts_as_soon_as_one_peer_sees_it() -> None:
    view = OutsideView()
    one, other, third = (identity_of(number).peer_id for number in range(1, 4))
    for peer_id in (one, other):
        view.note(peer_id, ("30.0.0.9", 4000), ("192.168.0.2", 4000))
    for peer_id in (one, other):  # the connections are lost
        view.forget(peer_id)
    assert view.hosts == ["30.0.0.9"], "the last one is better than none"
    assert view.note(third, ("31.0.0.1", 4000), ("192.168.0.2", 4000))
    assert view.hosts == ["31.0.0.1"]


def test_to_forget_a_view_is_news_if_another_address_is_that_of_most_then() -> None:
    view = OutsideView()
    one, other, third, last = (identity_of(number).peer_id for number in range(1, 5))
    for peer_id in (one, other):
        view.note(peer_id, ("30.0.0.9", 4000), ("192.168.0.2", 4000))
    assert not view.note(third, ("31.0.0.1", 4000), ("192.168.0.2", 4000))
    assert not view.forget(last)
    assert view.forget(one)
    assert view.hosts == ["31.0.0.1"]


def test_the_view_of_one_neighbour_does_not_outweigh_that_of_one_peer_outside() -> None:
    view = OutsideView()
    view.note(identity_of(1).peer_id, ("30.0.0.9", 4000), ("192.168.0.2", 4000))
    view.note(identity_of(2).peer_id, ("192.168.0.2", 4000), ("192.168.0.2", 4000))
    assert view.hosts == ["30.0.0.9"]


async def test_the_view_of_a_lost_peer_is_forgotten() -> None:
    old, new = "30.0.0.9", "31.0.0.1"
    async with endpoints(3, kind="tls", clients=[0]) as (one, lost, last):
        await one.call_on(lost.peer_id, 5.0)
        for peer_id in (identity_of(100).peer_id, lost.peer_id):
            one.outside.note(peer_id, (old, 4000), ("192.168.0.2", 4000))
        lost.wire.abort_all()
        await until(lambda: not one.is_connected(lost.peer_id), "the connection is lost")
        one.outside.note(last.peer_id, (new, 4000), ("192.168.0.2", 4000))
        assert one.outside.hosts == [new]


def test_the_kind_of_router_is_what_most_others_see() -> None:
    view = OutsideView()
    peers = [identity_of(number).peer_id for number in range(1, 10)]
    assert view.router == "unknown"
    assert view.note(peers[0], ("30.0.0.1", 4000), ("30.0.0.1", 4000))
    assert view.router == "none"
    assert view.note(peers[0], ("30.0.0.9", 4000), ("192.168.0.2", 4000))
    assert view.router == "port-preserving"
    assert not view.note(peers[1], ("30.0.0.9", 4001), ("192.168.0.2", 4001))
    assert not view.note(peers[2], ("31.0.0.1", 80), ("192.168.0.2", 4002)), "it is behind a tunnel"
    assert view.router == "port-preserving"
    assert view.hosts == ["30.0.0.9"]
    for peer_id in peers[3:6]:
        view.note(peer_id, ("30.0.0.9", 5123), ("192.168.0.2", 4003))
    assert view.router == "symmetric"


IP6 = "2a01:4f8::2"


def test_the_router_for_ipv4_says_nothing_of_ipv6() -> None:
    """Behind a symmetric router, a peer with a global IPv6 address knows where its connections come from."""
    view = OutsideView()
    peers = [identity_of(number).peer_id for number in range(1, 10)]
    for peer_id in peers[:4]:
        view.note(peer_id, ("30.0.0.9", 5123), ("192.168.0.2", 4003))
    assert not view.is_known
    view.public_ip6 = lambda: IP6
    assert (view.router, view.hosts, view.known_hosts) == ("symmetric", ["30.0.0.9"], [IP6])
    for peer_id in peers[4:6]:
        assert view.note(peer_id, (IP6, 4000), (IP6, 4000)) is (peer_id == peers[4])
    assert (view.router, view.hosts, view.known_hosts) == ("symmetric", [IP6, "30.0.0.9"], [IP6])
    view.public_ip6 = lambda: ""
    assert view.known_hosts == [IP6], "as others see it"
    for peer_id in peers[4:8]:  # a router for IPv6, which is rare
        view.note(peer_id, ("2a01:4f8:1::7", 5123), ("fd00::2", 4003))
    assert not view.is_known


def test_ipv6_is_named_first() -> None:
    view = OutsideView(lambda: IP6)
    view.note(identity_of(1).peer_id, ("30.0.0.9", 4000), ("192.168.0.2", 4000))
    assert (view.router, view.known_hosts) == ("port-preserving", [IP6, "30.0.0.9"])


async def test_a_place_of_a_family_in_which_the_own_place_is_not_known_is_not_dialled() -> None:
    async with clients_and_relays("tls", config=RpcConfig()) as (one, other, _):
        await one.call_on(other.peer_id, 5.0)
        other.outside.public_ip6 = lambda: IP6  # and its router for IPv4 is symmetric
        with pytest.raises(Refused, match="may be dialled from here"):
            await one.call(other.peer_id, PUNCH, PunchRequest(["/ip4/30.0.0.7/tcp/4000"]))


TWO_ADDRESSES = """
set -e
ip link set lo up
ip addr add 2a01:4f8::2/128 dev lo
ip -6 route add default dev lo
exec "$@"
"""


async def meet_over_ipv6() -> None:
    """Print how two clients behind symmetric routers for IPv4 are connected in the end, and at which address."""
    async with endpoints(3, kind="tls", clients=[0, 1]) as (one, other, relay):
        for client in (one, other):
            seems_symmetric(client)
            client.outside.public_ip6 = tcp.public_ip6
            serve_echo(client)
            await client.call_on(relay.peer_id, 5.0)
        await echoed(one, other)
        await until(lambda: one.way_to(other.peer_id) == PUNCHED, "the two are connected without the relay")
        print(one.way_to(other.peer_id), one.host_of(other.peer_id))


@pytest.mark.skipif(not has_namespaces(), reason="no namespaces here")
def test_two_clients_behind_symmetric_routers_are_connected_over_ipv6() -> None:
    """On a machine with a global address; benchmarks/reach.py has the firewalls too."""
    code = "import asyncio; from tests.integration.test_punching import meet_over_ipv6; asyncio.run(meet_over_ipv6())"
    within = [*UNSHARE, "sh", "-c", TWO_ADDRESSES, "sh", sys.executable, "-c", code]
    output = subprocess.run(within, check=False, capture_output=True, text=True, timeout=60)
    assert output.stdout.split() == ["punched", IP6], output.stderr


@pytest.mark.parametrize("host", ["", "not an address", "127.0.0.1", "169.254.169.254", "224.0.0.1", "0.0.0.0"])
def test_hosts_that_cannot_be_this_machine_are_ignored(host: str) -> None:
    view = OutsideView()
    assert not view.note(identity_of(1).peer_id, (host, 4000), ("192.168.0.2", 4000))
    assert view.router == "unknown"
    assert view.hosts == []
