"""Swarms that are too large for one group, in virtual time; ``benchmarks/grid_swarm.py`` has the case of 256 peers."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping

import pytest

from tests.simulation.grids import FIRST_STEPS, ROUNDING, Failure, Swarm, grid_world
from tests.sweeps import few_of

NUM_STEPS = 8


def swarm_after(
    seed: int,
    num_peers: int,
    max_group_size: int,
    p_fail: float,
    num_steps: int = NUM_STEPS,
    weights: tuple[float, ...] = (1.0,),
    planned: Mapping[int, tuple[str, Failure]] = {},
) -> Swarm:
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    world, swarm, seconds = grid_world(seed, num_peers, max_group_size, num_steps, p_fail, weights, planned)
    world.run(seconds)
    assert len(swarm.spreads) == num_steps
    return swarm


@pytest.mark.long
@pytest.mark.parametrize(("num_peers", "max_group_size"), few_of([(16, 4), (27, 4)]))
def test_in_a_full_grid_all_hold_the_mean_of_all_after_each_step(num_peers: int, max_group_size: int) -> None:
    num_steps = 5
    swarm = swarm_after(1, num_peers, max_group_size, 0.0, num_steps)
    assert max(swarm.spreads[FIRST_STEPS:]) < ROUNDING
    for before, after in zip(swarm.before_means[FIRST_STEPS:], swarm.means[FIRST_STEPS:], strict=True):
        assert abs(before - after) < ROUNDING
    assert max(swarm.group_sizes) <= max_group_size
    assert swarm.partial[FIRST_STEPS:] == [0] * (num_steps - FIRST_STEPS)
    assert statistics.median(swarm.step_s) < 2.0, "a step waits for nobody if all are there"
    told = swarm.reported[FIRST_STEPS + 1 :]
    assert all(disagreement is not None and disagreement < ROUNDING for disagreement in told), told


def test_the_mean_of_a_full_grid_is_weighted_by_all_weights() -> None:
    """Also auxiliary peers, whose weight is 0, count with none of their values, and hold the mean."""
    swarm = swarm_after(2, 16, 4, 0.0, num_steps=4, weights=(1.0, 5.0, 0.0, 100.0, 3.0))
    for before, after in zip(swarm.before_means[FIRST_STEPS:], swarm.means[FIRST_STEPS:], strict=True):
        assert abs(before - after) < ROUNDING
    assert max(swarm.spreads[FIRST_STEPS:]) < ROUNDING


@pytest.mark.long
@pytest.mark.parametrize("seed", few_of(range(2)))
def test_with_failures_the_peers_stay_near_each_other(seed: int) -> None:
    """Each value drifts by 1 before each step (root mean square); without averaging it would be 2.8 in the end."""
    swarm = swarm_after(seed, 32, 4, 0.02)
    assert sum(swarm.failures)
    assert max(swarm.spreads) < 0.6
    assert statistics.median(swarm.spreads) < 0.25
    assert max(swarm.group_sizes) <= 4
    told = swarm.reported[1:]
    assert all(disagreement is not None and disagreement > ROUNDING for disagreement in told), told
    assert max(swarm.step_s) < 15.5, "what a step may take"


@pytest.mark.long
def test_a_peer_that_sits_out_a_step_costs_nobody_else_a_round() -> None:
    """Whoever it is: also the one with the lowest id, which leads each of its groups."""
    planned = {2 + number: (f"p{number}", Failure.SITS_OUT) for number in range(16)}
    swarm = swarm_after(3, 16, 4, 0.0, num_steps=18, planned=planned)
    assert swarm.partial[FIRST_STEPS:] == [0] * (18 - FIRST_STEPS), swarm.reasons


@pytest.mark.long
@pytest.mark.parametrize("seed", few_of(range(4)))
def test_a_peer_that_comes_back_takes_a_cell_of_its_own_and_all_hold_one_mean(seed: int) -> None:
    """Every third step one dies. In the next one it takes a cell, which others may not know yet; then all do."""
    planned = {3 * number + 2: (f"p{number}", Failure.DIES) for number in range(5)}
    swarm = swarm_after(seed, 16, 4, 0.0, num_steps=17, planned=planned)
    for step in range(FIRST_STEPS, 17):
        if not swarm.failures[step]:
            assert swarm.partial[step] <= swarm.failures[step - 1], (step, swarm.reasons)
        if not swarm.failures[step] and not swarm.failures[step - 1]:
            assert swarm.spreads[step] < ROUNDING, step


@pytest.mark.sweep
def test_over_50_steps_the_peers_stay_within_the_bound_that_the_docs_state() -> None:
    """1% fail in each step; without averaging the values would be 7 apart in the end."""
    swarm = swarm_after(1, 36, 6, 0.01, num_steps=50)
    assert sum(swarm.failures) > 10
    bounds = swarm.bounds(36)
    assert min(bounds) == ROUNDING, "a step that nobody fails in, nor in the one before, has all at one mean again"
    beyond = [
        (step, spread, bound)
        for step, (spread, bound) in enumerate(zip(swarm.spreads, bounds, strict=True))
        if step >= FIRST_STEPS and spread > bound
    ]
    assert not beyond
