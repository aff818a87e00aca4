"""Limits of norms in the rounds of a grid, whose later ones average means: honest gradients may cancel there."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.phases import Average, around_averages
from tests.simulation.swarm_of_trainers import PLAIN, Member, Swarm
from tests.simulation.test_grid_steps import in_grid
from tests.sweeps import few_of

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_PEERS = 12
NUMEL = 32
NUM_ROUNDS = 2  # of a step, in 4x3 cells
BATCH_SIZE = 4
TARGET = 6 * BATCH_SIZE * NUM_PEERS


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("manyhands").setLevel(logging.CRITICAL)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values_N = torch.nn.Parameter(torch.zeros(NUMEL))


Lie = Callable[[torch.Tensor], torch.Tensor]


def run_of_two_goals(
    seed: int, num_steps: int, lie: Lie | None = None, lie_of_parameters: Lie = lambda parameters_N: parameters_N
) -> Swarm:
    """Twelve peers in a grid; those with even numbers pull against the others.

    Args:
        lie: what p0 brings to each later round in place of a mean of gradients. It leaves the parameters that travel
            beside them alone.
        lie_of_parameters: what it brings to each round in place of these.
    """
    swarm = Swarm(seed)

    def train(member: Member) -> None:
        number, rng = int(member.name[1:]), random.Random(member.name)
        assignment = member.optimizer.collaboration.step_rounds.assignment
        is_liar = lie is not None and number == 0

        async def lying(average: Average, flat_N: torch.Tensor, weight: float, **options: Any) -> Any:
            position = assignment.position()
            if lie is not None and position.group_key and position.step % NUM_ROUNDS > 0:
                flat_N = torch.cat([lie(flat_N[:NUMEL]), flat_N[NUMEL:]])
            flat_N = torch.cat([flat_N[:NUMEL], lie_of_parameters(flat_N[NUMEL:])])
            return await average(flat_N, weight, **options)

        in_grid(member, NUM_PEERS)
        if is_liar:
            around_averages(member.peer.peer_id, lying)
        while member.optimizer.global_step < num_steps and not (is_liar and swarm.done):
            goal = 1.0 if number % 2 else -1.0
            loss = (member.model.values_N - goal).square().sum() / 2  # type: ignore[operator, union-attr]
            member.step(loss, rng.uniform(0.4, 0.6))

    for number in range(NUM_PEERS):
        swarm.start(
            f"p{number}", Model, lambda model: torch.optim.SGD(model.parameters(), lr=0.05), train,
            target_batch_size=TARGET, batch_size_per_step=BATCH_SIZE, averaging=replace(PLAIN, max_group_size=4),
        )  # fmt: skip
    swarm.run(900.0)
    return swarm


@pytest.mark.long
@pytest.mark.parametrize("seed", few_of([1, 3, 6, 8, 10]))
def test_means_of_gradients_that_cancel_in_some_groups_leave_nobody_out(seed: int) -> None:
    """The mean of one group may be a hundred times as large as that of others."""
    swarm = run_of_two_goals(seed, 12)
    for member in swarm.members.values():
        counts = member.optimizer.statistics
        assert (counts.samples_dropped, counts.states_loaded) == (0, 0), counts


@pytest.mark.long
@pytest.mark.parametrize("kind", few_of(["reversed", "3e38"]))
def test_a_member_that_spoils_the_mean_of_its_first_group_is_left_out_of_the_next(kind: str) -> None:
    spoil: dict[str, Lie] = {
        "reversed": lambda mean_N: -100.0 * mean_N,
        "3e38": lambda mean_N: torch.full_like(mean_N, 3e38),
    }
    swarm = run_of_two_goals(3, 16, spoil[kind])
    for name in swarm.members.keys() - {"p0"}:
        member = swarm.members[name]
        assert member.model.values_N.abs().max() < 0.5, name  # type: ignore[operator, union-attr]
        assert member.optimizer.statistics.updates_refused == 0


@pytest.mark.long
@pytest.mark.parametrize("factor", few_of([-1e3, 1e3, 1e9]))
def test_a_member_that_spoils_the_means_of_parameters_moves_nobody(
    factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("manyhands").setLevel(logging.WARNING)
    honest = run_of_two_goals(3, 18)
    assert "keeps its own" not in caplog.text
    swarm = run_of_two_goals(3, 18, lambda mean_N: mean_N, lambda parameters_N: factor * (parameters_N + 1.0))
    assert "keeps its own" in caplog.text
    for name in swarm.members.keys() - {"p0"}:
        values_N = swarm.members[name].model.values_N
        assert (values_N - honest.members[name].model.values_N).abs().max() < 0.1, name  # type: ignore[operator]
