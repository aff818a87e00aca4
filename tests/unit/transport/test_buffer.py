"""Received bytes: in order, none lost, and never more of them than asked for plus the backlog."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.errors import PeerLost
from manyhands.transport.buffer import SCRATCH_BYTES, ReceiveBuffer

LIMIT_BYTES = 100


def feed(buffer: ReceiveBuffer, data: bytes) -> None:
    buffer.feed(memoryview(data))


def new_buffer() -> tuple[ReceiveBuffer, list[str]]:
    resumed: list[str] = []
    return ReceiveBuffer(LIMIT_BYTES, lambda: resumed.append("resumed")), resumed


@given(
    arrivals=st.lists(st.binary(max_size=40), max_size=20),
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=20),
    order=st.randoms(use_true_random=False),
)
def test_all_bytes_arrive_in_order(arrivals: list[bytes], sizes: list[int], order: object) -> None:
    """However arrivals and reads interleave."""

    async def scenario() -> None:
        buffer, _ = new_buffer()
        sent, received = b"".join(arrivals), bytearray()
        waiting = list(arrivals)

        async def read() -> None:
            for size in sizes:
                target = bytearray(min(size, len(sent) - len(received)))
                await buffer.fill(memoryview(target))
                received.extend(target)

        reader = asyncio.ensure_future(read())
        while waiting:
            for _ in range(order.randrange(3)):  # type: ignore[attr-defined]
                await asyncio.sleep(0)
            feed(buffer, waiting.pop(0))
        await reader
        assert sent.startswith(bytes(received))
        assert len(received) == min(sum(sizes), len(sent))

    asyncio.run(scenario())


async def test_a_waiting_reader_receives_into_its_own_memory() -> None:
    buffer, _ = new_buffer()
    target = bytearray(8)
    reader = asyncio.ensure_future(buffer.fill(memoryview(target)))
    await asyncio.sleep(0)
    view = buffer.get_buffer()
    view[:3] = b"abc"
    assert bytes(target[:3]) == b"abc"
    buffer.updated(3)
    assert len(buffer.get_buffer()) == 5
    feed(buffer, b"defghi")
    await reader
    assert bytes(target) == b"abcdefgh"
    assert len(buffer.get_buffer()) == SCRATCH_BYTES, "the ninth byte is in the backlog"


async def test_a_full_backlog_asks_for_a_pause_until_it_is_read() -> None:
    buffer, resumed = new_buffer()
    feed(buffer, bytes(LIMIT_BYTES - 1))
    assert not buffer.is_full
    feed(buffer, b"x")
    assert buffer.is_full
    await buffer.fill(memoryview(bytearray(1)))
    assert not buffer.is_full
    assert resumed == ["resumed"]
    await buffer.fill(memoryview(bytearray(1)))
    assert resumed == ["resumed"], "told once"


async def test_bytes_before_the_end_can_still_be_read() -> None:
    buffer, _ = new_buffer()
    feed(buffer, b"abc")
    buffer.end(PeerLost("somebody", "gone"))
    target = bytearray(2)
    await buffer.fill(memoryview(target))
    assert target == b"ab"
    with pytest.raises(PeerLost, match="gone"):
        await buffer.fill(memoryview(bytearray(2)))


async def test_the_end_wakes_the_reader() -> None:
    buffer, _ = new_buffer()
    reader = asyncio.ensure_future(buffer.fill(memoryview(bytearray(2))))
    await asyncio.sleep(0)
    buffer.end(PeerLost("somebody", "gone"))
    buffer.end(PeerLost("somebody", "gone again"))
    with pytest.raises(PeerLost, match=r"gone$"):
        await reader


async def test_a_second_reader_is_an_error() -> None:
    buffer, _ = new_buffer()
    reader = asyncio.ensure_future(buffer.fill(memoryview(bytearray(2))))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="two tasks receive"):
        await buffer.fill(memoryview(bytearray(2)))
    feed(buffer, b"ab")
    await reader


async def test_tiny_pieces_cost_no_more_than_the_limit() -> None:
    """A sender of one byte at a time must not make each byte cost an object."""
    buffer = ReceiveBuffer(SCRATCH_BYTES, lambda: None)
    tracemalloc.start()
    try:
        for _ in range(SCRATCH_BYTES):
            feed(buffer, b"x")
        assert buffer.is_full
        assert tracemalloc.get_traced_memory()[0] < 2 * SCRATCH_BYTES
    finally:
        tracemalloc.stop()
