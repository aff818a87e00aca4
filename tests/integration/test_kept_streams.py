"""Streams that stay from one round to the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from manyhands.averaging.allreduce import streams
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import NAME_BYTES, STREAM_KIND, Member, StreamHeader
from manyhands.averaging.presence import next_position
from manyhands.averaging.rounds import RoundMeter, RoundRunner
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerLost, ProtocolViolation, RoundAborted
from manyhands.rpc import Endpoint
from tests.network import PATIENCE_S
from tests.phases import before_voting
from tests.swarm import RUN_ID, FixedMeeting, averagers

CONFIG = AveragingConfig(matchmaking_time_s=3.0, averaging_timeout_s=20.0, min_span_bytes=4, codec="none")
NUMEL = 50
Members = list[tuple[RoundRunner, FixedMeeting, Endpoint]]


async def until(condition: Callable[[], Any]) -> None:
    async with time_limit(PATIENCE_S, "waiting for the others"):
        while not condition():
            await asyncio.sleep(0.001)


async def mean_of(members: Members, meter: RoundMeter | None = None) -> list[float]:
    """One round, after which all are at the next position."""
    vectors = [torch.full((NUMEL,), float(number)) for number in range(len(members))]
    averaging = [
        runner.average(vector_N, 1.0, meter=meter if number == 0 else None)
        for number, ((runner, _, _), vector_N) in enumerate(zip(members, vectors, strict=True))
    ]
    results = await asyncio.gather(*averaging)
    for (_, roster, _), result in zip(members, results, strict=True):
        roster.at = next_position(result.manifest.position, result.manifest)
    return [float(result.averaged_N.mean()) for result in results if result.averaged_N is not None]


def num_kept(members: Members) -> tuple[int, int]:
    """Of those who dialled, and of those who accepted."""
    dialled = sum(len(runner._streams._idle) for runner, _, _ in members)
    return dialled, sum(len(runner._streams._unnamed) for runner, _, _ in members)


def forbid_dials(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a stream was dialled")

    for _, _, endpoint in members:
        monkeypatch.setattr(endpoint, "open_bulk", refuse)


@pytest.mark.parametrize("kind", ["memory", "tls"])
async def test_later_rounds_use_the_kept_streams_and_dial_none(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with averagers(3, kind=kind, config=CONFIG) as members:
        assert await mean_of(members) == [1.0] * 3
        forbid_dials(members, monkeypatch)
        for _ in range(3):
            meter = RoundMeter()
            assert await mean_of(members, meter) == [1.0] * 3
            assert meter.num_bytes_received < 2 * 4 * NUMEL + 200, "bytes of earlier rounds do not count"
        await until(lambda: num_kept(members) == (3, 3))


async def test_a_kept_stream_that_has_died_is_dialled_again() -> None:
    async with averagers(3, config=CONFIG) as members:
        await mean_of(members)
        for runner, _, _ in members:
            for stream, _ in runner._streams._idle.values():
                stream.abort()
        assert await mean_of(members) == [1.0] * 3


@pytest.mark.parametrize("kind", ["memory", "tls"])
async def test_a_kept_stream_that_the_other_end_closed_is_dialled_again(kind: str) -> None:
    async with averagers(3, kind=kind, config=CONFIG) as members:
        await mean_of(members)
        await until(lambda: num_kept(members) == (3, 3))
        for runner, _, _ in members:
            for stream in list(runner._streams._unnamed.values()):
                stream.abort()
        for runner, _, _ in members:
            for stream, _ in runner._streams._idle.values():
                async with time_limit(PATIENCE_S, "noticing that the other end has closed"):
                    await stream.wait_closed()
        assert await mean_of(members) == [1.0] * 3


async def test_no_stream_is_kept_after_a_round_that_was_aborted() -> None:
    """A member whose exchange was cut short has closed its end of a stream that looks idle at the other one."""
    async with averagers(4, config=CONFIG) as members:
        leader = min((runner for runner, _, _ in members), key=lambda runner: runner._endpoint.peer_id)

        gave_up = asyncio.Event()

        async def give_up() -> None:
            gave_up.set()
            leader._answers._rounds.popitem()[1].give_up("it gave up")

        for runner, _, _ in members:
            before_voting(runner, give_up if runner is leader else gave_up.wait)
        vector_N = torch.ones(NUMEL)
        averaging = [runner.average(vector_N, 1.0) for runner, _, _ in members]
        results = await asyncio.gather(*averaging, return_exceptions=True)
        assert sum(isinstance(result, RoundAborted) for result in results) == 3, results
        others = [member for member in members if member[0] is not leader]
        assert num_kept(others)[0] == 0


async def test_a_kept_stream_that_was_unused_for_long_is_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with averagers(3, config=CONFIG) as members:
        await mean_of(members)
        await until(lambda: num_kept(members) == (3, 3))
        monkeypatch.setattr(streams, "MINUTE_S", 0.0)
        former = {stream for runner, _, _ in members for stream, _ in runner._streams._idle.values()}
        assert await mean_of(members) == [1.0] * 3
        await until(lambda: num_kept(members) == (3, 3))
        assert not former & {stream for runner, _, _ in members for stream, _ in runner._streams._idle.values()}


async def test_an_idle_kept_stream_is_closed_by_the_side_that_accepted_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "TWO_MINUTES_S", 0.05)
    async with averagers(2, config=CONFIG) as members:
        await mean_of(members)
        (kept,) = [stream for runner, _, _ in members for stream, _ in runner._streams._idle.values()]
        async with time_limit(PATIENCE_S, "waiting for the other end to close it"):
            await kept.wait_closed()
        assert num_kept(members)[1] == 0
        assert await mean_of(members) == [0.5] * 2


async def test_a_peer_at_its_limit_of_accepted_streams_keeps_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_UNNAMED", 0)
    async with averagers(2, config=CONFIG) as members:
        for _ in range(2):
            assert await mean_of(members) == [0.5] * 2
            (kept,) = [stream for runner, _, _ in members for stream, _ in runner._streams._idle.values()]
            async with time_limit(PATIENCE_S, "waiting for the other end to close it"):
                await kept.wait_closed()
            assert num_kept(members)[1] == 0


async def test_losing_the_control_connection_ends_kept_streams_at_both_ends() -> None:
    async with averagers(3, config=CONFIG) as members:
        await mean_of(members)
        await until(lambda: num_kept(members) == (3, 3))
        gone = members[0][2].peer_id
        for runner, _, _ in members[1:]:
            runner._streams._on_lost(gone)
        await until(lambda: num_kept(members)[1] == 1)
        await members[0][0].close()
        await until(lambda: num_kept(members[1:]) == (1, 1))


async def test_a_peer_keeps_streams_up_to_a_limit_and_dials_the_others_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_KEPT", 1)
    async with averagers(3, config=CONFIG) as members:
        for _ in range(2):
            assert await mean_of(members) == [1.0] * 3
            await until(lambda: num_kept(members) == (2, 2))


async def test_streams_of_clients_are_kept_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_KEPT", 1)
    async with averagers(4, clients=[1, 2, 3], config=CONFIG) as members:
        assert await mean_of(members) == [1.5] * 4
        await until(lambda: num_kept(members) == (3, 3))
        forbid_dials(members, monkeypatch)
        assert await mean_of(members) == [1.5] * 4


def member(endpoint: Endpoint) -> Member:
    return Member(endpoint.peer_id, [], is_client=False, weight=1.0)


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
        assert (await runner._streams._await_stream(sender, name, 10.0)).remote == one.peer_id
        assert not runner._streams._unnamed
        for stream in (first, second):
            one.release(stream)


async def test_strangers_hold_no_streams_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for long, nor many at once. They need no record, and no control connection."""
    header = msgspec.msgpack.encode(StreamHeader(b""))
    async with averagers(3, config=CONFIG) as ((_, _, one), (_, _, other), (runner, _, called)):
        monkeypatch.setattr(streams, "MAX_UNNAMED", 1)
        first = await RunEndpoint(one, RUN_ID).open_bulk(called.peer_id, STREAM_KIND, header, 5.0)
        await until(lambda: runner._streams._unnamed)
        second = await RunEndpoint(other, RUN_ID).open_bulk(called.peer_id, STREAM_KIND, header, 5.0)
        async with time_limit(PATIENCE_S, "waiting for the second to be refused"):
            await second.wait_closed()
        assert list(runner._streams._unnamed) == [one.peer_id]
        monkeypatch.setattr(streams, "TWO_MINUTES_S", 0.05)
        third = await RunEndpoint(one, RUN_ID).open_bulk(called.peer_id, STREAM_KIND, header, 5.0)
        async with time_limit(PATIENCE_S, "waiting for the third to be closed"):
            await third.wait_closed()
        for stream, endpoint in ((first, one), (second, other), (third, one)):
            endpoint.release(stream)


async def test_a_stream_that_comes_as_its_sender_is_given_up_breaks_no_rule() -> None:
    """Its sender could not know. A second one for one round does break it."""
    async with averagers(2, config=CONFIG) as ((_, _, one), (runner, _, other)):
        dialling, sender, name = RunEndpoint(one, RUN_ID), member(one), bytes(range(NAME_BYTES))
        await dialling.open_bulk(other.peer_id, STREAM_KIND, msgspec.msgpack.encode(StreamHeader(b"")), 5.0)
        await until(lambda: runner._streams._unnamed)
        (stream,) = runner._streams._unnamed.values()
        header = msgspec.msgpack.encode(StreamHeader(name))
        taking = asyncio.ensure_future(runner._streams._await_stream(sender, name, 10.0))
        await asyncio.sleep(0)
        runner._streams._on_lost(one.peer_id)
        with pytest.raises(PeerLost, match="after it was given up"):
            await runner._streams._on_stream(one.peer_id, header, stream)
        with pytest.raises(PeerLost):
            await taking
        serving = asyncio.ensure_future(runner._streams._on_stream(one.peer_id, header, stream))
        await asyncio.sleep(0)
        with pytest.raises(ProtocolViolation, match="a second stream for one round"):
            await runner._streams._on_stream(one.peer_id, header, stream)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
