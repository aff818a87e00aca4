"""A member that sends what it must not is left out of its round, over real sockets; the others commit without it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from manyhands.averaging.allreduce.partition import Partition
from manyhands.averaging.allreduce.streams import RoundStream
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.memory import bytes_of
from manyhands.averaging.messages import VOTE, Group, Received, Vote
from manyhands.averaging.rounds import CommittedRound, RoundRunner
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.deadline import time_limit
from manyhands.base.errors import NothingToAverage
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint
from manyhands.transport import Stream
from manyhands.transport.passing import PassingStream
from tests.network import PATIENCE_S
from tests.phases import Connect, around_connects, change_butterflies
from tests.swarm import RUN_ID, FixedMeeting, averagers, identity_of
from tests.sweeps import few_of
from tests.wire import WatchedEndpoint

CONFIG = AveragingConfig(matchmaking_time_s=10.0, averaging_timeout_s=30.0, codec="none")
NUMEL = 20_000
SHAPE = (200, 100)
RANKS = [0, 2]
"""The leader, and another one."""

Member = tuple[RoundRunner, FixedMeeting, Endpoint]
Lie = Callable[[Endpoint], torch.Tensor]
"""Has a peer lie in its next round, and gives it its values."""


def values_of(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def shapes_of(vector_N: torch.Tensor) -> list[tuple[int, int]]:
    """Of one matrix, as in SHAPE, with as many rows as fill the vector."""
    return [(vector_N.numel() // 100, 100)]


class Forging(PassingStream):
    """Sends other bytes in place of the first ones."""

    def __init__(self, stream: Stream, num_first: int, forged: bytes) -> None:
        super().__init__(stream)
        self._num_left = num_first
        self._forged = forged

    async def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        views, self._forged = [memoryview(self._forged)], b""
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            num_skipped = min(self._num_left, len(view))
            self._num_left -= num_skipped
            views.append(view[num_skipped:])
        await super().send(*views)

    async def send_each(self, pieces: Iterator[memoryview]) -> None:
        for piece in pieces:
            await self.send(piece)


def labelled(numel: int, values: bytes) -> bytes:
    """The values of a span as they travel: first their number in the whole vector, and the bytes that follow."""
    return struct.pack("<QQ", numel, len(values)) + values


def forge(peer_id: PeerId, values_for: Callable[[Partition, int], bytes]) -> None:
    """Have a member send each reducer other bytes than its values."""
    partitions: list[Partition] = []
    change_butterflies(peer_id, lambda butterfly: partitions.append(butterfly.partition))

    async def forging(connect: Connect, group: Group, rank: int, other: int, *more: Any) -> RoundStream:
        stream = await connect(group, rank, other, *more)
        partition = partitions[-1]
        if other not in partition.reducers:
            return stream
        num_due = len(labelled(0, b"")) + partition.num_bytes[other]
        forged = labelled(NUMEL, values_for(partition, other))
        return RoundStream(Forging(stream.stream, num_due, forged), kept=stream.kept)

    around_connects(peer_id, forging)


def send_instead(peer_id: PeerId, values_N: torch.Tensor) -> None:
    """Have a member send these values, unencoded, in place of its own."""
    forge(peer_id, lambda partition, other: bytes(bytes_of(values_N[partition.spans[other]])))


def spoil(value: float) -> Lie:
    """It sends values that are not finite."""

    def lie(endpoint: Endpoint) -> torch.Tensor:
        values_N = values_of(7)
        values_N[::100] = value
        send_instead(endpoint.peer_id, values_N)
        return values_of(7)

    return lie


def another_vector(numel: int) -> Lie:
    """Its tensors have other shapes, though it says that it has the same model."""

    def lie(endpoint: Endpoint) -> torch.Tensor:
        return torch.ones(numel)

    return lie


def another_size(factor: float) -> Lie:
    """It sends more or fewer values for each span than are due."""

    def lie(endpoint: Endpoint) -> torch.Tensor:
        forge(endpoint.peer_id, lambda partition, other: bytes(int(partition.num_bytes[other] * factor)))
        return values_of(7)

    return lie


def another_round(endpoint: Endpoint) -> torch.Tensor:
    """It opens its streams for another round than the one it is in."""

    async def connect_elsewhere(
        connect: Connect, group: Group, rank: int, other: int, num_bytes: int, stream_id: bytes, within_s: float
    ) -> RoundStream:
        return await connect(group, rank, other, num_bytes, b"another round", within_s)

    around_connects(endpoint.peer_id, connect_elsewhere)
    return values_of(7)


def watched(member: Member) -> WatchedEndpoint:
    assert isinstance(member[2], WatchedEndpoint)
    return member[2]


def by_id(members: list[Member]) -> list[Member]:
    return sorted(members, key=lambda member: member[2].peer_id)


async def round_with(members: list[Member], liar: int, lie: Lie) -> tuple[PeerId, list[CommittedRound]]:
    """One round; the results of the honest members, who must hold their own mean."""
    vectors = [lie(endpoint) if rank == liar else values_of(rank) for rank, (_, _, endpoint) in enumerate(members)]
    rounds = [
        asyncio.ensure_future(runner.average(vector_N, 1.0, shapes=shapes_of(vector_N)))
        for (runner, _, _), vector_N in zip(members, vectors, strict=True)
    ]
    honest = [rank for rank in range(len(members)) if rank != liar]
    async with time_limit(PATIENCE_S, "waiting for the honest ones"):
        results = await asyncio.gather(*(rounds[rank] for rank in honest))
    rounds[liar].cancel()
    await asyncio.gather(rounds[liar], return_exceptions=True)
    mean = torch.stack([vectors[rank].double() for rank in honest]).mean(dim=0)
    for result in results:
        assert result.averaged_N is not None
        assert torch.equal(result.averaged_N, results[0].averaged_N)
        torch.testing.assert_close(result.averaged_N.double(), mean, rtol=0, atol=1e-6)
        assert result.manifest.weights == [float(rank != liar) for rank in range(len(members))]
    return members[liar][2].peer_id, list(results)


@pytest.mark.parametrize("rank", few_of(RANKS, 1, pytest.mark.long))
@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (spoil(float("nan")), "the values of peer {} are not finite"),
        pytest.param(spoil(float("inf")), "the values of peer {} are not finite", marks=pytest.mark.long),
        pytest.param(spoil(float("-inf")), "the values of peer {} are not finite", marks=pytest.mark.long),
        (another_vector(NUMEL // 2), "the vector of peer {} has 10000 values, not 20000"),
        pytest.param(
            another_vector(NUMEL * 2), "the vector of peer {} has 40000 values, not 20000", marks=pytest.mark.long
        ),
        (another_vector(NUMEL + 400), "the vector of peer {} has 20400 values, not 20000"),
        (another_size(0.5), "peer {} sends 10000 bytes of values, and 20000 are due"),
        (another_size(0.0), "peer {} sends 0 bytes of values, and 20000 are due"),
        (another_size(3.0), "peer {} sends 60000 bytes of values, and 20000 are due"),
    ],
    ids=["nan", "inf", "-inf", "half a vector", "two vectors", "more rows", "too short", "nothing", "too much"],
)
async def test_a_member_that_sends_bad_values_or_sizes_is_left_out(lie: Lie, reason: str, rank: int) -> None:
    async with averagers(4, kind="tls", config=CONFIG) as members:
        liar, results = await round_with(by_id(members), rank, lie)
        for result in results:
            assert result.blamed == (liar,)
            assert reason.format(liar) in result.reason


async def test_chunks_before_a_value_that_is_not_finite_count_and_later_ones_do_not() -> None:
    """Chunks that the same client had delivered before are good, and count; the manifest says which."""

    def lie(endpoint: Endpoint) -> torch.Tensor:
        values_N = values_of(7)
        values_N[8000::100] = float("nan")
        send_instead(endpoint.peer_id, values_N)
        return values_of(7)

    client = sorted(range(4), key=lambda number: identity_of(number).peer_id)[3]
    async with averagers(4, kind="tls", config=CONFIG, clients=(client,)) as members:
        peers = by_id(members)
        vectors = [*map(values_of, range(3)), lie(peers[3][2])]
        rounds = [
            asyncio.ensure_future(runner.average(vector_N, 1.0, shapes=shapes_of(vector_N)))
            for (runner, _, _), vector_N in zip(peers, vectors, strict=True)
        ]
        async with time_limit(PATIENCE_S, "waiting for the honest ones"):
            results = await asyncio.gather(*rounds)
        for result in results[:3]:
            assert result.averaged_N is not None
            assert result.blamed == (peers[3][2].peer_id,)
            counted = [(part.start, part.stop) for part in result.manifest.parts if 3 not in part.absent]
            assert counted == [(0, 6667), (6667, 7691)], "a span, and a chunk of the next one"
            for part in result.manifest.parts:
                ranks = [rank for rank in range(4) if rank not in part.absent]
                mean = torch.stack([vectors[rank][part.start : part.stop].double() for rank in ranks]).mean(dim=0)
                averaged = result.averaged_N[part.start : part.stop].double()
                torch.testing.assert_close(averaged, mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rank", RANKS)
async def test_a_member_that_opens_its_streams_for_another_round_is_left_out(rank: int) -> None:
    """Where it should be dialled it takes no stream of this round: it has sent nothing to those who have dialled it."""
    config = replace(CONFIG, averaging_timeout_s=9.0, matchmaking_time_s=5.0)
    async with averagers(4, kind="tls", config=config) as members:
        liar, results = await round_with(by_id(members), rank, another_round)
        for result in results:
            assert result.blamed == (liar,)
            is_named = "it opened a stream for another round" in result.reason
            assert is_named or f"peer {liar} is too slow" in result.reason


@pytest.mark.parametrize("rank", [1, 2])
async def test_a_member_that_votes_too_early_is_blamed(rank: int) -> None:
    """It votes on an exchange that has not begun."""

    async def vote_early(vote: Vote, call: Callable[[Vote], Awaitable[Received]]) -> Received:
        return await call(msgspec.structs.replace(vote, exchange=vote.exchange + 1))

    async with averagers(4, kind="tls", config=CONFIG) as members:
        peers = by_id(members)
        vectors = [values_of(7) if number == rank else values_of(number) for number in range(4)]
        voting, counting = (RunEndpoint(peers[number][2], RUN_ID) for number in (rank, 0))
        watched(peers[rank]).changes[voting.method(VOTE).name] = vote_early
        has_voted, serve = asyncio.Event(), watched(peers[0]).handlers[counting.method(VOTE).name]

        async def note(remote: PeerId, vote: Vote) -> Received:
            if remote != peers[rank][2].peer_id:
                await has_voted.wait()  # else the others have committed before
            has_voted.set()
            received: Received = serve(remote, vote)
            return received

        counting.unhandle(VOTE)
        counting.handle(VOTE, note)
        rounds = [
            asyncio.ensure_future(runner.average(vector_N, 1.0, shapes=shapes_of(vector_N)))
            for (runner, _, _), vector_N in zip(peers, vectors, strict=True)
        ]
        async with time_limit(PATIENCE_S, "waiting for the rounds"):
            results = await asyncio.gather(*rounds)
        mean = torch.stack([vector_N.double() for vector_N in vectors]).mean(dim=0)
        for result in results:
            assert result.averaged_N is not None, "its values were good, and count"
            torch.testing.assert_close(result.averaged_N.double(), mean, rtol=0, atol=1e-6)
            assert result.blamed == (peers[rank][2].peer_id,)
            assert f"{peers[rank][2].peer_id} voted in an exchange that has not begun" in result.reason


class Spy(PassingStream):
    """Keeps what is sent."""

    def __init__(self, stream: Stream, sent: list[bytearray]) -> None:
        super().__init__(stream)
        self._sent = sent

    async def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        self._sent += map(bytearray, buffers)
        await super().send(*buffers)

    async def send_each(self, pieces: Iterator[memoryview]) -> None:
        def kept() -> Iterator[memoryview]:
            for piece in pieces:
                self._sent.append(bytearray(piece))
                yield piece

        await super().send_each(kept())


@pytest.mark.parametrize("value", few_of([float("nan"), float("inf"), float("-inf")]))
@pytest.mark.parametrize("numel", few_of([NUMEL, 40 * NUMEL]))
@pytest.mark.parametrize("at", [0, 1, 2, 3])
async def test_a_member_never_sends_its_own_values_that_are_not_finite(value: float, numel: int, at: int) -> None:
    """Wherever they are: in its own span, or in that of another member, which it does not reduce itself."""
    async with averagers(4, kind="tls", config=CONFIG) as members:
        peers = by_id(members)
        vectors = [torch.ones(numel) for _ in peers]
        vectors[2][at * numel // 4 + numel // 5] = value
        sent: list[bytearray] = []

        async def spied(connect: Connect, *arguments: Any) -> RoundStream:
            return RoundStream(Spy((await connect(*arguments)).stream, sent))

        around_connects(peers[2][2].peer_id, spied)
        rounds = (runner.average(vector_N, 1.0) for (runner, _, _), vector_N in zip(peers, vectors, strict=True))
        async with time_limit(PATIENCE_S, "waiting for the rounds"):
            results = await asyncio.gather(*rounds)
        for result in results:
            if result is not results[2]:
                assert result.averaged_N is not None
                assert torch.equal(result.averaged_N, torch.ones(numel))
            assert result.blamed == (peers[2][2].peer_id,)
            assert f"the values of peer {peers[2][2].peer_id} are not finite" in result.reason
        chunks = [torch.frombuffer(piece, dtype=torch.float32) for piece in sent if len(piece) % 4 == 0]
        assert all(bool(chunk.isfinite().all()) for chunk in chunks)


async def test_if_nobody_has_a_weight_there_is_no_mean() -> None:
    async with averagers(3, kind="tls", config=CONFIG) as members:
        rounds = (
            runner.average(torch.full((NUMEL,), float("nan")), 0.0, shapes=[SHAPE]) for runner, _, _ in by_id(members)
        )
        async with time_limit(PATIENCE_S, "waiting for the rounds"):
            outcomes = await asyncio.gather(*rounds, return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, NothingToAverage)
            assert outcome.reason == "no member has any samples"


async def test_a_member_that_was_left_out_is_not_awaited_in_the_next_round() -> None:
    """Nobody waits for it in the next round; only a fresh record of it makes it expected again."""
    async with averagers(4, kind="tls", config=CONFIG) as members:
        peers = by_id(members)
        liar, _ = await round_with(peers, 2, spoil(float("nan")))
        honest = [peers[0], peers[1], peers[3]]
        for _, roster, _ in honest:
            assert roster.missing == [liar]
            assert liar not in roster.expected()
        async with time_limit(9.0, "waiting for a round without it"):  # less than the matchmaking time
            results = await asyncio.gather(
                *(runner.average(values_of(0), 1.0, shapes=[SHAPE]) for runner, _, _ in honest)
            )
        assert [len(result.manifest.members) for result in results] == [3, 3, 3]
        assert all(result.blamed == () for result in results)
