"""Bulk streams to a peer in client mode: it is asked for them over its control connection, and dials."""

from __future__ import annotations

import asyncio
import gc

import pytest

from manyhands.base.address import Address
from manyhands.base.errors import PeerLost, Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc import AddressSource, Endpoint, dialled_back_streams
from manyhands.rpc.dialled_back_streams import DIAL_BULK, MAX_OF_ONE_PEER, TOKEN_BYTES, DialRequest
from manyhands.transport import Stream
from tests.integration.test_transport import silent_port
from tests.network import ECHO, KINDS, Text, endpoints, free_port, serve_echo, until


def serve_data(endpoint: Endpoint, data: bytes) -> None:
    async def give(remote: PeerId, header: bytes, stream: Stream) -> None:
        assert header == b"please"
        await stream.send(data)
        await stream.close()

    endpoint.accept_bulk("data", give)


async def taken(here: Endpoint, there: Endpoint, num_bytes: int) -> bytes:
    stream = await here.open_bulk(there.peer_id, "data", b"please", size_bytes=num_bytes)
    target = bytearray(num_bytes)
    await stream.receive_into(memoryview(target))
    here.release(stream)
    return bytes(target)


async def move(here: Endpoint, there: Endpoint) -> None:
    """Have a peer announce an address where nobody answers to a connected one, which forgets where it was reached."""
    here.announce([Address.of("127.0.0.1", free_port())])
    await until(lambda: there.addresses_to_tell(here.peer_id) == here.addresses, "the other one is told")
    assert not there.reached_at(here.peer_id)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_opens_a_bulk_stream_to_a_connected_peer_that_asks(kind: str) -> None:
    async with endpoints(2, kind=kind, clients=[1]) as (here, client):
        data = bytes(range(256)) * 100
        serve_data(client, data)
        with pytest.raises(Unavailable, match="no address is known"):
            await taken(here, client, len(data))
        await client.call_on(here.peer_id, 5.0)
        await until(lambda: here.is_client(client.peer_id), "the host has the connection")
        assert await taken(here, client, len(data)) == data
        assert client.counters["asked_streams"] == 1
        assert not client.was_reached, "nobody has dialled it"


async def test_a_client_dials_several_connections_on_a_long_link() -> None:
    async with endpoints(2, kind="tls", clients=[1]) as (here, client):
        data = bytes(range(256)) * 16384
        serve_data(client, data)
        await client.call_on(here.peer_id, 5.0)
        await until(lambda: here.is_client(client.peer_id), "the host has the connection")
        here.rtt_s = lambda peer_id: 0.1  # type: ignore[method-assign]
        assert await taken(here, client, len(data)) == data
        assert client.counters["asked_streams"] > 1


async def test_a_client_refuses_bulk_of_an_unknown_purpose_on_a_stream_that_it_dialled() -> None:
    async with endpoints(2, kind="tls", clients=[1]) as (here, client):
        await client.call_on(here.peer_id, 5.0)
        await until(lambda: here.is_client(client.peer_id), "the host has the connection")
        with pytest.raises(Refused, match="unknown_purpose"):
            await here.open_bulk(client.peer_id, "data", b"")
        await until(lambda: client.num_streams == 1, "the stream is done with")


async def test_a_client_dials_back_only_the_asking_peer_at_an_address_where_it_reached_it() -> None:
    """Whatever addresses a peer announces: nobody has a client dial into the network that it is in."""
    async with endpoints(3, kind="tls", clients=[1]) as (here, client, victim):
        serve_echo(here)
        await client.call(here.peer_id, ECHO, Text("hi"))
        client.learn(here.peer_id, [address.with_peer(here.peer_id) for address in victim.addresses])
        await until(lambda: here.is_client(client.peer_id), "the host has the connection")
        serve_data(client, b"data")
        assert await taken(here, client, 4) == b"data"
        assert victim.num_connected_peers == 0
        assert not victim.was_reached
        await move(here, client)
        with pytest.raises(Refused, match="not_reached"):
            await here.open_bulk(client.peer_id, "data", b"please")
        assert client.counters["refused_asked_streams"] == 1


async def test_a_peer_that_asks_without_end_gets_a_limited_number_of_streams_at_a_time() -> None:
    async with endpoints(2, kind="tls", clients=[1]) as (here, client):
        held = asyncio.Event()

        async def hold(remote: PeerId, header: bytes, stream: Stream) -> None:
            await held.wait()

        client.accept_bulk("data", hold)
        await client.call_on(here.peer_id, 5.0)
        await until(lambda: here.is_client(client.peer_id), "the host has the connection")
        for _ in range(2):
            for _ in range(MAX_OF_ONE_PEER):
                await here.open_bulk(client.peer_id, "data", b"")
            with pytest.raises(Refused, match="busy"):
                await here.open_bulk(client.peer_id, "data", b"")
            held.set()
            await until(lambda: client.num_streams == 1, "they are done with")
            held.clear()


async def test_a_stream_that_nobody_has_asked_for_is_turned_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not count as one of the streams that the client serves."""
    monkeypatch.setattr(dialled_back_streams, "MAX_OF_ONE_PEER", 1)
    async with endpoints(2, kind="tls", clients=[1]) as (here, client):
        await client.call_on(here.peer_id, 5.0)
        await until(lambda: here.is_client(client.peer_id), "the host has the connection")
        for _ in range(2):
            with pytest.raises(Unavailable, match="no request waits for this stream"):
                await here.call(client.peer_id, DIAL_BULK, DialRequest(bytes(TOKEN_BYTES)))


async def test_a_peer_that_can_be_dialled_is_not_asked() -> None:
    async with endpoints(2, kind="tls") as (here, there):
        serve_data(there, b"data")
        await there.call_on(here.peer_id, 5.0)
        await until(lambda: here.is_connected(there.peer_id), "the host has the connection")
        assert await taken(here, there, 4) == b"data"
        assert there.counters["asked_streams"] == 0


async def test_a_peer_whose_announced_name_does_not_resolve_is_asked_to_dial() -> None:
    async with endpoints(2, kind="tls", are_acquainted=False) as (here, there):
        serve_data(there, b"data")
        there.announce([Address.parse("/dns4/no-such-host.invalid/tcp/31337")])
        await there.connect(here.addresses[0])
        await until(lambda: here.is_connected(there.peer_id), "the host has the connection")
        assert await taken(here, there, 4) == b"data"
        assert there.counters["asked_streams"] == 1


async def test_a_peer_that_does_not_dial_either_is_told_with_its_address() -> None:
    async with endpoints(2, kind="tls", are_acquainted=False) as (here, there):
        there.announce([Address.parse("/dns4/no-such-host.invalid/tcp/31337")])
        await there.connect(here.addresses[0])
        await until(lambda: here.is_connected(there.peer_id), "the host has the connection")
        await move(here, there)
        with pytest.raises(Unavailable, match=r"no-such-host\.invalid.*does not resolve"):
            await here.open_bulk(there.peer_id, "data", b"please")


async def test_a_client_that_does_not_dial_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with endpoints(2, kind="tls", clients=[1]) as (here, client):
        await client.call_on(here.peer_id, 5.0)
        await until(lambda: here.is_client(client.peer_id), "the host has the connection")
        monkeypatch.setattr(dialled_back_streams, "DIAL_TIMEOUT_S", 0.2)
        monkeypatch.setattr(dialled_back_streams, "MAX_OF_ONE_PEER", 1)
        await move(here, client)
        with silent_port(listens=True) as silent:
            client.learn(here.peer_id, [silent], AddressSource.WORKED)
            for _ in range(2):
                with pytest.raises(Unavailable, match="timed out"):
                    await here.open_bulk(client.peer_id, "data", b"", 1.0)


async def test_losing_the_client_during_its_dial_raises_peer_lost() -> None:
    async with endpoints(2, kind="tls", clients=[1]) as (here, client):
        await client.call_on(here.peer_id, 5.0)
        await until(lambda: here.is_client(client.peer_id), "the host has the connection")

        async def vanish(remote: PeerId, request: DialRequest) -> None:
            client.wire.abort_all()
            await asyncio.Event().wait()

        client.unhandle(DIAL_BULK)
        client.handle(DIAL_BULK, vanish)  # type: ignore[arg-type]
        with pytest.raises(PeerLost):
            await here.open_bulk(client.peer_id, "data", b"")


async def test_requests_that_fail_leave_nothing_in_memory() -> None:
    async with endpoints(2, kind="tls", clients=[1]) as (here, client):
        await client.call_on(here.peer_id, 5.0)
        await until(lambda: here.is_client(client.peer_id), "the host has the connection")

        async def refuse(remote: PeerId, request: DialRequest) -> None:
            raise Refused(remote, "busy", "not now")

        client.unhandle(DIAL_BULK)
        client.handle(DIAL_BULK, refuse)  # type: ignore[arg-type]
        before = num_futures()
        for _ in range(10):
            with pytest.raises(Refused):
                await here.open_bulk(client.peer_id, "data", b"")
        assert num_futures() < before + 10


def num_futures() -> int:
    gc.collect()
    return sum(type(thing) is asyncio.Future for thing in gc.get_objects())
