"""Bulk streams of an endpoint: over several connections, and no faster than allowed."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerLost
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint, RpcConfig
from manyhands.rpc.frames import MAX_STRIPES, Hello, Stripe, Welcome, receive_frame, send_frame
from manyhands.rpc.striping import BLOCK_BYTES, MAX_INCOMPLETE, StripedStream, num_stripes
from manyhands.transport import Stream
from tests.machine import Machine
from tests.memory_transport import MemoryStream
from tests.network import ECHO, KINDS, PATIENCE_S, Text, endpoints, identity_of, serve_echo, transport_of, until


def serve_mirror(endpoint: Endpoint, num_bytes: int) -> None:
    async def mirror(remote: PeerId, header: bytes, stream: Stream) -> None:
        target = bytearray(num_bytes)
        await stream.receive_into(memoryview(target))
        await stream.send(target)
        await stream.close()

    endpoint.accept_bulk("mirror", mirror)


def pretend_long_link(here: Endpoint, rtt_s: float = 0.1) -> None:
    here.rtt_s = lambda peer_id: rtt_s  # type: ignore[method-assign]


# stripes


@pytest.mark.parametrize(
    ("rtt_s", "size_bytes", "expected", "expected_with_bbr"),
    [
        (0.0001, 1 << 30, 1, 1),
        (0.02, 1 << 30, 1, 1),
        (0.05, 1 << 30, 2, 1),
        (0.1, 1 << 30, 4, 2),
        (10.0, 1 << 30, MAX_STRIPES, MAX_STRIPES),
        (float("inf"), 1 << 30, 1, 1),
        (0.1, 100_000, 1, 1),
        (0.1, 3 << 20, 3, 2),
    ],
)
def test_long_links_and_large_data_get_more_connections(
    rtt_s: float, size_bytes: int, expected: int, expected_with_bbr: int
) -> None:
    assert num_stripes(rtt_s, size_bytes, has_bbr=False) == expected
    assert num_stripes(rtt_s, size_bytes, has_bbr=True) == expected_with_bbr


@given(
    num_parts=st.integers(2, 5),
    sends=st.lists(st.integers(0, 3 * BLOCK_BYTES), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_striped_bytes_arrive_in_order_whatever_the_sizes_of_sends_and_reads(
    num_parts: int, sends: list[int], seed: int
) -> None:
    async def scenario() -> None:
        ends = [(memory_end(), memory_end()) for _ in range(num_parts)]
        for here, there in ends:
            here.other, there.other = there, here
        sender, receiver = (StripedStream([pair[side] for pair in ends]) for side in (0, 1))
        rng = random.Random(seed)
        data = rng.randbytes(sum(sends))
        target = bytearray(len(data))

        async def send() -> None:
            start = 0
            for size in sends:
                await sender.send(data[start : start + size])
                start += size

        async def receive() -> None:
            view, start = memoryview(target), 0
            while start < len(view):
                size = min(rng.randrange(1, 2 * BLOCK_BYTES), len(view) - start)
                await receiver.receive_into(view[start : start + size])
                start += size

        async with time_limit(PATIENCE_S, "for all bytes"):
            await asyncio.gather(send(), receive())
        assert target == data

    asyncio.run(scenario())


def memory_end() -> MemoryStream:
    return MemoryStream(identity_of(0).peer_id, identity_of(1).peer_id)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_bulk_stream_over_several_connections_carries_its_bytes_both_ways(kind: str) -> None:
    num_bytes = 5 * (1 << 20) + 12_345
    async with endpoints(2, kind=kind) as (here, there):
        serve_echo(there)
        serve_mirror(there, num_bytes)
        await here.call(there.peer_id, ECHO, Text("hi"))
        pretend_long_link(here)
        stream = await here.open_bulk(there.peer_id, "mirror", b"", size_bytes=num_bytes)
        assert isinstance(stream, StripedStream)
        data, target = random.Random(1).randbytes(num_bytes), bytearray(num_bytes)
        await asyncio.gather(stream.send(data), stream.receive_into(memoryview(target)))
        assert hashlib.sha256(target).digest() == hashlib.sha256(data).digest()
        assert num_bytes <= stream.bytes_received < stream.bytes_sent < num_bytes + 10_000  # with hellos
        here.release(stream)
        await until(lambda: here.num_streams == there.num_streams == 1, "only the control connection is left")
        assert here.bytes_sent >= num_bytes


async def test_the_loss_of_one_connection_ends_the_whole_stream() -> None:
    async with endpoints(2, kind="tls") as (here, there):
        serve_echo(there)
        serve_mirror(there, 8 << 20)
        await here.call(there.peer_id, ECHO, Text("hi"))
        pretend_long_link(here)
        stream = await here.open_bulk(there.peer_id, "mirror", b"", size_bytes=8 << 20)
        assert isinstance(stream, StripedStream)
        next(part for part in here.wire.streams if part.is_bulk).abort()
        with pytest.raises(PeerLost):
            await stream.receive_into(memoryview(bytearray(8 << 20)))
        here.release(stream)
        await until(lambda: there.num_streams == 1, "the other end has dropped all of them")


async def test_all_connections_of_a_stream_end_with_its_acceptor() -> None:
    async with endpoints(2, kind="tls") as (here, there):
        serve_echo(there)

        async def leave(remote: PeerId, header: bytes, stream: Stream) -> None:
            pass

        there.accept_bulk("leave", leave)
        await here.call(there.peer_id, ECHO, Text("hi"))
        pretend_long_link(here)
        stream = await here.open_bulk(there.peer_id, "leave", b"", size_bytes=8 << 20)
        await until(lambda: there.num_streams == 1, "all are closed there")
        here.release(stream)


async def test_a_stream_whose_other_connections_never_come_is_dropped() -> None:
    async with endpoints(1, kind="tls", config=RpcConfig(hello_timeout_s=0.2)) as (there,):
        serve_mirror(there, 1)
        transport = transport_of(9, "tls", None)  # type: ignore[arg-type]
        for _ in range(2):  # so many again, when the first ones are dropped
            streams: list[Stream] = []
            for number in range(MAX_INCOMPLETE):
                streams.append(await transport.dial_bulk(there.addresses[0], 5.0))
                await send_frame(streams[-1], Hello("mirror", stripe=Stripe(number.to_bytes(16, "big"), 0, 4)))
                assert isinstance(await receive_frame(streams[-1]), Welcome)
            async with time_limit(PATIENCE_S, "to be dropped"):
                for stream in streams:
                    await stream.wait_closed()
                    await stream.close()
        assert there.counters["protocol_violations"] == 0
        transport.close()


# the upload cap


async def test_bulk_is_sent_no_faster_than_allowed_and_fairly() -> None:
    """Two streams at once: 16 Mbit/s is 2 MB/s for both together."""
    num_bytes = 1_500_000
    async with endpoints(2, kind="tls", config=RpcConfig(max_upload_mbit_s=16)) as (here, there):
        serve_echo(there)
        arrived: list[float] = []

        async def take(remote: PeerId, header: bytes, stream: Stream) -> None:
            await stream.receive_into(memoryview(bytearray(num_bytes)))
            arrived.append(time.monotonic())
            await stream.close()

        there.accept_bulk("take", take)
        streams = [await here.open_bulk(there.peer_id, "take", b"") for _ in range(2)]
        began = time.monotonic()
        sending = asyncio.gather(*(stream.send(bytes(num_bytes)) for stream in streams))
        slowest_call_s = 0.0
        with Machine() as machine:
            while not sending.done():
                called = time.monotonic()
                await here.call(there.peer_id, ECHO, Text("hi"))
                slowest_call_s = max(slowest_call_s, time.monotonic() - called)
                await asyncio.sleep(0.02)
        await sending
        await until(lambda: len(arrived) == 2, "all has arrived")
        seconds = [at - began for at in arrived]
        assert max(seconds) > 0.85 * 2 * num_bytes / 2_000_000
        assert max(seconds) < machine.allows(2.0 * 2 * num_bytes / 2_000_000)
        assert min(seconds) > 0.7 * max(seconds), "they take turns"
        assert slowest_call_s < machine.allows(0.25), "control is not held up"
        for stream in streams:
            here.release(stream)


@pytest.mark.parametrize("way", ["striped", "capped", "plain"])
async def test_pieces_that_end_in_the_middle_end_the_stream(way: str) -> None:
    """Nobody could tell where the next message begins."""
    config = RpcConfig(max_upload_mbit_s=1000) if way == "capped" else RpcConfig()
    async with endpoints(2, kind="tls", config=config) as (here, there):
        serve_echo(there)
        serve_mirror(there, 4 << 20)
        if way == "striped":
            await here.call(there.peer_id, ECHO, Text("hi"))
            pretend_long_link(here)
        stream = await here.open_bulk(there.peer_id, "mirror", b"", size_bytes=4 << 20)

        def pieces() -> Iterator[memoryview]:
            yield memoryview(bytes(1 << 20))
            raise ValueError("no more")

        with pytest.raises(ValueError, match="no more"):
            await stream.send_each(pieces())
        with pytest.raises(PeerLost):
            await stream.send(b"next message")
        here.release(stream)
