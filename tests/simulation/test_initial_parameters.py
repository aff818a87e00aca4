"""Whose initial parameters a run begins from: those of the peer that began it, or of the one whose user says so."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.simulation.swarm_of_trainers import Member, Swarm
from tests.sweeps import few_of

pytestmark = pytest.mark.usefixtures("one_thread")

PEERS = ("p0", "p1", "p2")
"""Their ids are in another order for each seed."""
LATER_S = 5.0


class Begin:
    """Peers that each have other initial parameters; the value of each is one more than the number in its name."""

    def __init__(self, seed: int) -> None:
        logging.getLogger("manyhands").setLevel(logging.ERROR)
        self.swarm = Swarm(seed)
        self.swarm.start_coordinator()
        self.values: dict[str, float] = {}  # of the parameters before the first step
        self.steps: dict[str, int] = {}

    def start(self, name: str, begins_s: float, ends_s: float = 60.0, **options: Any) -> None:
        def new_model() -> torch.nn.Module:
            model = torch.nn.Linear(2, 1, bias=False)
            torch.nn.init.constant_(model.weight, 1.0 + PEERS.index(name))
            return model

        def train(member: Member) -> None:
            while member.peer.time() < ends_s:
                self.values[name] = member.model.weight.mean().item()  # type: ignore[union-attr, operator]
                member.step(member.model(torch.ones(1, 2)).sum(), 0.5)
                self.steps[name] = member.optimizer.global_step
            member.optimizer.close()

        def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.1)

        target = {"target_batch_size": 10**6, "batch_size_per_step": 1}
        self.swarm.start(name, new_model, sgd, train, begins_s=begins_s, **target | options)

    def run(self) -> dict[str, float]:
        self.swarm.run()
        assert set(self.steps.values()) == {0}
        return self.values


@pytest.mark.parametrize("seed", few_of(range(3), 1, pytest.mark.long))
def test_initial_parameters_are_those_of_the_peer_that_began_the_run(seed: int) -> None:
    """The lowest peer id once won, so that the first peer's pretrained weights were dropped more often than not."""
    begin = Begin(seed)
    begin.start("p1", 0.0)
    begin.start("p0", LATER_S)
    begin.start("p2", 2 * LATER_S)
    assert begin.run() == dict.fromkeys(PEERS, 2.0)


@pytest.mark.parametrize("seed", few_of(range(3), 1, pytest.mark.long))
def test_initial_parameters_stay_when_the_peer_that_began_the_run_leaves(seed: int) -> None:
    begin = Begin(seed)
    begin.start("p1", 0.0, ends_s=15.0)
    begin.start("p0", LATER_S)
    begin.start("p2", 30.0)
    assert begin.run() == dict.fromkeys(PEERS, 2.0)


@pytest.mark.parametrize("seed", few_of(range(3), 1, pytest.mark.long))
def test_initial_parameters_are_those_of_the_peer_with_start_new(seed: int) -> None:
    begin = Begin(seed)
    begin.start("p1", 0.0)
    begin.start("p0", LATER_S)
    begin.start("p2", 2 * LATER_S, start_new=True)
    assert begin.run() == dict.fromkeys(PEERS, 3.0)


@pytest.mark.parametrize("seed", few_of(range(2), 1, pytest.mark.long))
def test_initial_parameters_are_those_of_a_client_that_began_the_run(seed: int) -> None:
    begin = Begin(seed)
    begin.start("p1", 0.0, client_mode=True)
    begin.start("p0", LATER_S)
    begin.start("p2", 4 * LATER_S, client_mode=True)
    assert begin.run() == dict.fromkeys(PEERS, 2.0)


@pytest.mark.parametrize("seed", few_of(range(3), 1, pytest.mark.long))
def test_peers_that_begin_at_once_take_the_initial_parameters_of_one(seed: int) -> None:
    begin = Begin(seed)
    for name in PEERS:
        begin.start(name, 0.0)
    assert len(set(begin.run().values())) == 1
