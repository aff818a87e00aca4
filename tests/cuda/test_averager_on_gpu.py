"""`manyhands.Averager` with tensors on a GPU."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
import torch

import manyhands
from manyhands.averaging import AveragingConfig
from manyhands.base.errors import ConfigError, ManifestMismatch
from tests.averagers import close_all, join, sim_peers, step, step_all, weighted_mean
from tests.phases import change_butterflies
from tests.trainers import AVERAGING, in_threads, peers

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def lists_of(num_peers: int, dtype: torch.dtype, device: str) -> list[list[torch.Tensor]]:
    """Tensors of all kinds of shape and layout, other values for each peer."""
    lists = []
    for number in range(num_peers):
        generator = torch.Generator().manual_seed(number)
        tensors = [torch.randn(shape, generator=generator) for shape in [(300, 70), (7,), (), (0,), (64, 8, 8)]]
        moved = [tensor.to(device, dtype) for tensor in tensors]
        moved[0] = moved[0].t().contiguous().t()  # column by column
        moved[4] = moved[4][:, ::2]
        lists.append(moved)
    return lists


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
async def test_means_are_written_where_the_tensors_are(dtype: torch.dtype) -> None:
    weights = [1.0, 3.0, 0.5]
    lists = lists_of(3, dtype, "cuda")
    places = [[tensor.data_ptr() for tensor in tensors] for tensors in lists]
    expected = [weighted_mean([tensor.cpu() for tensor in column], weights) for column in zip(*lists, strict=True)]
    async with sim_peers(3) as peers:
        averagers = [await join(peer, tensors) for peer, tensors in zip(peers, lists, strict=True)]
        results = await step_all(averagers, weights)
        await close_all(averagers)
    assert all(result.committed for result in results), results
    for tensors, its_places in zip(lists, places, strict=True):
        assert [tensor.data_ptr() for tensor in tensors] == its_places
        for tensor, mean in zip(tensors, expected, strict=True):
            rounding = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-12
            torch.testing.assert_close(tensor.cpu().double(), mean, rtol=max(rounding, 1e-6), atol=1e-6)
    for first, *others in zip(*lists, strict=True):
        assert all(torch.equal(first, other) for other in others), "all hold the same bits"


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16", "int8", "int4"])
async def test_a_gpu_gives_the_bits_that_a_cpu_gives(codec: str) -> None:
    config = AveragingConfig(matchmaking_time_s=3.0, averaging_timeout_s=15.0, codec=codec)
    results = []
    for device in ("cpu", "cuda"):
        lists = [[tensor.to(device)] for tensor in torch.randn(2, 40_000, generator=torch.Generator().manual_seed(5))]
        async with sim_peers(2) as peers:
            averagers = [
                await join(peer, tensors, averaging=config) for peer, tensors in zip(peers, lists, strict=True)
            ]
            assert all(result.committed for result in await step_all(averagers))
            await close_all(averagers)
        results.append(lists[0][0].cpu())
    assert torch.equal(results[0], results[1])


async def test_a_list_may_have_tensors_on_gpu_and_cpu() -> None:
    lists = [[torch.full((50,), float(i), device="cuda"), torch.full((9,), float(i))] for i in range(2)]
    async with sim_peers(2) as peers:
        averagers = [await join(peer, tensors) for peer, tensors in zip(peers, lists, strict=True)]
        assert all(result.committed for result in await step_all(averagers))
        await close_all(averagers)
    for on_gpu, on_cpu in lists:
        assert on_gpu.is_cuda
        assert set(on_gpu.tolist()) == set(on_cpu.tolist()) == {0.5}


async def test_lists_on_other_kinds_of_device_do_not_fit() -> None:
    async with sim_peers(2) as peers:
        averager = await join(peers[0], [torch.zeros(3, device="cuda")])
        with pytest.raises(ManifestMismatch, match=r"on c(uda|pu)"):
            await join(peers[1], [torch.zeros(3)])
        await close_all([averager])


async def test_values_that_are_not_finite_are_refused_and_named() -> None:
    tensors = [torch.zeros(3, device="cuda"), torch.tensor([1.0, float("nan")], device="cuda")]
    async with sim_peers(1) as peers:
        averager = await join(peers[0], tensors)
        with pytest.raises(ConfigError, match="tensor 1 has a value that is infinite or NaN"):
            await step(averager)
        await close_all([averager])


@pytest.mark.parametrize(
    "change", [lambda tensor: tensor.untyped_storage().resize_(0), lambda tensor: tensor.resize_(7)]
)
async def test_a_tensor_that_is_freed_or_resized_in_mid_round_is_not_written(change: Any) -> None:
    lists = [[torch.ones(300, device="cuda"), torch.full((5,), float(i), device="cuda")] for i in range(2)]
    async with sim_peers(2) as peers:
        averagers = [await join(peer, tensors) for peer, tensors in zip(peers, lists, strict=True)]
        change_butterflies(peers[0].peer_id, lambda _: change(lists[0][0]))
        first, second = await asyncio.gather(*map(step, averagers), return_exceptions=True)
        await close_all(averagers)
    assert isinstance(first, ConfigError)
    assert "tensor 0" in str(first)
    assert isinstance(second, manyhands.RoundResult)
    assert second.committed
    assert lists[0][1].tolist() == [0.0] * 5
    assert lists[1][1].tolist() == [0.5] * 5


def test_values_of_the_callers_stream_are_waited_for_and_the_means_are_there_for_what_comes_next() -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    doubled: list[Any] = [None, None]

    def average(number: int, peer: manyhands.Peer) -> None:
        with torch.cuda.stream(streams[number]):
            big = torch.randn(4096, 4096, device="cuda")
            for _ in range(50):
                big = (big @ big).clamp_(-1, 1)
            tensor = (big[0, :1000] * 0 + number + 1).contiguous()  # is there long after this line
            with manyhands.Averager([tensor], peer=peer, run_id="streams", averaging=AVERAGING) as averager:
                assert averager.step(timeout_s=20.0).committed
            doubled[number] = (tensor * 2).tolist()

    with peers(2) as both:
        in_threads([partial(average, number, peer) for number, peer in enumerate(both)])
    assert set(doubled[0]) == set(doubled[1]) == {3.0}
