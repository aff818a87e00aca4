"""What one attacker, or many of them, may take of a peer has limits: connections, handshakes, what waits for them."""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack, suppress

import psutil
import pytest

from manyhands.base.errors import PeerLost, Unavailable
from manyhands.rpc import RpcConfig
from manyhands.rpc.frames import CONTROL, Hello, Response, encode_frame, receive_frame, send_frame
from manyhands.transport.admission import ListenLimits
from tests.integration.siege import FAST, KINDS, TLS_RECORD, Siege, hung_up, raw_socket, request, siege
from tests.network import LOOPBACK, PATIENCE_S, identity_of, next_frame, until

MAX_CONNECTIONS_OF_ONE_PEER = 32


async def listen_within(scene: Siege, limits: ListenLimits) -> None:
    """From now on the attacker comes to another port of the same peer, with limits of its own."""
    scene.there.wire.transport.limits = limits  # type: ignore[attr-defined]
    await scene.there.listen([LOOPBACK])
    scene.address = scene.there.addresses[-1]
    scene.expect_sockets(+1)


# connections


@pytest.mark.parametrize("kind", KINDS)
async def test_a_peer_that_reads_nothing_is_dropped(kind: str) -> None:
    """However alive it is otherwise: what waits for it would only grow."""
    async with siege(kind, FAST) as scene:
        stream = await scene.connect()
        with pytest.raises(PeerLost):  # noqa: PT012 (any of the many)
            for number in range(20_000):
                await asyncio.wait_for(stream.send(encode_frame(request(number, "x" * 20_000))), PATIENCE_S)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_connections_of_all_peers_together_have_a_limit(kind: str) -> None:
    """Who is idle makes room; the honest peer, which is not, stays."""
    async with siege(kind, RpcConfig(max_connections=8)) as scene:
        for number in range(40):
            with suppress(Unavailable, AssertionError):
                await scene.connect(identity_of(100 + number))
        await scene.served(5)
        num_open = sum(scene.there.is_connected(identity_of(100 + number).peer_id) for number in range(40))
        assert num_open < 8


@pytest.mark.parametrize("kind", KINDS)
async def test_the_connections_of_one_peer_have_a_limit(kind: str) -> None:
    async with siege(kind) as scene:
        streams = [await scene.dial() for _ in range(3 * MAX_CONNECTIONS_OF_ONE_PEER)]
        num_open = 0
        for stream in streams:
            with suppress(PeerLost):
                await send_frame(stream, Hello(CONTROL))
                await receive_frame(stream)
        for stream in streams:
            with suppress(PeerLost):
                await send_frame(stream, request(1))
                await next_frame(stream, Response)
                num_open += 1
        assert num_open <= MAX_CONNECTIONS_OF_ONE_PEER


# handshakes


async def test_a_handshake_in_single_bytes_is_not_waited_for() -> None:
    loop = asyncio.get_running_loop()
    async with siege("tls") as scene:
        await listen_within(scene, ListenLimits(handshake_timeout_s=0.4))
        with ExitStack() as sockets:
            raw = [sockets.enter_context(raw_socket(scene.where)) for _ in range(10)]
            for byte in TLS_RECORD:
                for sock in raw:
                    with suppress(ConnectionError):
                        await loop.sock_sendall(sock, bytes([byte]))
                await asyncio.sleep(0.05)
            await asyncio.gather(*(hung_up(sock) for sock in raw))


@pytest.mark.parametrize("limits", [ListenLimits(max_handshakes=20), ListenLimits(max_handshakes_per_host=20)])
async def test_silent_connections_from_one_address_keep_nobody_out(limits: ListenLimits) -> None:
    """Behind a tunnel all peers come from one address; a handshake may take 5 s, and a newcomer waits for none."""
    async with siege("tls") as scene:
        await listen_within(scene, limits)
        with ExitStack() as sockets:
            raw = [sockets.enter_context(raw_socket(scene.where)) for _ in range(30)]
            stream = await asyncio.wait_for(scene.connect(), 4.0)
            await send_frame(stream, request(1))
            await asyncio.wait_for(next_frame(stream, Response), 4.0)
            await asyncio.gather(*(hung_up(sock) for sock in raw[:10]))  # the oldest


async def test_half_open_handshakes_end_and_hold_up_nobody() -> None:
    async with siege("tls") as scene:
        await listen_within(scene, ListenLimits(handshake_timeout_s=0.5, max_handshakes=60, max_handshakes_per_host=50))
        with ExitStack() as sockets:
            raw = [sockets.enter_context(raw_socket(scene.where)) for _ in range(50)]
            await asyncio.sleep(0.1)
            await asyncio.gather(*(hung_up(sock) for sock in raw))
        stream = await scene.connect()  # who behaves for once
        await send_frame(stream, request(1))
        await next_frame(stream, Response)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
async def test_half_open_handshakes_of_one_host_leave_room_for_a_newcomer_from_another() -> None:
    """While they last, which is as long as a handshake may."""
    async with siege("tls") as scene:
        await listen_within(scene, ListenLimits(max_handshakes=64, max_handshakes_per_host=32))
        with ExitStack() as sockets:
            for _ in range(200):
                sockets.enter_context(raw_socket(scene.where, source="127.0.0.2"))
                await asyncio.sleep(0.001)  # for the other end to accept it
            await scene.served(5)
            await until(lambda: num_accepted(scene.where[1]) <= 32, "the oldest closed")
            stream = await asyncio.wait_for(scene.connect(), 4.0)
            await send_frame(stream, request(1))
            await asyncio.wait_for(next_frame(stream, Response), 4.0)


async def test_the_streams_of_one_host_have_a_limit_and_make_room_when_they_end() -> None:
    async with siege("tls") as scene:
        await listen_within(scene, ListenLimits(max_streams_per_host=10))
        for number in range(20):
            with suppress(Unavailable):
                await scene.connect(identity_of(100 + number))
        assert num_accepted(scene.where[1]) <= 10
        scene.leave()
        await asyncio.sleep(0.1)
        stream = await scene.connect()
        await send_frame(stream, request(1))
        await next_frame(stream, Response)


def num_accepted(port: int) -> int:
    """Connections to a port of this process that have been accepted and are open."""
    return sum(
        connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == port
        for connection in psutil.Process().net_connections("tcp")
    )
