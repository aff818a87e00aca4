"""Bulk streams and streaming calls of a hostile peer: parts that never come, answers without end that nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerLost, Timeout
from manyhands.base.identity import PeerId
from manyhands.rpc import StreamMethod
from manyhands.rpc.frames import (
    MAX_STRIPES,
    MAX_WINDOW,
    Hello,
    Item,
    Stripe,
    Welcome,
    WindowUpdate,
    encode_frame,
    receive_frame,
    send_frame,
)
from manyhands.rpc.striping import MAX_INCOMPLETE
from manyhands.transport import Stream
from tests.integration.siege import FAST, KINDS, Siege, ended, request, siege
from tests.network import Text, next_frame
from tests.unit.rpc.test_frames import framed, payload_of

COUNT = StreamMethod("test.count", Text, Text)
BULK = "test.bulk"
SET = bytes(16)


class Counting:
    """Serves ``COUNT``: items without end; and shows how many streams run."""

    def __init__(self, scene: Siege) -> None:
        self.num_running = 0
        scene.there.handle_stream(COUNT, self._count)

    async def _count(self, remote: PeerId, wanted: Text) -> AsyncIterator[Text]:
        self.num_running += 1
        try:
            while True:
                yield wanted
                await asyncio.sleep(0)
        finally:
            self.num_running -= 1


def bulk_hello(*, index: int = 0, count: int = 2, stream_id: bytes = SET) -> Hello:
    return Hello(BULK, header=b"x", stripe=Stripe(stream_id, index, count))


async def taken(remote: str, header: bytes, stream: Stream) -> None:
    await stream.wait_closed()


@pytest.mark.parametrize("kind", KINDS)
async def test_stripes_of_an_incomplete_stream_are_dropped(kind: str) -> None:
    async with siege(kind, FAST) as scene:
        scene.there.accept_bulk(BULK, taken)
        streams = [await scene.dial(is_bulk=True) for _ in range(40)]
        for number, stream in enumerate(streams):
            with suppress(PeerLost):
                await send_frame(stream, bulk_hello(stream_id=number.to_bytes(16, "big")))
        await asyncio.gather(*(ended(stream) for stream in streams))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "second",
    [bulk_hello(), bulk_hello(index=1, count=3), bulk_hello(index=2, count=2), bulk_hello(index=7, count=2)],
    ids=["the same again", "another count", "one too many", "far too many"],
)
async def test_stripes_that_do_not_fit_are_a_violation(kind: str, second: Hello) -> None:
    async with siege(kind, FAST) as scene:
        scene.there.accept_bulk(BULK, taken)
        for hello in (bulk_hello(), second):
            stream = await scene.dial(is_bulk=True)
            await send_frame(stream, hello)
        await scene.counted("protocol_violations", 1)
        await ended(stream)


@pytest.mark.parametrize("kind", KINDS)
async def test_stripes_that_break_the_rules_leave_nothing_behind(kind: str) -> None:
    """Whatever the first connection of a stream says wrongly, nobody waits for the others."""
    async with siege(kind, FAST) as scene:
        scene.there.accept_bulk(BULK, taken)
        for number in range(MAX_INCOMPLETE):
            stream = await scene.dial(is_bulk=True)
            await send_frame(stream, bulk_hello(index=5, stream_id=number.to_bytes(16, "big")))
            await scene.counted("protocol_violations", number + 1)
        stream = await scene.dial(is_bulk=True)
        await send_frame(stream, bulk_hello(stream_id=bytes([255] * 16)))
        assert isinstance(await receive_frame(stream), Welcome)
        with pytest.raises(Timeout):
            async with time_limit(FAST.hello_timeout_s / 2, "while the other connection may still come"):
                await stream.wait_closed()
        assert scene.there.counters["protocol_violations"] == MAX_INCOMPLETE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "stripe",
    [
        {"stream_id": SET, "index": 0, "count": MAX_STRIPES + 1},
        {"stream_id": SET, "index": 0, "count": 0},
        {"stream_id": SET, "index": -1, "count": 2},
        {"stream_id": b"", "index": 0, "count": 2},
        {"stream_id": SET, "index": 2**63, "count": 2},
        [SET, 0, 2],
    ],
)
async def test_stripes_out_of_bounds_are_a_violation(kind: str, stripe: object) -> None:
    async with siege(kind) as scene:
        scene.there.accept_bulk(BULK, taken)
        stream = await scene.dial(is_bulk=True)
        await stream.send(framed(payload_of(type="hello", purpose=BULK, stripe=stripe)))
        await ended(stream)
        await scene.counted("protocol_violations", 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["x", "x" * 100_000])
async def test_endless_answers_that_nobody_reads_end_with_the_attacker(kind: str, text: str) -> None:
    async with siege(kind) as scene:
        counting = Counting(scene)
        stream = await scene.connect()
        with suppress(PeerLost):
            for number in range(20):
                call = request(number, text, method=COUNT.name)
                call.window = MAX_WINDOW
                await stream.send(encode_frame(call))
            for _ in range(50):
                for number in range(20):
                    await stream.send(encode_frame(WindowUpdate(number, MAX_WINDOW)))
                await asyncio.sleep(0.005)
        scene.leave()
        await scene.served(5)
        assert counting.num_running == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_window_updates_before_a_call_give_it_no_credit(kind: str) -> None:
    async with siege(kind) as scene:
        Counting(scene)
        stream = await scene.connect()
        for number in range(2000):
            await stream.send(encode_frame(WindowUpdate(number, MAX_WINDOW)))
        call = request(5, method=COUNT.name)
        call.window = 3
        await send_frame(stream, call)
        for _ in range(3):
            await next_frame(stream, Item)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(receive_frame(stream), 0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "fields",
    [
        {"type": "request", "id": 1, "method": COUNT.name, "timeout_s": 1, "body": None, "window": MAX_WINDOW + 1},
        {"type": "credit", "id": 1, "num_items": 0},
        {"type": "credit", "id": 1, "num_items": 2**40},
    ],
    ids=["a huge window", "no credit", "huge credit"],
)  # fmt: skip
async def test_windows_out_of_bounds_are_a_violation(kind: str, fields: dict[str, object]) -> None:
    async with siege(kind) as scene:
        Counting(scene)
        stream = await scene.connect()
        await stream.send(framed(payload_of(**fields)))
        await ended(stream)
        await scene.counted("protocol_violations", 1)
