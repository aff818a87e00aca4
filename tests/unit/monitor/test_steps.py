"""Each point of the curves is a sum over all who trained."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.base.identity import PeerId
from manyhands.monitor.steps import LONGEST_SILENCE_S, SETTLED_S, CompleteSteps, sum_up
from manyhands.optim.metrics import MetricsRecord
from tests.network import identity_of

A, B, C = (identity_of(number).peer_id for number in (1, 2, 3))

Metrics = dict[PeerId, MetricsRecord]


def record(step: int, loss: float = 2.0) -> MetricsRecord:
    return MetricsRecord(step, 1.5, 16, loss * 2, 2)


def told(steps: CompleteSteps, metrics: Metrics, trainers: Any, now: float) -> list[tuple[int, int]]:
    return [(made.step, made.alive_peers) for made in steps.look(metrics, trainers, now)]


def test_the_loss_is_the_mean_over_micro_batches_and_the_rest_are_sums() -> None:
    made = sum_up(7, [MetricsRecord(7, 1.5, 16, 6.0, 2), MetricsRecord(7, 0.5, 48, 24.0, 6)])
    assert (made.step, made.loss, made.alive_peers, made.samples, made.samples_per_second) == (7, 30 / 8, 2, 64, 2.0)


def test_a_step_is_told_once_when_the_last_of_its_trainers_has_published() -> None:
    steps = CompleteSteps()
    assert told(steps, {A: record(1)}, {A, B}, 0.0) == []
    assert steps.is_waiting
    assert told(steps, {A: record(1), B: record(1)}, {A, B}, 0.5) == [(1, 2)]
    assert not steps.is_waiting
    assert told(steps, {A: record(1), B: record(1)}, {A, B}, 1.0) == []
    assert told(steps, {A: record(2), B: record(1)}, {A, B}, 1.5) == []
    assert told(steps, {A: record(2), B: record(2)}, {A, B}, 2.0) == [(2, 2)]


def test_a_trainer_without_a_batch_in_the_step_is_waited_for_a_moment_only() -> None:
    steps = CompleteSteps()
    assert told(steps, {A: record(5)}, {A, B, C}, 0.0) == []
    assert told(steps, {A: record(5), B: record(5), C: record(4)}, {A, B, C}, SETTLED_S - 0.1) == []
    assert told(steps, {A: record(5), B: record(5), C: record(4)}, {A, B, C}, 2 * SETTLED_S) == [(5, 2)]


def test_the_metrics_of_peers_that_left_count_in_the_step_that_they_made() -> None:
    steps = CompleteSteps()
    assert told(steps, {A: record(5), C: record(3)}, {A}, 0.0) == [(5, 1)]
    assert told(steps, {A: record(6), C: record(6)}, {A}, 9.0) == [(6, 2)]


def test_a_step_that_was_overtaken_is_skipped_but_not_for_ever() -> None:
    steps, now = CompleteSteps(), 100.0
    assert told(steps, {A: record(1), B: record(1)}, {A, B}, now) == [(1, 2)]
    seen = []
    for step in range(2, 100):
        now += 0.5
        seen += [(now - 100.0, *each) for each in told(steps, {A: record(step), B: record(1)}, {A, B}, now)]
    assert len(seen) == 1
    assert seen[0][0] == LONGEST_SILENCE_S
    assert seen[0][2] == 1
    assert told(steps, {A: record(100), B: record(100)}, {A, B}, now + 0.5) == [(100, 2)]


@pytest.mark.parametrize("metrics", [{}, {A: record(0)}])
def test_nothing_is_told_of_a_run_that_has_made_no_step(metrics: Metrics) -> None:
    assert told(CompleteSteps(), metrics, {A, B}, 0.0) == []
