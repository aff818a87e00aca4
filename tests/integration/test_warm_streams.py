"""Streams that are opened ahead of the round that uses them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import torch

from manyhands.averaging.allreduce import streams
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import NAME_BYTES, STREAM_KIND, Member, StreamHeader
from manyhands.averaging.rounds import RoundRunner
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerLost, ProtocolViolation
from manyhands.rpc import Endpoint
from tests.swarm import RUN_ID, FixedRoster, averagers

CONFIG = AveragingConfig(matchmaking_time_s=3.0, averaging_timeout_s=20.0, min_span_bytes=4, codec="none")
Members = list[tuple[RoundRunner, FixedRoster, Endpoint]]


def member(endpoint: Endpoint) -> Member:
    return Member(endpoint.peer_id, [], is_client=False, weight=1.0)


async def until(condition: Callable[[], Any]) -> None:
    async with time_limit(5.0, "waiting for the others"):
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def standing(num_peers: int, kind: str = "memory") -> AsyncIterator[Members]:
    """Averagers that hold places in a group that stands, and have all their streams."""
    async with averagers(num_peers, kind=kind, config=CONFIG) as members:
        holding = [asyncio.ensure_future(runner.hold_place()) for runner, _, _ in members]
        await until(lambda: all(runner.group_stands for runner, _, _ in members))
        num_pairs = num_peers * (num_peers - 1) // 2
        await until(lambda: sum(len(runner._streams._idle) for runner, _, _ in members) == num_pairs)
        await until(lambda: sum(len(runner._streams._unnamed) for runner, _, _ in members) == num_pairs)
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)
        yield members


async def mean_of(members: Members) -> list[float]:
    vectors = [torch.full((50,), float(number)) for number in range(len(members))]
    averaging = [runner.average(vector_N, 1.0) for (runner, _, _), vector_N in zip(members, vectors, strict=True)]
    results = await asyncio.gather(*averaging)
    return [float(result.averaged_N.mean()) for result in results if result.averaged_N is not None]


@pytest.mark.parametrize("kind", ["memory", "tls"])
async def test_a_round_after_that_dials_no_stream(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with standing(3, kind) as members:

        async def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("a stream was dialled")

        for _, _, endpoint in members:
            monkeypatch.setattr(endpoint, "open_bulk", refuse)
        assert await mean_of(members) == [1.0] * 3


async def test_a_stream_that_has_died_is_dialled_again() -> None:
    async with standing(3) as members:
        for runner, _, _ in members:
            for stream, _ in runner._streams._idle.values():
                stream.abort()
        assert await mean_of(members) == [1.0] * 3


async def test_streams_that_no_round_uses_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "KEPT_S", 0.5)
    async with standing(2) as members:
        await until(lambda: not any(runner._streams._idle or runner._streams._unnamed for runner, _, _ in members))


async def test_a_peer_has_one_stream_without_a_name_and_a_newer_one_replaces_it() -> None:
    async with averagers(2, config=CONFIG) as ((_, _, one), (runner, _, other)):
        header = msgspec.msgpack.encode(StreamHeader(b""))
        dialling = RunEndpoint(one, RUN_ID)
        first = await dialling.open_bulk(other.peer_id, STREAM_KIND, header, 5.0)
        await until(lambda: runner._streams._unnamed)
        second, sender = await dialling.open_bulk(other.peer_id, STREAM_KIND, header, 5.0), member(one)
        with pytest.raises(PeerLost):
            await first.receive_into(memoryview(bytearray(1)))
        name = bytes(range(NAME_BYTES))
        await second.send(name)
        assert (await runner._streams._await_stream(sender, name)).remote == one.peer_id
        assert not runner._streams._unnamed
        for stream in (first, second):
            one.release(stream)


async def test_a_stream_that_comes_as_its_sender_is_given_up_breaks_no_rule() -> None:
    """Its sender could not know. A second one for one round does break it."""
    async with averagers(2, config=CONFIG) as ((_, _, one), (runner, _, other)):
        dialling, sender, name = RunEndpoint(one, RUN_ID), member(one), bytes(range(NAME_BYTES))
        await dialling.open_bulk(other.peer_id, STREAM_KIND, msgspec.msgpack.encode(StreamHeader(b"")), 5.0)
        await until(lambda: runner._streams._unnamed)
        (stream,) = runner._streams._unnamed.values()
        header = msgspec.msgpack.encode(StreamHeader(name))
        taking = asyncio.ensure_future(runner._streams._await_stream(sender, name))
        await asyncio.sleep(0)
        runner._streams._on_lost(one.peer_id)
        with pytest.raises(PeerLost, match=r"after it was given up: .* it was lost before it opened its stream"):
            await runner._streams._on_stream(one.peer_id, header, stream)
        with pytest.raises(PeerLost):
            await taking
        serving = asyncio.ensure_future(runner._streams._on_stream(one.peer_id, header, stream))
        await asyncio.sleep(0)
        with pytest.raises(ProtocolViolation, match="a second stream for one round"):
            await runner._streams._on_stream(one.peer_id, header, stream)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
