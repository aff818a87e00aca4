from __future__ import annotations

import pytest

from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.trial import OutOfMemory, fitting_batch_size


@pytest.mark.parametrize(
    ("sample_s", "limit", "expected"),
    [
        (0.01, 1000, 32),  # 0.32 s
        (0.2, 1000, 1),
        (5.0, 1000, 1),  # longer than wanted, but less than one sample cannot be
        (0.0001, 64, 64),
        (0.06, 1000, 4),
        (0.15, 1000, 2),
        (0.01, 1, 1),
    ],
)
def test_the_smallest_that_takes_long_enough(sample_s: float, limit: int, expected: int) -> None:
    assert fitting_batch_size(lambda size: size * sample_s, limit) == expected


def test_a_step_from_too_short_to_too_long_stays_short() -> None:
    assert fitting_batch_size(lambda size: 0.1 if size < 8 else 3.0, 1000) == 4


def test_a_machine_that_is_busy_for_a_moment() -> None:
    delays = iter([0.0, 2.0])
    assert fitting_batch_size(lambda size: 0.01 * size + next(delays, 0.0), 1000) == 32


def test_what_does_not_fit_into_memory_is_not_chosen() -> None:
    def seconds_for(size: int) -> float:
        if size > 8:
            raise OutOfMemory("too large")
        return 0.001

    assert fitting_batch_size(seconds_for, 1000) == 8


def test_a_machine_that_cannot_hold_one_sample_is_told_so() -> None:
    def seconds_for(size: int) -> float:
        raise OutOfMemory("1 samples do not fit")

    with pytest.raises(ConfigError, match="do not fit"):
        fitting_batch_size(seconds_for, 1000)
