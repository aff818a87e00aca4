"""Bulk streams of a hostile peer: parts that never come or do not fit."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerLost, Timeout
from manyhands.rpc.frames import (
    MAX_STRIPES,
    Hello,
    Stripe,
    Welcome,
    receive_frame,
    send_frame,
)
from manyhands.rpc.striping import MAX_INCOMPLETE
from manyhands.transport import Stream
from tests.integration.siege import FAST, KINDS, ended, siege
from tests.unit.rpc.test_frames import framed, payload_of

BULK = "test.bulk"
SET = bytes(16)


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
