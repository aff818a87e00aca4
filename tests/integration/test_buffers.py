"""Buffers and tensors of the user are averaged with each step, and newcomers get them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import manyhands
from manyhands.base.errors import ManifestMismatch
from tests.trainers import AVERAGING, FAST, Trainer, in_threads, peers, step_until


class WithBatchNorm:
    """A peer that trains a model with BatchNorm; the data of each peer is of another size."""

    def __init__(self, peer: manyhands.Peer, scale: float, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        self._generator, self._scale = torch.Generator().manual_seed(int(scale)), scale
        self.optimizer = manyhands.Optimizer(
            torch.optim.AdamW(self.model.parameters(), lr=0.01), peer=peer, run_id="buffers", target_batch_size=32,
            batch_size_per_step=4, buffers=self.model.named_buffers(), averaging=AVERAGING, progress=FAST, **options,
        )  # fmt: skip

    def train_until(self, step: int) -> None:
        while self.optimizer.global_step < step:
            self.model(self._scale * torch.randn(4, 5, generator=self._generator)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            threading.Event().wait(0.005)
        self.optimizer.settle()

    @property
    def statistics(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for _, tensor in self.model.named_buffers()]


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"delay": "optimizer"}], ids=["sync", "offload", "delay"])
def test_peers_have_equal_statistics_after_a_step_and_a_newcomer_gets_them(options: dict[str, Any]) -> None:
    with peers(4) as (one, two, late, onlooker):
        trainers = [WithBatchNorm(one, 1.0, **options), WithBatchNorm(two, 30.0, **options)]
        in_threads([lambda t=trainer: t.train_until(3) for trainer in trainers])  # type: ignore[misc]
        for own, other in zip(*(trainer.statistics for trainer in trainers), strict=True):
            assert torch.equal(own, other)
        assert trainers[0].optimizer.state_digest() == trainers[1].optimizer.state_digest()
        _, variance, num_batches = trainers[0].statistics
        assert variance.max() > 20, "the data of the second peer is in it, too"
        assert num_batches > 0
        newcomer = WithBatchNorm(late, 1.0, **options)
        assert newcomer.optimizer.global_step == 3
        assert newcomer.optimizer.state_digest() == trainers[0].optimizer.state_digest()
        inputs = torch.randn(16, 5)
        expected = trainers[0].model.eval()(inputs)
        assert torch.equal(newcomer.model.eval()(inputs), expected)
        model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        manyhands.load_state_from_peers(onlooker, "buffers", into=model)
        assert torch.equal(model.eval()(inputs), expected)


def test_floats_are_averaged_by_samples_and_integers_are_those_of_the_largest_peer() -> None:
    with peers(2) as swarm:
        own = [torch.tensor([1.0, 10.0]), torch.tensor([4.0, 40.0])]
        counts = [torch.tensor([1000, 7]), torch.tensor([2, 9])]
        trainers = [
            Trainer(peer, "tensors", 12, extra_tensors={"counts": counted, "seen": tensor})
            for peer, tensor, counted in zip(swarm, own, counts, strict=True)
        ]

        def train(trainer: Trainer, num_batches: int) -> None:
            for _ in range(num_batches):
                trainer.train_batch()
            step_until(trainer.optimizer, lambda: trainer.optimizer.global_step == 1)

        in_threads([lambda: train(trainers[0], 1), lambda: train(trainers[1], 2)])
        assert torch.equal(*own)
        assert torch.allclose(own[0], torch.tensor([3.0, 30.0]))
        assert counts[0].tolist() == counts[1].tolist() == [2, 9]


def test_a_peer_without_the_tensors_of_the_run_is_refused() -> None:
    with peers(2) as (one, two):
        first = Trainer(one, "other", 8, extra_tensors={"seen": torch.zeros(3)})
        with pytest.raises(ManifestMismatch, match=r"buffers and extra_tensors are \[\] here, \['seen'\] in the run"):
            Trainer(two, "other", 8)
        first.optimizer.close()
