"""Rounds whose values travel in fewer bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from manyhands.averaging.codecs import CODECS
from tests.averagers import CONFIG, close_all, join, sim_peers, step_all, weighted_mean

BOUNDS = {"none": 1e-6, "fp16": 1e-3, "bf16": 0.02, "int8": 0.03, "int4": 0.6}
"""Of values of N(0, 1), averaged over members of which each is encoded once, and the mean once more."""

WEIGHTS = [1.0, 3.0, 2.0]


def tensors_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for shape in ((300, 100), (40,), (64, 64), (30, 30))]


async def averaged(
    num_peers: int, clients: tuple[int, ...] = (), chunk_numel: int = 1024, **options: Any
) -> tuple[list[Any], list[Any], int]:
    """The tensors of all members after a round; what they should be; bytes that all have sent."""
    config = dataclasses.replace(CONFIG, **options)
    lists = [tensors_of(rank) for rank in range(num_peers)]
    expected = [
        weighted_mean(same, WEIGHTS[:num_peers]) for same in zip(*map(tensors_of, range(num_peers)), strict=True)
    ]
    async with sim_peers(num_peers, clients=clients, chunk_numel=chunk_numel) as peers:
        averagers = [await join(peer, tensors, averaging=config) for peer, tensors in zip(peers, lists, strict=True)]
        results = await step_all(averagers, WEIGHTS[:num_peers])
        assert all(result.committed for result in results), [result.reason for result in results]
        assert {len(result.group) for result in results} == {num_peers}
        await close_all(averagers)
    return lists, expected, sum(result.num_bytes_sent for result in results)


@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize(("num_peers", "clients"), [(2, ()), (3, ()), (3, (2,))])
async def test_all_members_hold_one_mean_within_the_bounds_of_the_codec(
    codec: str, num_peers: int, clients: tuple[int, ...]
) -> None:
    lists, expected, _ = await averaged(num_peers, clients, codec=codec, chunk_numel=9999)
    for mine in lists[1:]:
        assert all(torch.equal(one, other) for one, other in zip(mine, lists[0], strict=True)), "not the same bits"
    for number, (mean, right) in enumerate(zip(lists[0], expected, strict=True)):
        bound = 1e-6 if number in (1, 3) else BOUNDS[codec]  # of few elements, or one dimension
        torch.testing.assert_close(mean.double(), right, rtol=bound, atol=bound)


async def test_fewer_bits_are_fewer_bytes() -> None:
    num_bytes = {codec: (await averaged(2, codec=codec))[2] for codec in ("none", "fp16", "int8", "int4")}
    assert num_bytes["fp16"] < 0.54 * num_bytes["none"]
    assert num_bytes["int8"] < 0.31 * num_bytes["none"]
    assert num_bytes["int4"] < 0.20 * num_bytes["none"]


async def test_by_default_values_are_exact_on_a_fast_link_and_8_bits_on_a_slow_one() -> None:
    lists, expected, num_exact = await averaged(2)
    torch.testing.assert_close(lists[0][0].double(), expected[0], rtol=1e-6, atol=1e-6)
    _, _, num_slow = await averaged(2, bandwidth_mbit_s=20.0)
    assert num_slow < 0.4 * num_exact
