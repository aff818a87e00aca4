"""The transport of tests: what holds for TLS holds here too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from manyhands.base.address import Address
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ConfigError, DialFailed, DialReason, PeerLost
from manyhands.transport import Stream
from tests.memory_transport import BACKLOG_BYTES, MemoryNetwork, MemoryTransport
from tests.network import LOOPBACK, PATIENCE_S, identity_of


@asynccontextmanager
async def stream_pair() -> AsyncIterator[tuple[Stream, Stream]]:
    network = MemoryNetwork()
    accepted: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()

    async def on_stream(stream: Stream) -> None:
        accepted.set_result(stream)
        await stream.wait_closed()

    listener = await MemoryTransport(identity_of(0), network).listen(LOOPBACK, on_stream)
    here = await MemoryTransport(identity_of(1), network).dial(listener.addresses[0], 1.0)
    try:
        yield here, await accepted
    finally:
        here.abort()
        await listener.close()


async def test_bytes_arrive_both_ways_and_are_counted() -> None:
    async with stream_pair() as (here, there):
        await here.send(b"ab", bytearray(b"cd"), memoryview(b"ef"))
        await there.send(b"xyz")
        target, back = bytearray(6), bytearray(3)
        await there.receive_into(memoryview(target))
        await here.receive_into(memoryview(back))
        assert (target, back) == (b"abcdef", b"xyz")
        assert (here.bytes_sent, here.bytes_received) == (6, 3)
        assert (there.remote, here.remote) == (identity_of(1).peer_id, identity_of(0).peer_id)


async def test_a_sender_waits_for_its_reader() -> None:
    data = bytes(range(256)) * (16 * BACKLOG_BYTES // 256)
    async with stream_pair() as (here, there):
        sending = asyncio.ensure_future(here.send(data))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not sending.done()
        assert here.bytes_sent < len(data) // 2
        target = bytearray(len(data))
        await there.receive_into(memoryview(target))
        await sending
        assert target == data


@pytest.mark.parametrize("end", ["here", "there"])
async def test_abort_wakes_both_ends(end: str) -> None:
    async with stream_pair() as (here, there):
        reading = asyncio.ensure_future(here.receive_into(memoryview(bytearray(1))))
        sending = asyncio.ensure_future(there.send(bytes(64 * BACKLOG_BYTES)))
        reading_there = asyncio.ensure_future(there.receive_into(memoryview(bytearray(1))))
        await asyncio.sleep(0)
        (here if end == "here" else there).abort()
        async with time_limit(PATIENCE_S, "for both ends to notice"):
            outcomes = await asyncio.gather(reading, sending, reading_there, return_exceptions=True)
        assert any(isinstance(outcome, PeerLost) for outcome in outcomes)
        await here.wait_closed()
        await there.wait_closed()


async def test_bytes_sent_before_the_close_can_be_read() -> None:
    async with stream_pair() as (here, there):
        await here.send(b"last words")
        await here.close()
        target = bytearray(10)
        await there.receive_into(memoryview(target))
        assert target == b"last words"
        with pytest.raises(PeerLost):
            await there.receive_into(memoryview(target))


async def test_a_long_send_that_is_cancelled_half_way_ends_the_stream() -> None:
    async with stream_pair() as (here, there):
        sending = asyncio.ensure_future(here.send(bytes(64 * BACKLOG_BYTES)))
        await there.receive_into(memoryview(bytearray(10)))
        sending.cancel()
        await asyncio.wait([sending])
        with pytest.raises(PeerLost):
            await here.send(b"next message")


async def test_dials_and_listens_that_cannot_succeed_fail_with_the_reason() -> None:
    network = MemoryNetwork()

    async def on_stream(stream: Stream) -> None:
        raise AssertionError("nobody gets through")

    listener = await MemoryTransport(identity_of(0), network).listen(LOOPBACK, on_stream)
    address, other = listener.addresses[0], identity_of(2).peer_id
    for identity, where, reason in [
        (identity_of(1), Address.of("127.0.0.1", 999), DialReason.REFUSED),
        (identity_of(0), address, DialReason.ITSELF),
        (identity_of(1), address.with_peer(other), DialReason.WRONG_IDENTITY),
    ]:
        with pytest.raises(DialFailed) as caught:
            await MemoryTransport(identity, network).dial(where, 1.0)
        assert caught.value.reason is reason
    with pytest.raises(ConfigError, match="is taken"):
        await MemoryTransport(identity_of(1), network).listen(address, on_stream)
    await listener.close()
    with pytest.raises(DialFailed, match="connection refused"):
        await MemoryTransport(identity_of(1), network).dial(address, 1.0)
