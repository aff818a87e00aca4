"""A model in shards on one rank, which is all of a job; tests/process/test_shards.py has jobs of two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from manyhands.base.errors import ConfigError
from manyhands.optim.accumulator import GradientAccumulator
from manyhands.optim.extra_tensors import ExtraTensors
from manyhands.optim.ranks import Ranks
from manyhands.optim.step.shards import ShardedAccumulator, Shards, WholeCopy

BATCHES = [(2, 1.0), (3, 4.0), (1, 2.0)]
"""Samples and scale of the loss."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Ranks]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield Ranks()
    dist.destroy_process_group()


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def compute(model: torch.nn.Module, number: int, samples: int, scale: float) -> None:
    model.zero_grad()
    inputs = torch.randn(samples, 3, generator=torch.Generator().manual_seed(number))
    (model(inputs).square().mean() * scale).backward()


def test_samples_of_a_failed_attempt_count_with_later_ones_as_without_shards(job: Ranks) -> None:
    plain, split = new_model(), new_model()
    fully_shard(split, mesh=init_device_mesh("cpu", (1,)))
    shards = Shards(job, list(split.parameters()))
    whole = GradientAccumulator(list(plain.parameters()), ExtraTensors())
    sharded = ShardedAccumulator(list(split.parameters()), ExtraTensors(), shards)
    with shards.leading():
        for attempt in range(3):
            for number, (samples, scale) in enumerate(BATCHES):
                compute(plain, number + attempt, samples, scale)
                compute(split, number + attempt, samples, scale)
                assert whole.add(samples, grad_scale=scale)
                assert sharded.add(samples, grad_scale=scale)
            expected, contribution = whole.freeze(), sharded.freeze()
            torch.testing.assert_close(contribution.mean_N, expected.mean_N)
            assert (contribution.samples, contribution.weight) == (expected.samples, expected.weight)
            if attempt == 0:  # before and after other batches
                whole.take_back(expected)
                sharded.take_back(contribution)
            elif attempt == 1:
                for model, accumulator in ((plain, whole), (split, sharded)):
                    compute(model, 9, 2, 1.0)
                    accumulator.add(2)
                whole.take_back(expected)
                sharded.take_back(contribution)
        assert sharded.samples == whole.samples == 0


def test_a_gradient_that_is_not_finite_adds_nothing(job: Ranks) -> None:
    model = new_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    shards = Shards(job, list(model.parameters()))
    accumulator = ShardedAccumulator(list(model.parameters()), ExtraTensors(), shards)
    compute(model, 0, 2, float("inf"))
    with shards.leading():
        assert not accumulator.add(2)
        assert accumulator.samples == 0
        assert not accumulator.freeze().mean_N.any()


def test_the_optimizer_steps_on_a_whole_copy_and_gets_its_own_parameters_back(job: Ranks) -> None:
    model = new_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.Adam(model.parameters())
    own = list(model.parameters())
    shards = Shards(job, own)
    with shards.leading():
        copy = WholeCopy(optimizer, shards)
        for parameter in optimizer.param_groups[0]["params"]:
            assert type(parameter) is torch.nn.Parameter
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        wholes = [parameter.detach().clone() for parameter in optimizer.param_groups[0]["params"]]
        copy.copy_to_model()
    with pytest.raises(ConfigError, match="all ranks must take part"):
        copy.copy_to_model()
    copy.remove()
    assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], own, strict=True))
    assert not optimizer.state
    for parameter, whole in zip(own, wholes, strict=True):
        assert torch.equal(parameter.full_tensor(), whole)  # type: ignore[operator]
