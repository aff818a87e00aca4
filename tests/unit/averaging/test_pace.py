from __future__ import annotations

import math

import pytest

from manyhands.averaging.pace import MAX_PACE, Pace

MB = 10**6


def paced_round(pace: Pace, line: float) -> float:
    """Bytes per second of one round: nearly the pace, or somewhat less than the line if that is too fast for it."""
    rate = pace.bytes_per_s
    measured = line if rate is None else 0.98 * rate if rate <= line else 0.93 * line
    pace.add_round(measured, is_paced=rate is not None)
    return measured


def test_there_is_no_pace_before_a_round_has_shown_one() -> None:
    pace = Pace()
    assert pace.bytes_per_s is None
    pace.add_round(5 * MB, is_paced=False)
    assert pace.bytes_per_s == 5 * MB


def test_a_pace_stays_about_what_the_line_carries() -> None:
    pace = Pace()
    rates = [paced_round(pace, 12 * MB) for _ in range(60)]
    assert sum(rates) / len(rates) > 0.95 * 12 * MB
    assert min(rates) > 0.9 * 12 * MB


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_a_pace_follows_a_line_that_changes(factor: float) -> None:
    pace = Pace()
    for line in (12 * MB, factor * 12 * MB):
        rates = [paced_round(pace, line) for _ in range(14)]
    assert rates[-1] == pytest.approx(line, rel=0.15)


def test_rounds_that_were_not_paced_are_followed_both_ways() -> None:
    pace = Pace()
    for measured in (8 * MB, 32 * MB):
        pace.add_round(measured, is_paced=False)
    assert pace.bytes_per_s == pytest.approx(16 * MB)


def test_a_pace_that_is_always_kept_up_has_a_bound() -> None:
    pace = Pace()
    pace.add_round(1.0, is_paced=False)
    for _ in range(3000):
        pace.add_round(math.inf, is_paced=True)
    assert pace.bytes_per_s == MAX_PACE
