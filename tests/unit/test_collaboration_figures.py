"""The figures of benchmarks/collaboration.py, from events whose figures are known."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _collaboration_figures import (
    Steps,
    Trainer,
    Window,
    after_kill_figures,
    at_samples,
    medians,
    newcomer_figures,
    partial_or_failed,
    share_of_ideal,
    steady_figures,
)

BATCH, PACE_S = 8, 0.5


def trained(rank: int, num_steps: int, *, batches: int = 4, wait_s: float = 0.5, begins: float = 0.0) -> Trainer:
    """A trainer whose steps have some batches each, and then a wait; two trainers are in each step."""
    trainer = Trainer(rank, BATCH, PACE_S, started=begins - 3.0, events=[{"kind": "imported", "at": begins - 1.0}])
    now = begins
    for step in range(1, num_steps + 1):
        for number in range(batches):
            computed = now + PACE_S
            returned = computed + (wait_s if number == batches - 1 else 0.0)
            trainer.events.append(
                {"kind": "batch", "began": now, "computed": computed, "returned": returned, "gradients_s": 0.1}
            )
            now = returned
        trainer.events.append(step_event(step, now, BATCH * batches, frozen_at=now - wait_s))
    return trainer


def step_event(step: int, at: float, contributed: int, *, frozen_at: float, members: int = 2) -> dict[str, Any]:
    return {
        "kind": "step", "step": step, "at": at, "contributed": contributed, "members": members, "frozen_at": frozen_at,
    }  # fmt: skip


def test_the_steady_part_goes_from_its_first_to_its_last_step() -> None:
    trainers = [trained(0, 10), trained(1, 10)]
    figures = steady_figures(trainers, Steps(trainers), Window(2.0, 24.0), target=60)  # steps at 2.5, 5.0, ... 22.5
    assert figures["share_of_ideal"] == pytest.approx(0.8)
    assert figures["samples_per_s_used"] == pytest.approx(2 * 32 / 2.5)
    assert figures["global_steps_per_min"] == pytest.approx(24.0)
    assert figures["wait_per_step_s"] == pytest.approx(0.5)
    assert figures["samples_over_target"] == pytest.approx(64 / 60)
    assert figures["slow_batches"] == 0


def test_a_batch_counts_by_the_part_of_its_time_in_the_window() -> None:
    trainer = trained(0, 1, batches=1)
    assert trainer.computed(Window(0.25, 10.0)) == pytest.approx(4.0)
    assert share_of_ideal([trainer], Window(0.0, 1.0)) == pytest.approx(0.5)


def test_recovery_ends_with_the_last_long_call_after_the_kill() -> None:
    trainer = trained(0, 4)  # waits of 0.5 s; it ends at 10.0
    trainer.events.append({"kind": "batch", "began": 10.0, "computed": 10.5, "returned": 13.0, "gradients_s": 0.1})
    figures = after_kill_figures([trainer], Window(0.0, 10.0), Window(10.0, 20.0))
    assert figures["recovery_s"] == pytest.approx(3.0)
    assert after_kill_figures([trainer], Window(0.0, 13.0), Window(13.0, 20.0))["recovery_s"] == 0


def test_the_first_contribution_is_the_first_batch_that_a_step_counts() -> None:
    newcomer = trained(2, 2, batches=4, begins=100.0)
    newcomer.events[5]["contributed"] = 0  # the step is made without the batches so far
    assert newcomer.first_contribution() == pytest.approx(103.0)
    figures = newcomer_figures(newcomer, [trained(0, 60)], Window(45.0, 97.5), Window(97.5, 140.0))
    assert figures["newcomer_first_contribution_s"] == pytest.approx(6.0)
    assert figures["newcomer_beyond_imports_s"] == pytest.approx(4.0)
    assert figures["others_slowed_by_newcomer"] == pytest.approx(0.0, abs=0.02)


def test_steps_without_a_trainer_that_is_there_are_partial_but_not_before_it_is() -> None:
    one, other = trained(0, 6), trained(1, 6)
    for trainer in (one, other):
        for event in trainer.of("step"):
            if event["step"] in (1, 4):
                event["members"] = 1
    one.events.append({"kind": "step", "step": 4, "at": 10.0, "contributed": 0, "members": 2, "frozen_at": 10.0})
    lived = {0: 100.0, 1: 100.0, 2: 100.0}
    late = trained(2, 1, begins=11.0)
    late.events[-1] |= {"step": 6, "at": 15.0}
    everyone = [one, other, late]
    assert partial_or_failed(everyone, Steps(everyone), lived, Window(0.0, 20.0)) == 1, "step 6 has two of three"
    one.events.append({"kind": "failed", "step": 3, "at": 7.0})
    assert partial_or_failed(everyone, Steps(everyone), lived, Window(0.0, 20.0)) == 2
    assert partial_or_failed(everyone, Steps(everyone), lived | {2: 12.0}, Window(0.0, 20.0)) == 1


def test_the_loss_is_interpolated_between_steps() -> None:
    steps = Steps([trained(0, 4), trained(1, 4)])  # 64 samples a step
    assert at_samples({1: 8.0, 2: 6.0}, steps, 96) == pytest.approx(7.0)
    assert at_samples({1: 8.0}, steps, 64) == 8.0
    assert at_samples({1: 8.0}, steps, 65) is None


def test_a_figure_that_a_run_lacks_is_the_median_of_the_others() -> None:
    found, spread = medians([{"a": 1.0, "b": None}, {"a": 3.0, "b": 2.0}, {"a": 2.0, "b": 4.0}])
    assert found == {"a": 2.0, "b": 3.0}
    assert spread == {"a": [1.0, 3.0], "b": [2.0, 4.0]}
