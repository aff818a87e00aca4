"""A peer that downloads the state again and again holds nobody up for long; one that then comes is waited for."""

from __future__ import annotations

import itertools

from manyhands.base.identity import PeerId
from manyhands.optim.run.collaboration import PAUSE_S, Courtesy

MATE, GUEST = PeerId("mate"), PeerId("guest")
STEP_S = 10.0


def test_who_never_comes_to_the_round_is_waited_for_once_and_then_hardly_ever() -> None:
    """Whatever identity it takes."""
    courtesy, waits = Courtesy(), []
    for number in range(400):
        now = number * STEP_S
        if courtesy.begin_wait([PeerId(f"guest {number}")], now):
            waits.append(now)
        courtesy.note_step([MATE], now + 1.0)
    gaps = [later - earlier for earlier, later in itertools.pairwise(waits)]
    assert gaps
    assert all(PAUSE_S <= gap <= PAUSE_S + STEP_S for gap in gaps)


def test_who_comes_is_waited_for_the_next_time_too() -> None:
    courtesy = Courtesy()
    for number in range(100):
        now = number * STEP_S
        assert courtesy.begin_wait([GUEST], now)
        courtesy.note_step([MATE, GUEST], now + 1.0)


def test_steps_that_wait_for_nobody_change_nothing() -> None:
    courtesy = Courtesy()
    for number in range(100):
        assert not courtesy.begin_wait([], float(number))
        courtesy.note_step([MATE], float(number))
    assert courtesy.begin_wait([GUEST], 100.0)
