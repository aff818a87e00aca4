"""Local steps in virtual time: several peers against one process that computes what they should hold."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from manyhands.optim.local_steps import LocalSteps
from tests.simulation.swarm_of_trainers import Member, Swarm

NUM_FEATURES = 6


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def batches_of(seed: int, number: int, size: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, NUM_FEATURES, generator=generator), torch.randn(size, 3, generator=generator))
        for _ in range(number)
    ]


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def plain_averaging(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)  # type: ignore[arg-type]


def expected(
    shards: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]], num_local: int, steps: LocalSteps
) -> torch.nn.Module:
    """The agreed model after all batches, ``num_local`` of each shard at a time, each peer with AdamW of its own."""
    agreed, peers = new_model(), [new_model() for _ in shards]
    inner = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in peers]
    outer = steps.outer(agreed.parameters())
    for start in range(0, len(shards[0]), num_local):
        for shard, model, optimizer in zip(shards, peers, inner, strict=True):
            model.load_state_dict(agreed.state_dict())
            for batch in shard[start : start + num_local]:
                optimizer.zero_grad()
                loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        for position, parameter in enumerate(agreed.parameters()):
            own = [list(model.parameters())[position].detach() for model in peers]
            parameter.grad = parameter.detach() - torch.stack(own).mean(0)
        outer.step()
    return agreed


@pytest.mark.parametrize("steps", [LocalSteps(), LocalSteps(outer=plain_averaging)], ids=["nesterov", "plain"])
def test_peers_hold_what_one_process_computes(steps: LocalSteps) -> None:
    num_local, shards = 3, [batches_of(seed, 9) for seed in range(2)]

    def train(member: Member) -> None:
        for number, batch in enumerate(shards[int(member.name[-1])], 1):
            member.step(loss_of(member.model, batch))
            member.check_samples()
            if number % num_local == 0:
                member.wait_for(number // num_local)

    swarm = Swarm()
    for number in range(2):
        swarm.start(
            f"peer{number}", new_model, lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), train,
            target_batch_size=2 * num_local * 4, batch_size_per_step=4, local_steps=steps,
        )  # fmt: skip
    swarm.world.run(200.0)
    want = expected(shards, num_local, steps)
    for member in swarm.members.values():
        assert member.optimizer.statistics.samples_used == 36
        for ours, theirs in zip(member.model.parameters(), want.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    assert len({member.optimizer.state_digest() for member in swarm.members.values()}) == 1
