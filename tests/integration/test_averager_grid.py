"""Averagers of a swarm that is too large for one group: whole peers with a DHT."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from manyhands.base.errors import ConfigError, NothingToAverage
from manyhands.testing.blocking import run_blocking
from tests.averagers import CONFIG, close_all, join, sim_peers, step_all, weighted_mean

GROUPS_OF_3 = replace(CONFIG, max_group_size=3, codec="none")
NUMEL = 300
STEPS = 3
"""Until all have read of each other, and stand in one grid."""


async def test_six_peers_in_groups_of_three_hold_the_weighted_mean_of_all() -> None:
    weights = [1.0, 2.0, 3.0, 4.0, 0.0, 60.0]
    async with sim_peers(6, clients=[4]) as peers:
        tensors = [torch.zeros(20, NUMEL // 20) for _ in peers]
        averagers = [
            await join(peer, [tensor], averaging=GROUPS_OF_3, auxiliary=number == 4)
            for number, (peer, tensor) in enumerate(zip(peers, tensors, strict=True))
        ]
        for _ in range(STEPS):
            for number, tensor in enumerate(tensors):
                tensor.copy_(torch.arange(NUMEL).reshape(tensor.shape) + 100.0 * number)
            before = [tensor.clone() for tensor in tensors]
            results = await step_all(averagers, weights)
        for result, tensor in zip(results, tensors, strict=True):
            assert result.committed, result.reason
            assert (result.num_rounds, result.num_rounds_committed, result.reason) == (2, 2, "")
            assert len(result.group) in (2, 3)
            assert result.num_bytes_sent > 0
            torch.testing.assert_close(tensor.double(), weighted_mean(before, weights), rtol=1e-5, atol=1e-4)
        assert all(await asyncio.gather(*(run_blocking(averager.wait_for_others) for averager in averagers)))
        await close_all(averagers)


async def test_a_grid_step_without_any_weight_raises_and_changes_no_tensor() -> None:
    async with sim_peers(4) as peers:
        tensors = [torch.full((10,), float(number)) for number in range(4)]
        averagers = [
            await join(peer, [tensor], averaging=replace(GROUPS_OF_3, max_group_size=2))
            for peer, tensor in zip(peers, tensors, strict=True)
        ]
        await step_all(averagers)
        before = [tensor.clone() for tensor in tensors]
        with pytest.raises(NothingToAverage, match="any samples"):
            await step_all(averagers, [0.0] * 4)
        assert all(torch.equal(tensor, was) for tensor, was in zip(tensors, before, strict=True))
        await close_all(averagers)


@pytest.mark.parametrize(
    ("size", "rule"), [(1, "at least 2"), (0, "at least 2"), (-3, "at least 2"), (4097, "at most 4096")]
)
def test_group_sizes_out_of_bounds_are_refused(size: int, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"max_group_size={size} must be {rule}; for example 256"):
        replace(CONFIG, max_group_size=size)
