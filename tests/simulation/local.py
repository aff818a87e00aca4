"""Trainers that make local steps, with fragments and an overlap drawn from the seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands.averaging.codecs import Sparse
from manyhands.optim.local_steps import LocalReplica, LocalSteps, nesterov
from manyhands.testing import World
from tests.inside import OpenOptimizer
from tests.simulation.worlds import CountedPeer, Ledger, says, start_peers

SIZES = (4800, 4, 4, 2)
"""Enough that the large one can be sparse: a vector of fewer than 4096 values is exact."""
BATCH_SIZE = 4
BATCH_S = 1.0
TARGET = 72
"""Three peers take about 6 s for it."""

Make = Callable[[Any], torch.optim.Optimizer]


def averaging(params: Any) -> torch.optim.Optimizer:
    """Plain averaging of parameters."""
    return torch.optim.SGD(params, lr=1.0)


INNER: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.02),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
}


@dataclass(frozen=True)
class Setting:
    """What is equal on all peers of the run."""

    steps: LocalSteps
    inner: Make

    @classmethod
    def drawn(cls, rng: random.Random) -> Setting:
        """One at random."""
        # most values are sent: each peer would pull towards its goal again until they are
        sparse = rng.choice([None, None, Sparse(top=160, chunk=256)])
        steps = LocalSteps(
            outer=averaging if sparse is not None else rng.choice([nesterov, averaging]),
            fragments=rng.choice([1, 1, 2, 4]),
            overlap_steps=rng.choice([0, 0, 1, 3]),
            sparse=sparse,
        )
        return cls(steps, INNER[rng.choice(list(INNER))])


@dataclass
class LocalTrainer:
    """What one process shows of itself.

    Attributes:
        given: the samples of this process in committed rounds, by fragment: each sample once in each.
    """

    optimizer: OpenOptimizer
    given: Counter[int] = field(default_factory=Counter)

    @property
    def replica(self) -> LocalReplica:
        """Of the optimizer."""
        replica = self.optimizer.replica
        assert isinstance(replica, LocalReplica)
        return replica

    def commit(self, peer_id: str, ledger: Ledger, num_fragments: int) -> None:
        """A round was applied; the members must agree on it, and no sample is in two rounds of one fragment."""
        optimizer, manifest = self.optimizer, self.optimizer.last_round
        assert manifest is not None
        weight = manifest.weights[manifest.members.index(peer_id)]
        if num_fragments == 1 and not says(manifest, peer_id, optimizer.last_contribution):
            ledger.faults.append(f"{peer_id} gave {optimizer.last_contribution} samples, and not {weight}")
        if not optimizer.is_stepping:
            ledger.commit(peer_id, manifest, weight, self.replica.flat_parameters())  # type: ignore[arg-type]
        fragment = manifest.position.step % num_fragments
        self.given[fragment] += weight * num_fragments  # type: ignore[assignment]
        if self.given[fragment] > optimizer.statistics.samples_computed + 1e-3:
            ledger.faults.append(f"{peer_id} gave samples twice for fragment {fragment}: {self.given}")


def start_local(
    world: World, names: list[str], setting: Setting, begins_s: dict[str, float]
) -> tuple[dict[str, LocalTrainer], Ledger]:
    """Start a trainer on each host; each has a loss of its own, a noisy pull towards its number.

    Args:
        begins_s: of those that come later.
    """
    trainers: dict[str, LocalTrainer] = {}
    ledger = Ledger()

    def train(sim_peer: CountedPeer, name: str, rng: random.Random) -> None:
        noise = torch.Generator().manual_seed(rng.randrange(1 << 32))
        parameters = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
        optimizer = OpenOptimizer(
            setting.inner(parameters),
            peer=sim_peer,
            run_id="simulated",
            target_batch_size=TARGET,
            batch_size_per_step=BATCH_SIZE,
            local_steps=setting.steps,
        )
        trainer = trainers[name] = LocalTrainer(optimizer)
        sim_peer.optimizer = optimizer
        goal = float(name.removeprefix("p"))
        while True:
            sim_peer.sleep(BATCH_S * rng.uniform(0.8, 1.2))
            for parameter in parameters:
                parameter.grad = (parameter - goal + torch.randn(parameter.shape, generator=noise)).detach()
            before = optimizer.last_round
            optimizer.step()
            if optimizer.last_round is not None and optimizer.last_round is not before:
                trainer.commit(sim_peer.peer_id, ledger, setting.steps.fragments)

    start_peers(world, {name: begins_s.get(name, 0.0) for name in names}, ledger, train)
    return trainers, ledger


def check_agreement(trainers: dict[str, LocalTrainer]) -> None:
    """All are at the same step or the one before, hold the same there, and everything is finite."""
    steps = {name: trainer.replica.position.step for name, trainer in trainers.items()}
    assert max(steps.values()) - min(steps.values()) <= 1, steps
    by_step: dict[int, dict[str, str]] = {}
    for name, trainer in trainers.items():
        by_step.setdefault(steps[name], {})[name] = trainer.optimizer.state_digest()
        for parameter in (trainer.replica.flat_parameters(), *trainer.replica.model_parameters):
            assert parameter.isfinite().all(), name
            assert parameter.abs().max() < 10, f"{name} is far from all goals: {parameter}"
    assert all(len(set(digests.values())) == 1 for digests in by_step.values()), by_step
