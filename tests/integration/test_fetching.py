"""A member that lacks means of a round that committed fetches them from one that holds them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from manyhands.averaging.allreduce.means import Means
from manyhands.averaging.commit import recovery
from manyhands.averaging.commit.recovery import MEANS_KIND, Fetching, MeansHeader
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.memory import bytes_of
from manyhands.averaging.messages import Group
from manyhands.averaging.rounds import CommittedRound, RoundRunner
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerLost, RoundAborted
from manyhands.rpc import Endpoint
from manyhands.transport import Stream
from tests.network import PATIENCE_S
from tests.swarm import RUN_ID, FixedRoster, averagers

CONFIG = AveragingConfig(
    matchmaking_time_s=10.0, averaging_timeout_s=30.0, stream_timeout_s=5.0, chunk_bytes=4096, codec="none"
)
SHAPE = (200, 100)
NUMEL = 20_000

Member = tuple[RoundRunner, FixedRoster, Endpoint]


def by_id(members: list[Member]) -> list[RoundRunner]:
    return [runner for runner, _, _ in sorted(members, key=lambda member: member[2].peer_id)]


def values_of(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def cut_off(runner: RoundRunner, reducer: int) -> None:
    """Have a member lose its stream to a reducer before the means: the others average that part again."""
    exchange = runner._exchange

    async def with_losses(group: Group, rank: int, butterfly: Any, stream_id: bytes) -> torch.Tensor:
        rooms_for_means = butterfly._rooms_for_means

        def rooms_for_some(other: int) -> Iterator[memoryview]:
            if other == reducer:
                raise RoundAborted("the test cut it off", [group.members[other].peer_id])
            yield from rooms_for_means(other)

        butterfly._rooms_for_means = rooms_for_some
        return await exchange(group, rank, butterfly, stream_id)

    runner._exchange = with_losses  # type: ignore[method-assign]


def lose_means(runner: RoundRunner, reducer: int) -> None:
    """Have a member lack the means of a reducer when the others commit."""
    exchange = runner._exchange

    async def with_losses(group: Group, rank: int, butterfly: Any, stream_id: bytes) -> torch.Tensor:
        averaged_N = await exchange(group, rank, butterfly, stream_id)
        await asyncio.shield(runner._agreement._rounds[group.group_id].verdict)
        del butterfly._told[reducer]
        butterfly.means().pieces[reducer].zero_()
        return averaged_N

    runner._exchange = with_losses  # type: ignore[method-assign]


def say_that_somebody_is_lost(runners: list[RoundRunner]) -> None:
    for runner in runners:
        runner._agreement.has_lost = lambda _: True  # type: ignore[method-assign]


async def average(runners: list[RoundRunner]) -> list[CommittedRound]:
    async with time_limit(PATIENCE_S, "waiting for the rounds to end"):
        rounds = (runner.average(values_of(n), 1.0, shapes=[SHAPE]) for n, runner in enumerate(runners))
        return list(await asyncio.gather(*rounds))


def have_it_send(runner: RoundRunner, send: Callable[[Stream, Means], Awaitable[None]]) -> None:
    runner._fetching._send = send  # type: ignore[method-assign]


@pytest.mark.parametrize("codec", ["none", "int8", "int4"])
@pytest.mark.parametrize("kind", ["memory", "tls"])
@pytest.mark.parametrize("fault", [lose_means, cut_off])
async def test_who_lacks_some_means_fetches_them(
    codec: str, kind: str, fault: Callable[[RoundRunner, int], None]
) -> None:
    """Of a result of one ballot, and of one that the others averaged again."""
    async with averagers(4, kind=kind, config=replace(CONFIG, codec=codec)) as members:
        runners = by_id(members)
        say_that_somebody_is_lost(runners)
        fault(runners[3], 1)
        results = await average(runners)
        assert results[0].averaged_N is not None
        for result in results:
            assert result.manifest == results[0].manifest
            assert result.averaged_N is not None
            assert torch.equal(result.averaged_N, results[0].averaged_N)


async def test_only_what_is_lacking_is_sent() -> None:
    async with averagers(4, config=CONFIG) as members:
        runners = by_id(members)
        say_that_somebody_is_lost(runners)
        lose_means(runners[3], 1)
        sent: list[int] = []

        async def note(stream: Stream, means: Means) -> None:
            before = stream.bytes_sent
            await Fetching._send(runners[0]._fetching, stream, means)
            sent.append(stream.bytes_sent - before)

        have_it_send(runners[0], note)
        results = await average(runners)
        assert results[3].averaged_N is not None
        assert sent == [1 + 4 * 32 + NUMEL], "the digests, and a quarter of the vector of four bytes each"


async def test_a_copy_is_kept_if_somebody_was_lost_until_the_next_round() -> None:
    """The vector itself is the caller's, which may have changed it meanwhile."""
    async with averagers(4, config=CONFIG) as members:
        runners = by_id(members)
        (result, *_) = await average(runners)
        assert runners[0]._fetching._kept.get(result.manifest.digest) is None
        runners[0]._agreement.has_lost = lambda _: True  # type: ignore[method-assign]
        (result, *_) = await average(runners)
        kept = runners[0]._fetching._kept.get(result.manifest.digest)
        assert kept is not None
        before = kept.digests()
        assert result.averaged_N is not None
        result.averaged_N.zero_()
        assert kept.digests() == before
        runners[0]._agreement.has_lost = lambda _: False  # type: ignore[method-assign]
        await average(runners)
        assert runners[0]._fetching._kept.get(result.manifest.digest) is None


async def wrong_means(stream: Stream, means: Means) -> None:
    await stream.send(bytes([means.spans_ballots]), *means.digests())
    await stream.receive_into(memoryview(bytearray(len(means.pieces))))
    await stream.send(bytes_of(torch.zeros(NUMEL)))


async def wrong_digests(stream: Stream, means: Means) -> None:
    await stream.send(bytes([means.spans_ballots]), bytes(32 * len(means.pieces)))


async def another_kind(stream: Stream, means: Means) -> None:
    await stream.send(b"\x01", *means.digests())


async def nothing(stream: Stream, means: Means) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("lie", [wrong_means, wrong_digests, another_kind, nothing])
async def test_who_sends_something_else_or_nothing_is_passed_over(
    lie: Callable[[Stream, Means], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "HOLDER_SILENT_S", 0.2)
    async with averagers(4, kind="tls", config=CONFIG) as members:
        runners = by_id(members)
        say_that_somebody_is_lost(runners)
        lose_means(runners[3], 1)
        have_it_send(runners[0], lie)
        results = await average(runners)
        assert results[3].averaged_N is not None
        assert results[2].averaged_N is not None
        assert torch.equal(results[3].averaged_N, results[2].averaged_N)


async def test_if_nobody_sends_it_the_member_says_that_it_lacks_the_result() -> None:
    async with averagers(4, config=CONFIG) as members:
        runners = by_id(members)
        say_that_somebody_is_lost(runners)
        lose_means(runners[3], 1)
        for runner in runners:
            have_it_send(runner, wrong_digests)
        results = await average(runners)
        assert [result.averaged_N is not None for result in results] == [True, True, True, False]
        assert results[3].manifest == results[0].manifest


async def test_strangers_and_unreadable_requests_get_nothing() -> None:
    async with averagers(4, config=CONFIG) as members:
        runners = by_id(members)
        say_that_somebody_is_lost(runners)
        *insiders, stranger = sorted(members, key=lambda member: member[2].peer_id)
        for _, roster, _ in insiders:
            roster.missing = [stranger[2].peer_id]
        results = await average(runners[:3])
        holder = insiders[1][2]
        assert runners[1]._fetching._kept.get(results[1].manifest.digest) is not None
        good = msgspec.msgpack.encode(MeansHeader(results[1].manifest.group_id, results[1].manifest.digest))
        for header in (good, b"\xff garbage"):
            stream = await RunEndpoint(stranger[2], RUN_ID).open_bulk(holder.peer_id, MEANS_KIND, header, 5.0)
            with pytest.raises(PeerLost):
                await stream.receive_into(memoryview(bytearray(1)))
            stranger[2].release(stream)
        assert holder.counters["protocol_violations"] == 1
