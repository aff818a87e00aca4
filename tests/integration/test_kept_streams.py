"""Streams that stay from one round to the next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import torch

from manyhands.averaging.allreduce import streams
from manyhands.averaging.allreduce.streams import PartnerStreams
from manyhands.averaging.averager_presence import next_position
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import NAME_BYTES, STREAM_KIND, Group, Member, Position, StreamHeader
from manyhands.averaging.rounds import RoundMeter, RoundRunner
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerLost, ProtocolViolation, RoundAborted
from manyhands.rpc import Endpoint
from manyhands.runtime import TaskOwner
from manyhands.transport import Stream
from tests.network import PATIENCE_S, endpoints
from tests.phases import before_voting, forget, rounds_of
from tests.swarm import RUN_ID, FixedMeeting, averagers
from tests.wire import WatchedEndpoint

CONFIG = AveragingConfig(matchmaking_time_s=3.0, averaging_timeout_s=20.0, codec="none")
NUMEL = 50
Members = list[tuple[RoundRunner, FixedMeeting, Endpoint]]


async def until(condition: Callable[[], Any]) -> None:
    async with time_limit(PATIENCE_S, "waiting for the others"):
        while not condition():
            await asyncio.sleep(0.001)


async def closed(streams: Iterable[Stream]) -> None:
    """Wait until the streams are closed."""
    async with time_limit(PATIENCE_S, "waiting for streams to be closed"):
        await asyncio.gather(*(stream.wait_closed() for stream in streams))


async def is_open(stream: Stream) -> bool:
    """Whether a stream stays open although its peer could have closed it by now."""
    closing = asyncio.ensure_future(stream.wait_closed())
    for _ in range(50):
        await asyncio.sleep(0)
    is_closed = closing.done()
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    return not is_closed


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


def watched(endpoint: Endpoint) -> WatchedEndpoint:
    assert isinstance(endpoint, WatchedEndpoint)
    return endpoint


def num_dialled(members: Members) -> int:
    """Streams that all of them have dialled so far; each round dials those that were not kept."""
    return sum(watched(endpoint).num_opened for _, _, endpoint in members)


def dialled(members: Members) -> list[Stream]:
    """The streams that they have dialled; between two rounds, the kept ones."""
    return [stream for _, _, endpoint in members for stream in watched(endpoint).opened]


def forbid_dials(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a stream was dialled")

    for _, _, endpoint in members:
        monkeypatch.setattr(endpoint, "open_bulk", refuse)


@pytest.mark.parametrize("kind", ["memory", "tls"])
async def test_later_rounds_use_the_kept_streams_and_dial_none(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with averagers(3, kind=kind, config=CONFIG, span_numel=1) as members:
        assert await mean_of(members) == [1.0] * 3
        forbid_dials(members, monkeypatch)
        for _ in range(3):
            meter = RoundMeter()
            assert await mean_of(members, meter) == [1.0] * 3
            assert meter.num_bytes_received < 2 * 4 * NUMEL + 200, "bytes of earlier rounds do not count"


async def test_a_kept_stream_that_has_died_is_dialled_again() -> None:
    async with averagers(3, config=CONFIG, span_numel=1) as members:
        await mean_of(members)
        for stream in dialled(members):
            stream.abort()
        assert await mean_of(members) == [1.0] * 3


@pytest.mark.parametrize("kind", ["memory", "tls"])
async def test_a_kept_stream_that_the_other_end_closed_is_dialled_again(kind: str) -> None:
    async with averagers(3, kind=kind, config=CONFIG, span_numel=1) as members:
        await mean_of(members)
        for _, _, endpoint in members:
            for stream in watched(endpoint).accepted:
                stream.abort()
        await closed(dialled(members))
        assert await mean_of(members) == [1.0] * 3


async def test_no_stream_is_kept_after_a_round_that_was_aborted() -> None:
    """A member whose exchange was cut short has closed its end of a stream that looks idle at the other one."""
    async with averagers(4, config=CONFIG, span_numel=1) as members:
        leader = min(endpoint.peer_id for _, _, endpoint in members)
        begun, gave_up = rounds_of(leader), asyncio.Event()

        async def give_up() -> None:
            gave_up.set()
            begun[0].give_up("it gave up")

        for _, _, endpoint in members:
            before_voting(endpoint.peer_id, give_up if endpoint.peer_id == leader else gave_up.wait)
        vector_N = torch.ones(NUMEL)
        averaging = [runner.average(vector_N, 1.0) for runner, _, _ in members]
        results = await asyncio.gather(*averaging, return_exceptions=True)
        assert all(isinstance(result, RoundAborted) for result in results), results
        forget()
        for _, meeting, _ in members:
            meeting.missing.clear()
        assert num_dialled(members) == 6
        assert await mean_of(members) == [1.5] * 4
        assert num_dialled(members) == 12, "each of them once more"


async def test_a_kept_stream_that_was_unused_for_long_is_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with averagers(3, config=CONFIG, span_numel=1) as members:
        await mean_of(members)
        assert num_dialled(members) == 3
        monkeypatch.setattr(streams, "MINUTE_S", 0.0)
        assert await mean_of(members) == [1.0] * 3
        assert num_dialled(members) == 6


async def test_an_idle_kept_stream_is_closed_by_the_side_that_accepted_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "TWO_MINUTES_S", 0.05)
    async with averagers(2, config=CONFIG, span_numel=1) as members:
        await mean_of(members)
        (kept,) = dialled(members)
        await closed([kept])
        assert await mean_of(members) == [0.5] * 2
        assert num_dialled(members) == 2


async def test_a_peer_at_its_limit_of_accepted_streams_keeps_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_UNNAMED", 0)
    async with averagers(2, config=CONFIG, span_numel=1) as members:
        for number in range(2):
            assert await mean_of(members) == [0.5] * 2
            await closed(dialled(members))
            assert num_dialled(members) == number + 1


@pytest.mark.parametrize("rank", [0, 2], ids=["dials", "is dialled"])
async def test_losing_the_control_connection_ends_kept_streams_at_both_ends(rank: int) -> None:
    async with averagers(3, config=CONFIG, span_numel=1) as members:
        await mean_of(members)
        lost = sorted(members, key=lambda member: member[2].peer_id)[rank]
        others = [member for member in members if member is not lost]
        cut_off = watched(lost[2])
        kept = [*cut_off.opened, *cut_off.accepted]
        assert len(kept) == 2
        (other,) = [stream for stream in dialled(others) if stream.remote != cut_off.peer_id]
        for _, _, endpoint in others:  # only they notice it
            for on_lost in list(endpoint.on_lost):
                on_lost(cut_off.peer_id)
        await closed(kept)
        await lost[0].close()
        assert await is_open(other)


async def test_a_peer_keeps_streams_up_to_a_limit_and_dials_the_others_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_KEPT", 1)
    async with averagers(3, config=CONFIG, span_numel=1) as members:
        for number in range(3):
            assert await mean_of(members) == [1.0] * 3
            assert num_dialled(members) == 3 + number, "one of three is not kept"


async def test_streams_of_clients_are_kept_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_KEPT", 1)
    async with averagers(4, clients=[1, 2, 3], config=CONFIG, span_numel=1) as members:
        assert await mean_of(members) == [1.5] * 4
        forbid_dials(members, monkeypatch)
        assert await mean_of(members) == [1.5] * 4


# between two peers that make no round


NAME = bytes(range(NAME_BYTES))
UNNAMED = msgspec.msgpack.encode(StreamHeader(b""))
KIND = f"{RUN_ID}.{STREAM_KIND}"


@asynccontextmanager
async def accepting() -> AsyncIterator[tuple[RunEndpoint, WatchedEndpoint, Callable[[], Awaitable[Stream]]]]:
    """A peer that dials, one that accepts streams, and how the latter awaits one for the round of this name."""
    async with endpoints(2) as (one, other):
        tasks = TaskOwner("test")
        accepted = PartnerStreams(RunEndpoint(other, RUN_ID), CONFIG, tasks)
        members = [Member(endpoint.peer_id, [], is_client=False, weight=1.0) for endpoint in (one, other)]
        group = Group(NAME, one.peer_id, Position(0, b"start"), members)
        yield RunEndpoint(one, RUN_ID), watched(other), lambda: accepted.connect(group, 1, 0, 0, NAME, 10.0)
        accepted.close()
        await tasks.close()


async def test_a_peer_has_one_stream_without_a_name_and_a_newer_one_replaces_it() -> None:
    async with accepting() as (one, other, named):
        first, second = [await one.open_bulk(other.peer_id, STREAM_KIND, UNNAMED, 5.0) for _ in range(2)]
        with pytest.raises(PeerLost):
            await first.receive_into(memoryview(bytearray(1)))
        await second.send(NAME)
        assert (await named()).remote == one.peer_id
        third = await one.open_bulk(other.peer_id, STREAM_KIND, UNNAMED, 5.0)
        assert await is_open(second), "it has a name"
        for stream in (first, second, third):
            one.release(stream)


async def test_strangers_hold_no_streams_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for long, nor many at once. They need no record, and no control connection."""
    async with averagers(3, config=CONFIG, span_numel=1) as ((_, _, one), (_, _, other), (_, _, called)):
        monkeypatch.setattr(streams, "MAX_UNNAMED", 1)
        first = await RunEndpoint(one, RUN_ID).open_bulk(called.peer_id, STREAM_KIND, UNNAMED, 5.0)
        await until(lambda: watched(called).accepted)
        second = await RunEndpoint(other, RUN_ID).open_bulk(called.peer_id, STREAM_KIND, UNNAMED, 5.0)
        await closed([second])
        assert await is_open(first)
        monkeypatch.setattr(streams, "TWO_MINUTES_S", 0.05)
        third = await RunEndpoint(one, RUN_ID).open_bulk(called.peer_id, STREAM_KIND, UNNAMED, 5.0)
        await closed([third])
        for stream, endpoint in ((first, one), (second, other), (third, one)):
            endpoint.release(stream)


async def test_a_stream_that_comes_as_its_sender_is_given_up_breaks_no_rule() -> None:
    """Its sender could not know. A second one for one round does break it."""
    async with accepting() as (one, other, named):
        await one.open_bulk(other.peer_id, STREAM_KIND, UNNAMED, 5.0)
        await until(lambda: other.accepted)
        (stream,) = other.accepted
        header, accept = msgspec.msgpack.encode(StreamHeader(NAME)), other.acceptors[KIND]
        awaiting = asyncio.ensure_future(named())
        await asyncio.sleep(0)
        for on_lost in list(other.on_lost):
            on_lost(one.peer_id)
        with pytest.raises(PeerLost, match="after it was given up"):
            await accept(one.peer_id, header, stream)
        with pytest.raises(RoundAborted, match="it was lost before it opened its stream"):
            await awaiting
        serving = asyncio.ensure_future(accept(one.peer_id, header, stream))
        await asyncio.sleep(0)
        with pytest.raises(ProtocolViolation, match="a second stream for one round"):
            await accept(one.peer_id, header, stream)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
