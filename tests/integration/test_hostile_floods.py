"""A peer that is flooded goes on serving the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import pytest

from manyhands.base.errors import PeerLost
from manyhands.base.rate import BURST_S
from manyhands.rpc import Method
from manyhands.rpc.frames import (
    CallFailure,
    Cancel,
    Drain,
    Frame,
    Ping,
    Pong,
    Response,
    encode_frame,
    send_frame,
)
from tests.integration.siege import KINDS, ended, request, siege
from tests.network import Text, identity_of, next_frame
from tests.sweeps import few_of

CALLS_PER_S = 600.0
"""In place of more, which one process takes long to make; the honest peer makes fewer."""

FLOODS: dict[str, list[Frame]] = {
    "pings": [Ping()],
    "pongs": [Pong()],
    "drains": [Drain()],
    "cancels": [Cancel(number) for number in range(100)],
    "answers": [Response(number, request(1).body) for number in range(50)] + [CallFailure(7, "busy", "x")],
    "calls": [request(number) for number in range(100)],
    "calls without a method": [request(number, method="test.none") for number in range(100)],
    "calls without time": [request(number, timeout_s=-1.0) for number in range(100)],
    "calls that are cancelled": [frame for number in range(50) for frame in (request(number), Cancel(number))],
}


@pytest.mark.parametrize("kind", ["tls"])
@pytest.mark.parametrize(
    "flood",
    [*few_of(["pings", "drains"], 2), *few_of(["pongs"], 0, pytest.mark.long), *few_of([*FLOODS][3:], 0)],
)
async def test_a_peer_serves_others_through_a_flood_of_small_frames(kind: str, flood: str) -> None:
    """As fast as they are taken; what is answered is read."""
    loop = asyncio.get_running_loop()
    frames = b"".join(encode_frame(frame) for frame in FLOODS[flood])
    frames *= 100_000 // len(frames) + 1
    async with siege(kind) as scene:
        stream = await scene.connect()
        reading = asyncio.ensure_future(ended(stream, 30.0))
        num_before, began = len(scene.latencies), loop.time()
        num_bytes = 0
        with suppress(PeerLost):
            while loop.time() < began + 0.3:
                await stream.send(frames)
                num_bytes += len(frames)
        assert num_bytes > 0
        await scene.served(5)
        assert len(scene.latencies) >= num_before + 5
        stream.abort()
        await reading


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tls"])
async def test_two_floods_are_no_worse_than_one(kind: str) -> None:
    loop = asyncio.get_running_loop()
    frames = encode_frame(Ping()) * 10_000
    async with siege(kind) as scene:
        streams = [await scene.connect(identity_of(100 + number)) for number in range(2)]
        reading = [asyncio.ensure_future(ended(stream, 30.0)) for stream in streams]
        began = loop.time()
        while loop.time() < began + 0.3:
            for stream in streams:
                with suppress(PeerLost):
                    await stream.send(frames)
        await scene.served(5)
        scene.leave()
        await asyncio.wait(reading)


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_of_one_peer_have_a_rate_over_all_of_its_connections(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More are refused at once and counted; others are served meanwhile."""
    monkeypatch.setattr("manyhands.rpc.endpoint.MAX_CALLS_PER_S", CALLS_PER_S)
    async with siege(kind) as scene:
        streams = [await scene.connect() for _ in range(3)]
        answers: Counter[str] = Counter()
        began = asyncio.get_running_loop().time()
        while answers.total() < 2 * CALLS_PER_S * BURST_S:
            for number, stream in enumerate(streams * 100):
                await send_frame(stream, request(number + 1))
            for stream in streams:
                for _ in range(100):
                    answer = await next_frame(stream, Response | CallFailure)
                    answers[answer.code if isinstance(answer, CallFailure) else "served"] += 1
        took_s = asyncio.get_running_loop().time() - began
        assert answers["served"] <= CALLS_PER_S * (BURST_S + took_s) + 1
        assert answers.keys() <= {"served", "busy"}
        assert scene.there.counters["refused_calls"] == answers["busy"]
        await scene.served(5)


LONG_ANSWER = Method("test.long", Text, Text)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_peer_that_reads_no_answers_is_refused_more_of_them(kind: str) -> None:
    """Small questions with large answers would fill the memory; others are served meanwhile."""
    async with siege(kind) as scene:
        scene.there.handle(LONG_ANSWER, lambda remote, request: Text("x" * 200_000))
        stream = await scene.connect()
        for number in range(150):  # 30 MB
            await send_frame(stream, request(number, method=LONG_ANSWER.name))
        await scene.served(5)
        answer = None
        while not isinstance(answer, CallFailure):
            answer = await next_frame(stream, Response | CallFailure)
        assert answer.message == "too many unread answers"
