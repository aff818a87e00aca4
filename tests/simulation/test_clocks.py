"""A trainer whose clock is so wrong that it and the others cannot read each other's records."""

from __future__ import annotations

import logging

import pytest

from manyhands.testing import at
from tests.simulation.test_copied_identities import Machines


@pytest.mark.parametrize(
    ("ahead_s", "words"), [(3600.0, "3600 s ahead of"), (75.0, "75 s ahead of"), (-90.0, "90 s behind")]
)
def test_a_trainer_whose_clock_is_wrong_by_more_than_60_s_is_refused_at_its_start(ahead_s: float, words: str) -> None:
    machines = Machines()
    machines.start("other", 0.0)
    machines.start("late", 1.0)
    machines.world.host("late").skew_s = ahead_s
    machines.world.run(60.0)
    ended_at, why = machines.ended["late"]
    assert ended_at < 10.0
    assert f"the clock of this machine is about {words} the clocks of the other peers, and 60 s are allowed" in why
    assert "timedatectl set-ntp true" in why
    assert machines.optimizers["other"].global_step > 0


@pytest.mark.parametrize("ahead_s", [45.0, -45.0])
def test_a_clock_that_is_wrong_by_45_s_costs_nothing(ahead_s: float) -> None:
    machines = Machines()
    machines.start("other", 0.0)
    machines.start("late", 1.0)
    machines.world.host("late").skew_s = ahead_s
    machines.world.run(60.0)
    assert not machines.ended
    assert machines.optimizers["late"].statistics.samples_used > 0


@pytest.mark.parametrize(("ahead_s", "words"), [(3600.0, "3600 s ahead of"), (-90.0, "90 s behind")])
def test_a_trainer_that_sees_nobody_because_of_its_clock_is_told(
    caplog: pytest.LogCaptureFixture, ahead_s: float, words: str
) -> None:
    machines = Machines()
    machines.start("other", 0.0)
    machines.start("late", 1.0)
    machines.world.schedule(at(10.0).clock("late", ahead_s))
    caplog.set_level(logging.WARNING)
    machines.world.run(60.0)
    assert f"the clock of this machine is {words} those of other peers" in caplog.text
