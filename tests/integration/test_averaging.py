"""Rounds over real sockets and in memory: exact, identical everywhere, all or nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from manyhands.averaging.allreduce.reducer import SpanReducer
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import Position
from manyhands.averaging.rounds import CommittedRound
from manyhands.base.deadline import time_limit
from manyhands.base.errors import RoundAborted
from manyhands.base.identity import PeerId
from tests.swarm import averagers


def vectors(num_peers: int, numel: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator) for _ in range(num_peers)]


def weighted_mean(values: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    total = sum(value.double() * weight for value, weight in zip(values, weights, strict=True))
    return (total / sum(weights)).float()


def in_vain() -> torch.Tensor:
    """The values once more, of a member whose means may be written over them; nobody is lost."""
    raise AssertionError("a round in which nobody is lost needs the values once")


@pytest.mark.parametrize("kind", ["memory", "tls"])
@pytest.mark.parametrize(
    ("num_peers", "numel", "clients"),
    [
        (2, 1, ()),
        (2, 10_007, (1,)),
        (3, 50_000, ()),
        pytest.param(4, 600_000, (), marks=pytest.mark.long),
        (5, 7, ()),
        (4, 33_333, (0, 2)),
        (3, 0, ()),
    ],
)
async def test_every_member_holds_the_same_weighted_mean(
    kind: str, num_peers: int, numel: int, clients: tuple[int, ...]
) -> None:
    values = vectors(num_peers, numel)
    weights = [float(1 + 3 * rank) for rank in range(num_peers)]
    expected = weighted_mean(values, weights)
    async with averagers(num_peers, kind=kind, clients=clients) as members:
        results: list[CommittedRound] = await asyncio.gather(
            *(
                averager.average(values[i], weights[i], refill=in_vain if i % 2 else None)
                for i, (averager, _, _) in enumerate(members)
            )
        )
    for result in results:
        assert torch.equal(result.averaged_N, results[0].averaged_N)
        assert result.manifest == results[0].manifest
        torch.testing.assert_close(result.averaged_N, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("num_peers", "numel", "span_numel", "clients", "num_streams"),
    [
        (6, 8, 4096, (), 5),  # one reducer
        (6, 8, 4096, (0, 3), 5),
        (6, 100, 40, (), 9),  # two
        (6, 100, 25, (1, 2), 14),  # four of the four that can, and two clients
        (6, 100, 1, (), 15),  # all
    ],
)
async def test_a_small_vector_is_exchanged_with_the_few_that_reduce_it(
    num_peers: int, numel: int, span_numel: int, clients: tuple[int, ...], num_streams: int
) -> None:
    values = vectors(num_peers, numel)
    weights = [float(1 + rank) for rank in range(num_peers)]
    opened: list[str] = []
    async with averagers(num_peers, clients=clients, config=AveragingConfig(), span_numel=span_numel) as members:
        for _, _, endpoint in members:
            open_bulk = endpoint.open_bulk

            def count(peer_id: PeerId, *args: Any, open_bulk: Any = open_bulk, **options: Any) -> Any:
                opened.append(peer_id)
                return open_bulk(peer_id, *args, **options)

            endpoint.open_bulk = count  # type: ignore[method-assign]
        results = await asyncio.gather(
            *(averager.average(values[i], weights[i]) for i, (averager, _, _) in enumerate(members))
        )
    assert len(opened) == num_streams
    for result in results:
        assert torch.equal(result.averaged_N, results[0].averaged_N)
        assert result.manifest == results[0].manifest
        assert len(result.manifest.members) == num_peers
        torch.testing.assert_close(result.averaged_N, weighted_mean(values, weights), rtol=1e-6, atol=1e-6)


async def test_a_client_that_is_closed_in_mid_round_connects_to_no_others() -> None:
    async with averagers(4, clients=(1, 2), kind="tls") as members:
        averager, _, endpoint = members[1]
        round_over = averager.matchmaker.round_over
        ended: list[tuple[Any, dict[str, Any]]] = []
        for client, _, of_client in members[1:3]:
            await of_client.call_on(members[0][2].peer_id, 5.0)
            client.matchmaker.round_over = lambda *args, **options: ended.append((args, options))  # type: ignore[method-assign]
        await asyncio.gather(*(averager.average(torch.ones(5), 1.0) for averager, _, _ in members))
        assert endpoint.outside.is_known
        assert not endpoint.is_connected(members[2][2].peer_id)
        await averager.close()
        args, options = ended[0]
        round_over(*args, **options)


async def test_a_member_without_samples_gets_the_mean_of_the_others() -> None:
    values = vectors(3, 1000)
    values[1].fill_(float("nan"))  # must not travel
    async with averagers(3) as members:
        results = await asyncio.gather(
            *(averager.average(values[i], 0.0 if i == 1 else 2.0) for i, (averager, _, _) in enumerate(members))
        )
    for result in results:
        torch.testing.assert_close(result.averaged_N, weighted_mean([values[0], values[2]], [1.0, 1.0]))


async def test_without_any_samples_nothing_commits() -> None:
    async with averagers(2) as members:
        results = await asyncio.gather(
            *(averager.average(torch.zeros(5), 0.0) for averager, _, _ in members), return_exceptions=True
        )
    assert all(isinstance(result, RoundAborted) and "no member has any samples" in result.reason for result in results)


async def test_a_round_starts_as_soon_as_all_are_there() -> None:
    config = AveragingConfig(matchmaking_time_s=15.0)
    async with averagers(3, config=config) as members, time_limit(12.0, "averaging"):
        await asyncio.gather(*(averager.average(torch.ones(5), 1.0) for averager, _, _ in members))


async def test_peers_that_do_not_come_are_waited_for_until_the_matchmaking_time() -> None:
    config = AveragingConfig(matchmaking_time_s=0.5, averaging_timeout_s=10.0)
    async with averagers(3, config=config) as members:
        results = await asyncio.gather(*(averager.average(torch.ones(5), 1.0) for averager, _, _ in members[:2]))
        absent = members[2][2].peer_id
        assert all(len(result.manifest.members) == 2 for result in results)
        leader = next(roster for _, roster, endpoint in members if endpoint.peer_id == results[0].manifest.members[0])
        assert leader.missing == [absent]
        assert members[2][1].num_calls >= 1, "the absent peer is called to the round"


async def test_a_member_that_only_sends_dies_in_mid_round_and_the_others_commit_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have_met: set[tuple[SpanReducer, int]] = set()
    put = SpanReducer.put

    def noted(self: SpanReducer, rank: int, encoded: torch.Tensor) -> None:
        put(self, rank, encoded)
        have_met.add((self, rank))

    monkeypatch.setattr(SpanReducer, "put", noted)
    numel = 4_000_000
    values = vectors(4, numel)
    async with averagers(4, kind="tls", config=AveragingConfig(), clients=(3,), chunk_numel=1 << 14) as members:
        victim, _, victim_endpoint = members[3]
        dying = asyncio.ensure_future(victim.average(values[3], 1.0))
        others = [
            asyncio.ensure_future(averager.average(values[i].clone(), 1.0, refill=values[i].clone if i else None))
            for i, (averager, _, _) in enumerate(members[:3])
        ]
        while len(have_met) < 3 * 3:  # the first chunk of 62 has come from everybody
            await asyncio.sleep(0)
        dying.cancel()
        await victim_endpoint.close()
        results = await asyncio.gather(*others)
        await asyncio.gather(dying, return_exceptions=True)
    manifest = results[0].manifest
    rank = manifest.members.index(victim_endpoint.peer_id)
    assert any(rank in part.absent for part in manifest.parts)
    assert any(rank not in part.absent for part in manifest.parts), "what it has delivered counts"
    for result in results:
        assert result.manifest == manifest
        assert result.averaged_N is not None
        assert torch.equal(result.averaged_N, results[0].averaged_N)
    for part in manifest.parts:
        here = slice(part.start, part.stop)
        contributors = values[:3] if rank in part.absent else values
        mean = weighted_mean([vector[here] for vector in contributors], [1.0] * len(contributors))
        torch.testing.assert_close(results[0].averaged_N[here], mean, rtol=1e-6, atol=1e-6)


async def test_a_peer_that_is_behind_is_told_so() -> None:
    async with averagers(2, config=AveragingConfig(matchmaking_time_s=0.5, averaging_timeout_s=5.0)) as members:
        ahead, behind = sorted(members, key=lambda member: member[2].peer_id)
        ahead[1].at = Position(7, b"later")
        with pytest.raises(RoundAborted, match="the run is at step 7, not 0"):
            await behind[0].average(torch.ones(5), 1.0)


async def test_peers_of_another_lineage_do_not_average() -> None:
    async with averagers(2, config=AveragingConfig(matchmaking_time_s=0.3, averaging_timeout_s=5.0)) as members:
        members[1][1].at = Position(0, b"another start")
        results = await asyncio.gather(
            *(averager.average(torch.ones(5), 1.0) for averager, _, _ in members), return_exceptions=True
        )
    assert all(isinstance(result, RoundAborted) for result in results)


async def test_a_run_of_clients_only_says_so_at_once() -> None:
    async with averagers(2, clients=(0, 1)) as members:
        with pytest.raises(RoundAborted, match="none of the 2 peers can be dialled"):
            await members[0][0].average(torch.ones(5), 1.0)


async def test_a_round_to_which_nobody_comes_aborts() -> None:
    config = AveragingConfig(matchmaking_time_s=0.3, averaging_timeout_s=5.0)
    async with averagers(2, config=config) as members:
        leader = min(members, key=lambda member: member[2].peer_id)
        with pytest.raises(RoundAborted, match="the expected peer did not come"):
            await leader[0].average(torch.ones(5), 1.0)
