"""A peer that is sent garbage, half frames, huge lengths, single bytes or floods goes on serving the others."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from contextlib import suppress

import pytest

from manyhands.base.address import Address
from manyhands.base.errors import PeerLost
from manyhands.rpc.frames import (
    CONTROL,
    Hello,
    Ping,
    Reject,
    Welcome,
    encode_frame,
    receive_frame,
    send_frame,
)
from manyhands.transport import Stream
from tests.integration.siege import ATTACKER, FAST, KINDS, TLS_RECORD, ended, hung_up, raw_socket, request, siege
from tests.network import identity_of
from tests.sweeps import few_of
from tests.unit.rpc.test_frames import DEEP, framed, payload_of

SOME_NOISE = random.Random(5).randbytes(40_000)
HELLO = encode_frame(Hello(CONTROL))


async def drip(stream: Stream, data: bytes, pause_s: float) -> None:
    """Send single bytes, as long as the stream is there."""
    with suppress(PeerLost):
        for byte in data:
            await stream.send(bytes([byte]))
            await asyncio.sleep(pause_s)


# garbage


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        SOME_NOISE,
        TLS_RECORD + SOME_NOISE,
        b"\x00" * 50_000,
        b"\x15\x03\x03\x00\x02\x02\x28",
    ],
    ids=["http", "noise", "a broken client hello", "zeros", "an alert"],
)
async def test_a_peer_serves_others_through_garbage_instead_of_handshakes(sent: bytes) -> None:
    loop = asyncio.get_running_loop()
    async with siege("tls") as scene:
        for _ in range(10):
            with raw_socket(scene.where) as sock:
                with suppress(ConnectionError):
                    await loop.sock_sendall(sock, sent)
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_WR)
                await hung_up(sock)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x10\x00\x00" + b"\xff" * 10,
        framed(SOME_NOISE),
        framed(b"\x82\xa4type\xa5hello\xa7purpose" + DEEP),
        framed(b""),
        encode_frame(Ping()),
        encode_frame(Welcome()),
        HELLO + b"\xff\xff\xff\xff",
        HELLO + framed(SOME_NOISE),
        HELLO + framed(payload_of(type="ping", x="y").replace(b"\xa1y", DEEP)),
        HELLO + HELLO,
        HELLO + encode_frame(request(1)) + framed(b"\xc1"),
    ],
    ids=[
        "huge", "over the limit", "noise", "deep", "empty", "a ping", "a welcome",
        "hello, huge", "hello, noise", "hello, deep", "two hellos", "hello, a call, garbage",
    ],
)  # fmt: skip
async def test_garbage_after_the_handshake_is_counted_and_ends_the_stream(kind: str, sent: bytes) -> None:
    async with siege(kind) as scene:
        for number in range(3):
            stream = await scene.dial()
            await stream.send(sent)
            await ended(stream)
            await scene.counted("protocol_violations", number + 1)
        assert scene.there.counters["protocol_violations"] == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", [DEEP, b"\xdd\xff\xff\xff\xff", b"\xc0", b"\x81\xa4text\xa2\xff\xfe"])
async def test_calls_that_cannot_be_read_are_refused_and_counted(kind: str, body: bytes) -> None:
    async with siege(kind) as scene:
        stream = await scene.connect()
        for number in range(20):
            fields = b"\x85\xa4type\xa7request\xa2id" + bytes([number]) + b"\xa6method\xa9test.echo\xa9timeout_s\x05"
            with suppress(PeerLost):  # some of it is not even a frame
                await stream.send(framed(fields + b"\xa4body" + body))
        await scene.served()
        assert scene.there.counters["protocol_violations"] >= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "addresses", [["a"] * 100_000, ["/ip4/1.2.3.4/tcp/1" + "9" * 100_000] * 8, ["\x1b[2J\n"] * 1000]
)
async def test_a_hello_with_countless_addresses_is_cut_to_a_few(kind: str, addresses: list[str]) -> None:
    async with siege(kind) as scene:
        for _ in range(5):
            stream = await scene.dial()
            await send_frame(stream, Hello(CONTROL, "x" * 10_000, addresses))
            with suppress(PeerLost):
                assert isinstance(await receive_frame(stream), (Welcome, Reject))
            assert len(scene.there.addresses_of(ATTACKER.peer_id)) <= 8
            stream.abort()


async def test_an_attacker_cannot_speak_for_another_peer() -> None:
    """An address of somebody else with the attacker's id, or the other way round, changes nothing for the other."""
    async with siege("tls") as scene:
        known = scene.there.addresses_of(scene.honest.peer_id)
        stream = await scene.dial()
        await send_frame(stream, Hello(CONTROL, "", [str(address) for address in scene.honest.addresses]))
        assert isinstance(await receive_frame(stream), Welcome)
        assert scene.there.addresses_of(scene.honest.peer_id) == known
        learnt = scene.there.addresses_of(ATTACKER.peer_id)
        assert all(isinstance(address, Address) and address.peer_id == ATTACKER.peer_id for address in learnt)


# silence and single bytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sent", few_of([HELLO[:-1], b"", b"\x00\x0f\xff\xf0" + b"\x81" * 100], 1, pytest.mark.long))
async def test_silence_before_the_hello_is_over_is_not_waited_for(kind: str, sent: bytes) -> None:
    async with siege(kind, FAST) as scene:
        streams = [await scene.dial() for _ in range(10)]
        for stream in streams:
            if sent:
                await stream.send(sent)
        await asyncio.gather(*(ended(stream) for stream in streams))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sent",
    few_of([encode_frame(request(1))[:-1], b"\x00", b"\x00\x0f\xff\xf0" + b"\x81" * 100_000], 1, pytest.mark.long),
)
async def test_silence_in_the_middle_of_a_frame_is_a_lost_peer(kind: str, sent: bytes) -> None:
    async with siege(kind, FAST) as scene:
        streams = []
        for number in range(10):
            streams.append(await scene.connect(identity_of(200 + number)))
            await streams[-1].send(sent)
        await asyncio.gather(*(ended(stream) for stream in streams))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_hello_in_single_bytes_is_not_waited_for(kind: str) -> None:
    async with siege(kind, FAST) as scene:
        stream = await scene.dial()
        dripping = asyncio.ensure_future(drip(stream, HELLO, 0.1))  # 3 s in all
        await ended(stream, 2.5)
        stream.abort()
        await dripping


@pytest.mark.parametrize("kind", KINDS)
async def test_a_frame_in_single_bytes_holds_up_nobody(kind: str) -> None:
    async with siege(kind, FAST) as scene:
        streams = [await scene.connect(identity_of(200 + number)) for number in range(5)]
        frame = b"\x00\x0f\xff\xf0" + encode_frame(request(1))[4:]
        for at in range(20):  # 1 s in all
            for stream in streams:
                with suppress(PeerLost):
                    await stream.send(frame[at : at + 1])
            await asyncio.sleep(0.05)


async def test_connections_that_are_reset_leave_nothing() -> None:
    loop = asyncio.get_running_loop()
    async with siege("tls") as scene:
        for number in range(60):
            with raw_socket(scene.where) as sock:
                if number % 2:
                    await loop.sock_sendall(sock, TLS_RECORD)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for _ in range(10):
            stream = await scene.connect()
            await send_frame(stream, request(1))
            stream.abort()


# floods


@pytest.mark.parametrize("kind", KINDS)
async def test_a_peer_serves_others_through_a_flood_of_large_calls(kind: str) -> None:
    loop = asyncio.get_running_loop()
    frame = encode_frame(request(1, "x" * 1_000_000))
    async with siege(kind) as scene:
        stream = await scene.connect()
        reading = asyncio.ensure_future(ended(stream, 30.0))
        began = loop.time()
        with suppress(PeerLost):
            while loop.time() < began + 0.5:
                await stream.send(frame)
        await scene.served(5)
        stream.abort()
        await reading


@pytest.mark.parametrize("kind", KINDS)
async def test_a_peer_serves_others_through_a_flood_of_connections(kind: str) -> None:
    async with siege(kind) as scene:
        streams: list[Stream] = []
        for _ in range(40):
            stream = await scene.dial()
            streams.append(stream)
            with suppress(PeerLost):
                await send_frame(stream, Hello(CONTROL))
                await receive_frame(stream)
        await scene.served(5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("purpose", few_of(["unknown", "bulk", "x" * 100_000], 1, pytest.mark.long))
async def test_a_peer_serves_others_through_a_flood_of_bulk_streams(kind: str, purpose: str) -> None:
    async with siege(kind) as scene:
        held: list[Stream] = []

        async def hold(remote: str, header: bytes, stream: Stream) -> None:
            held.append(stream)
            await stream.wait_closed()

        scene.there.accept_bulk("bulk", hold)
        streams = [await scene.dial(is_bulk=True) for _ in range(40)]
        for stream in streams:
            with suppress(PeerLost):
                await send_frame(stream, Hello(purpose, header=bytes(10_000)))
                answer = await receive_frame(stream)
                assert isinstance(answer, (Welcome, Reject))
                assert purpose == "bulk" or isinstance(answer, Reject)
        await scene.served(5)
        assert bool(held) == (purpose == "bulk")
