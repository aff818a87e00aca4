from __future__ import annotations

import pytest

from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.trial import NUM_NOTED, FittingBatchSize, OutOfMemory, fitting_batch_size


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
def test_the_trial_chooses_the_smallest_batch_size_that_takes_long_enough(
    sample_s: float, limit: int, expected: int
) -> None:
    assert fitting_batch_size(lambda size: size * sample_s, limit) == expected


def test_the_trial_prefers_a_batch_that_is_too_short_to_one_that_is_too_long() -> None:
    assert fitting_batch_size(lambda size: 0.1 if size < 8 else 3.0, 1000) == 4


def test_a_machine_that_is_busy_for_a_moment_gets_the_same_batch_size() -> None:
    delays = iter([0.0, 2.0])
    assert fitting_batch_size(lambda size: 0.01 * size + next(delays, 0.0), 1000) == 32


def test_a_batch_size_that_does_not_fit_into_memory_is_not_chosen() -> None:
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


def sizes_of(fitting: FittingBatchSize, sample_s: float, num_looks: int) -> list[int]:
    """The size after each look at ``NUM_NOTED`` batches."""
    sizes = []
    for _ in range(num_looks):
        for _ in range(NUM_NOTED):
            size = fitting.note(sample_s * fitting.size)
        sizes.append(size)
    return sizes


def test_a_machine_that_was_busy_during_the_trial_takes_larger_batches_later() -> None:
    fitting = FittingBatchSize(lambda size: 0.8 * size, limit=64)
    assert fitting.size == 1
    assert sizes_of(fitting, 0.02, 6) == [2, 4, 8, 16, 16, 16]


def test_a_machine_that_gets_busy_takes_smaller_batches() -> None:
    fitting = FittingBatchSize(lambda size: 0.01 * size, limit=64)
    assert fitting.size == 32
    assert sizes_of(fitting, 0.1, 3) == [16, 8, 8]
    assert sizes_of(fitting, 5.0, 5) == [4, 2, 1, 1, 1]


def test_one_long_batch_changes_nothing() -> None:
    fitting = FittingBatchSize(lambda size: 0.01 * size, limit=64)
    assert {fitting.note(30.0 if index % NUM_NOTED == 0 else 0.3) for index in range(4 * NUM_NOTED)} == {32}


def test_a_batch_size_that_no_longer_fits_is_tried_once_more_only() -> None:
    tried = []

    def seconds_for(size: int) -> float:
        tried.append(size)
        if size > 8:
            raise OutOfMemory("too large")
        return 0.001

    fitting = FittingBatchSize(seconds_for, limit=1000)
    assert fitting.size == 8
    assert sizes_of(fitting, 0.001, 3) == [8, 8, 8]
    assert tried.count(16) == 2, "in the trial, and once more"


def test_the_target_bounds_the_size() -> None:
    assert sizes_of(FittingBatchSize(lambda size: 0.01 * size, limit=6), 0.001, 3) == [4, 4, 4]
