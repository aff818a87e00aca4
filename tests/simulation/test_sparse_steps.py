"""Sparse local steps in virtual time, against one process that computes what the peers should hold."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from manyhands.averaging import AveragingConfig
from manyhands.averaging.codecs import Sparse
from manyhands.base.errors import ConfigError
from manyhands.optim.local_steps import SPARSE_RATE, LocalSteps
from tests.simulation.swarm_of_trainers import Member, Swarm
from tests.smaller import smaller

CODEC = Sparse(top=40, chunk=1024)
NUM_LOCAL, NUM_ROUNDS, BATCH = 3, 4, 4
AVERAGING = AveragingConfig(matchmaking_time_s=10.0, averaging_timeout_s=40.0)

Batches = Sequence[tuple[torch.Tensor, torch.Tensor]]


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 700), torch.nn.Tanh(), torch.nn.Linear(700, 3))


def new_inner(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.003)


def batches_of(seed: int) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 3, generator=generator))
        for _ in range(NUM_LOCAL * NUM_ROUNDS)
    ]


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def expected(shards: Sequence[Batches]) -> torch.Tensor:
    """The agreed parameters after all rounds."""
    flat = torch.nn.utils.parameters_to_vector
    agreed = flat(new_model().parameters()).detach()
    models = [new_model() for _ in shards]
    inner = [new_inner(model) for model in models]
    kept = [torch.zeros_like(agreed) for _ in shards]
    encoded = torch.empty(CODEC.num_bytes(agreed.numel()), dtype=torch.uint8)
    for start in range(0, NUM_LOCAL * NUM_ROUNDS, NUM_LOCAL):
        mean = torch.zeros_like(agreed)
        for number, (shard, model, optimizer) in enumerate(zip(shards, models, inner, strict=True)):
            torch.nn.utils.vector_to_parameters(agreed.clone(), model.parameters())
            for batch in shard[start : start + NUM_LOCAL]:
                optimizer.zero_grad()
                loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            wanted = CODEC.decay * kept[number] + agreed - flat(model.parameters()).detach()
            sent = torch.empty_like(agreed)
            CODEC.encode(wanted, encoded)
            CODEC.decode(encoded, sent)
            kept[number] = wanted - sent
            mean += sent / len(shards)
        agreed = agreed - SPARSE_RATE * mean
    return agreed


def train_on(shards: Sequence[Batches], until: int = NUM_ROUNDS) -> object:
    def train(member: Member) -> None:
        for number, batch in enumerate(shards[int(member.name[-1])], 1):
            member.step(loss_of(member.model, batch))
            member.check_samples()
            if number % NUM_LOCAL == 0:
                member.wait_for(number // NUM_LOCAL)

    return train


@pytest.mark.parametrize("clients", [(), (2,)], ids=["all can be dialled", "one is a client"])
def test_peers_hold_what_one_process_computes(clients: tuple[int, ...]) -> None:
    shards = [batches_of(seed) for seed in range(3)]
    swarm = Swarm()
    for number in range(3):
        swarm.start(
            f"peer{number}", new_model, new_inner, train_on(shards), client_mode=number in clients,  # type: ignore[arg-type]
            target_batch_size=3 * NUM_LOCAL * BATCH, batch_size_per_step=BATCH, averaging=AVERAGING,
            local_steps=LocalSteps(sparse=CODEC),
        )  # fmt: skip
    with smaller(span_numel=1024):
        swarm.world.run(200.0)
    assert len({member.optimizer.state_digest() for member in swarm.members.values()}) == 1
    want = expected(shards)
    for member in swarm.members.values():
        assert member.optimizer.statistics.samples_used == NUM_LOCAL * NUM_ROUNDS * BATCH
        got = torch.nn.utils.parameters_to_vector(member.model.parameters()).detach()
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_a_codec_beside_sparse_local_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave one of them out"):
        LocalSteps(sparse=CODEC).averaging(AveragingConfig(codec="int8"))
