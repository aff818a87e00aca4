"""Whose clock is right."""

from __future__ import annotations

import pytest

from manyhands.reach.clocks import middle_of


@pytest.mark.parametrize(
    ("offsets", "middle"),
    [
        ([3600.0], 3600.0),
        ([0.1, -3600.0, 0.2], 0.1),
        ([0.1, 3600.0], 0.1),
        ([-3600.0, -0.1], -0.1),
        ([3600.0, 3601.0], 3600.0),
        ([3600.0, 0.1, 3601.0], 3600.0),
    ],
)
def test_a_clock_is_wrong_only_if_more_than_half_of_the_others_say_so(offsets: list[float], middle: float) -> None:
    assert middle_of(offsets) == middle
