"""What one member can do to the mean of its group at most, over real sockets; the other members commit without it."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence

import pytest
import torch

from manyhands.averaging.codecs import Uncompared, Unscaled
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.round.limits import MemberLimits
from manyhands.averaging.rounds import CommittedRound
from manyhands.base.deadline import time_limit
from tests.liars import say_norm
from tests.network import PATIENCE_S
from tests.swarm import averagers
from tests.sweeps import few_of

NUMEL = 300_000
SHAPE = (3000, 100)


def values_of(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


async def round_of(
    vectors: Sequence[torch.Tensor],
    weights: Sequence[float] | None = None,
    codec: str = "none",
    norms_before: Sequence[float | None] | None = None,
    aggregate: str = "clip",
    said: Mapping[int, float] | None = None,
    shapes: Sequence[Sequence[int]] = (SHAPE,),
) -> list[CommittedRound]:
    """A round of peers with these vectors.

    Args:
        said: by rank, the norm that a peer says, if it lies.
    """
    config = AveragingConfig(matchmaking_time_s=10.0, averaging_timeout_s=30.0, codec=codec, aggregate=aggregate)
    async with averagers(len(vectors), config=config, limits=MemberLimits(), chunk_numel=100_000) as members:
        peers = sorted(members, key=lambda member: member[2].peer_id)
        for rank, norm in (said or {}).items():
            say_norm(peers[rank][0].matchmaker, norm)
        weights, norms_before = weights or [1.0] * len(vectors), norms_before or [None] * len(vectors)
        async with time_limit(PATIENCE_S, "waiting for the round"):
            return await asyncio.gather(
                *(
                    runner.average(vector_N, weight, shapes=shapes, norm_before=norm)
                    for (runner, _, _), vector_N, weight, norm in zip(
                        peers, vectors, weights, norms_before, strict=True
                    )
                )
            )


def check(
    results: Sequence[CommittedRound], vectors: Sequence[torch.Tensor], weights: Sequence[float], atol: float
) -> None:
    total = sum(vector.double() * weight for vector, weight in zip(vectors, weights, strict=True) if weight)
    for result, weight in zip(results, weights, strict=True):
        assert result.manifest.weights == pytest.approx(list(weights))
        if weight:
            assert result.averaged_N is not None
            assert torch.equal(result.averaged_N, next(r.averaged_N for r in results if r.averaged_N is not None))
            torch.testing.assert_close(result.averaged_N.double(), total / sum(weights), rtol=0, atol=atol)


async def test_a_huge_weight_counts_for_three_times_the_median() -> None:
    vectors = list(map(values_of, range(4)))
    results = await round_of(vectors, [8.0, 2.0**52, 10.0, 12.0])
    check(results, vectors, [8.0, 33.0, 10.0, 12.0], 1e-6)


async def test_in_a_group_of_five_one_member_is_a_quarter_of_the_mean() -> None:
    vectors = list(map(values_of, range(5)))
    results = await round_of(vectors, [8.0, 8.0, 8.0, 2.0**52, 6.0])
    check(results, vectors, [8.0, 8.0, 8.0, 10.0, 6.0], 1e-6)


@pytest.mark.parametrize("codec", few_of(["none", "int4", "fp16", "int8"], 2, pytest.mark.long))
@pytest.mark.parametrize("rank", few_of([2, 0], 1, pytest.mark.long), ids=["other", "leader"])
@pytest.mark.parametrize("kind", ["reversed", "everywhere", "one value"])
async def test_values_that_are_too_large_are_left_out_and_the_member_is_named(kind: str, rank: int, codec: str) -> None:
    vectors = list(map(values_of, range(4)))
    if kind == "reversed":
        vectors[rank] *= -100.0
    elif kind == "everywhere":
        vectors[rank][:] = 1e38
    else:
        vectors[rank][123_456] = 3e37
    results = await round_of(vectors, codec=codec, said={rank: values_of(rank).norm().item()})
    (liar,) = {result.manifest.members[rank] for result in results}
    check(results, vectors, [float(other != rank) for other in range(4)], 0.5 if codec == "int4" else 0.02)
    for result in results:
        assert result.blamed == (liar,)
        assert f"the values of peer {liar} are not finite, or larger than it has said" in result.reason


@pytest.mark.parametrize("codec", few_of(["none", "int4", "fp16", "int8"], 2, pytest.mark.long))
@pytest.mark.parametrize("rank", few_of([2, 0], 1, pytest.mark.long), ids=["other", "leader"])
@pytest.mark.parametrize("kind", ["reversed", "everywhere", "one value"])
async def test_values_that_are_too_large_count_for_twice_the_usual_norm(kind: str, rank: int, codec: str) -> None:
    vectors = list(map(values_of, range(4)))
    if kind == "reversed":
        vectors[rank] *= -100.0
    elif kind == "everywhere":
        vectors[rank][:] = 1e30
    else:
        vectors[rank][123_456] = 3e33
    results = await round_of(vectors, codec=codec)
    expected = [vector.double() for vector in vectors]
    norms = [vector.norm().item() for vector in expected]
    expected[rank] *= 2.0 * statistics.median(norms) / norms[rank]
    for result in results:
        assert result.blamed == ()
        assert result.manifest.clipped == [result.manifest.members[rank]]
        assert result.manifest.weights == [1.0] * 4
        assert result.averaged_N is not None
        assert torch.equal(result.averaged_N, results[0].averaged_N)
        off = (result.averaged_N.double() - sum(expected) / 4).norm().item()
        assert off < (0.1 if codec == "int4" else 0.02) * norms[rank - 1]


@pytest.mark.parametrize("codec", ["none", "fp16", "int8", "int4"])
@pytest.mark.parametrize("num_peers", [2, 5])
async def test_centered_clipping_is_that_of_each_chunk_and_values_that_cannot_be_compared_have_their_mean(
    codec: str, num_peers: int
) -> None:
    vectors = [values_of(rank) + 1.0 for rank in range(num_peers)]
    vectors[-1] *= -5.0
    for vector in vectors:
        vector[-100:] = 50.0 * vector[:100]
    weights = [8.0, 10.0, 8.0, 6.0, 8.0][:num_peers]
    shapes = (2999, 100), Uncompared((1, 100))
    results = await round_of(vectors, weights, codec, aggregate="centered_clip", shapes=shapes)
    plain = sum(vector.double() * weight for vector, weight in zip(vectors, weights, strict=True)) / sum(weights)
    assert all(result.manifest.weights == weights for result in results)
    averaged = results[0].averaged_N
    assert averaged is not None
    assert all(torch.equal(averaged, result.averaged_N) for result in results if result.averaged_N is not None)
    off = (averaged.double() - plain)[:-100].norm() / vectors[0].norm()
    assert (off < 0.2) == (num_peers == 2), "two members have their mean"
    if num_peers == 5:
        honest = torch.stack(vectors[:-1]).mean(dim=0)
        assert (averaged - honest)[:-100].norm() < 0.3 * honest.norm() < (plain - honest)[:-100].norm()
    torch.testing.assert_close(averaged[-100:].double(), plain[-100:], rtol=0, atol=0.02 * 250)


@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_where_nobody_is_over_the_limit_the_mean_is_the_plain_one(codec: str) -> None:
    vectors = list(map(values_of, range(4)))
    vectors[1] *= 1.9
    weights = [8.0, 8.0, 10.0, 12.0]
    clipped, plain = [await round_of(vectors, weights, codec, aggregate=one) for one in ("clip", "mean")]
    for one, other in zip(clipped, plain, strict=True):
        assert one.averaged_N is not None
        assert other.averaged_N is not None
        assert torch.equal(one.averaged_N, other.averaged_N)
        assert one.manifest.clipped == []


@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_a_member_that_sends_more_than_it_has_said_is_left_out_and_named(codec: str) -> None:
    """Also far below twice the usual norm."""
    vectors = list(map(values_of, range(4)))
    vectors[-1] *= -1.5
    results = await round_of(vectors, codec=codec, said={3: values_of(0).norm().item()})
    check(results, vectors, [1.0, 1.0, 1.0, 0.0], 0.02)
    for result in results:
        assert result.blamed == (result.manifest.members[-1],)


@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_a_plain_mean_takes_all_finite_values_however_large(codec: str) -> None:
    vectors = list(map(values_of, range(4)))
    vectors[2] *= -1e6
    results = await round_of(vectors, codec=codec, aggregate="mean")
    check(results, vectors, [1.0] * 4, 0.02 * 1e6)
    assert all(result.blamed == () for result in results)


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("kind", ["reversed", "one value"])
async def test_values_of_any_size_move_a_centered_mean_no_further_than_ordinary_ones(kind: str, codec: str) -> None:
    vectors = [values_of(rank) + 1.0 for rank in range(4)]
    if kind == "reversed":
        vectors[2] *= -1e6
    else:
        vectors[2][123_456] = 3e37
    results = await round_of(vectors, codec=codec, aggregate="centered_clip")
    honest = torch.stack([vectors[rank] for rank in (0, 1, 3)]).mean(dim=0)
    for result in results:
        assert result.averaged_N is not None
        assert result.blamed == ()
        assert (result.averaged_N - honest).norm() < 0.5 * values_of(0).norm()


async def test_a_clipped_member_weighs_less_where_values_are_no_gradient() -> None:
    """Else the parameters and running statistics that all have in common would shrink."""
    gradients = list(map(values_of, range(4)))
    gradients[2] *= 40.0
    vectors = [torch.cat([one, torch.full((500,), 3.0)]) for one in gradients]
    for result in await round_of(vectors, shapes=[SHAPE, Unscaled((500,))]):
        assert result.averaged_N is not None
        torch.testing.assert_close(result.averaged_N[NUMEL:], torch.full((500,), 3.0))
        assert result.averaged_N[:NUMEL].norm() < gradients[0].norm()


@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_a_noisy_small_batch_and_a_large_value_that_all_have_are_in_the_mean(codec: str) -> None:
    vectors = list(map(values_of, range(4)))
    vectors[1] *= 30.0
    for vector in vectors:
        vector[77] = 1e4
    results = await round_of(vectors, [32.0, 1.0, 32.0, 64.0], codec)
    assert all(result.blamed == () for result in results)


async def test_means_are_compared_with_the_norm_of_what_went_into_them() -> None:
    """Three means are nearly 0, as their values have cancelled each other; the largest has a norm of 548."""
    vectors = [1e-4 * values_of(0), values_of(1), 1e-4 * values_of(2), 1e-4 * values_of(3)]
    for norms_before, blamed in ([1000.0] * 4, ()), ([1000.0, 0.0, 1000.0, 1000.0], ()), ([50.0] * 4, (1,)):
        results = await round_of(vectors, norms_before=norms_before)
        for result in results:
            assert result.blamed == tuple(result.manifest.members[rank] for rank in blamed)


async def test_weights_and_norms_in_a_group_of_two_are_not_bounded() -> None:
    """There is no majority that could say which of them is wrong."""
    vectors = [values_of(0), -100.0 * values_of(1)]
    check(await round_of(vectors, [1.0, 1000.0]), vectors, [1.0, 1000.0], 1e-4)
