"""A trainer whose clock is so wrong that it can read no record of the others."""

from __future__ import annotations

import logging

import pytest

from tests.simulation.test_twins import Machines


@pytest.mark.parametrize(("ahead_s", "words"), [(3600.0, "3600 s ahead of"), (-90.0, "90 s behind")])
def test_a_trainer_that_sees_nobody_because_of_its_clock_is_told(
    caplog: pytest.LogCaptureFixture, ahead_s: float, words: str
) -> None:
    machines = Machines()
    machines.start("other", 0.0)
    machines.start("late", 1.0)
    machines.world.host("late").skew_s = ahead_s
    caplog.set_level(logging.WARNING)
    machines.world.run(60.0)
    assert f"the clock of this machine is {words} those of other peers" in caplog.text
