from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.optim.speed import Advice, SpeedMeter, describe_late_states, working_target


def test_nothing_is_known_before_the_first_batch_was_timed() -> None:
    meter = SpeedMeter()
    assert meter.samples_per_second == 0.0
    meter.count(10, now=5.0)  # what came before it was not computing
    assert meter.samples_per_second == 0.0
    meter.resume(5.0)
    meter.count(10, now=7.0)
    assert meter.samples_per_second == pytest.approx(5.0), "the first value counts whole"


def test_time_spent_in_rounds_does_not_count() -> None:
    meter = SpeedMeter()
    for start in (0.0, 100.0, 200.0):
        meter.resume(start)
        meter.count(8, now=start + 2.0)
    assert meter.samples_per_second == pytest.approx(4.0)


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=30))
def test_the_average_stays_between_the_slowest_and_the_fastest(seconds: list[float]) -> None:
    meter, now = SpeedMeter(), 0.0
    for duration in seconds:
        meter.resume(now)
        now += duration
        meter.count(3, now)
    assert 3 / max(seconds) <= meter.samples_per_second * (1 + 1e-6)
    assert meter.samples_per_second <= 3 / min(seconds) * (1 + 1e-6)


def test_the_meter_follows_a_change() -> None:
    meter, now = SpeedMeter(), 0.0
    for duration in [1.0] * 20 + [0.1] * 20:
        meter.resume(now)
        now += duration
        meter.count(1, now)
    assert 8.0 < meter.samples_per_second <= 10.0


def test_a_clock_that_stands_still_gives_no_speed() -> None:
    meter = SpeedMeter()
    meter.resume(1.0)
    meter.count(4, now=1.0)
    assert meter.samples_per_second == 0.0


def test_steps_shorter_than_their_averaging_are_said_once_with_a_target_that_works() -> None:
    advice = Advice(256)
    said = [advice.after_step(128.0, averaging_s=5.0) for _ in range(9)]
    assert [bool(text) for text in said] == [False, False, True, *[False] * 6]
    assert "target_batch_size=640 instead of 256" in said[2]
    assert not any(Advice(256).after_step(256 / 5.0, averaging_s=2.0) for _ in range(9))


@given(st.floats(0.01, 100), st.floats(0.01, 1000), st.integers(1, 10**6))
def test_at_the_named_target_computing_takes_as_long_as_averaging(
    computing_s: float, averaging_s: float, target: int
) -> None:
    named = working_target(computing_s, averaging_s, target)
    assert named * computing_s / target >= averaging_s * (1 - 1e-9)
    assert named <= max(1.11 * target * averaging_s / computing_s + 1, 1)


def test_a_newcomer_that_is_always_too_late_is_told_a_larger_target() -> None:
    assert "target_batch_size=480 instead of 48 on all peers" in describe_late_states(4, 30.0, 3.0, 48)
    for computing_s in (0.0, 40.0):  # not known; or it is something else that takes so long
        assert "a target_batch_size above 48 on all peers" in describe_late_states(4, 30.0, computing_s, 48)


def test_a_peer_that_waits_for_more_than_a_tenth_of_its_time_hears_of_delayed_steps_once() -> None:
    def said(batch_s: float, wait_s: float) -> list[int]:
        """The global steps after which there is advice; the first one waits for long."""
        meter, advice, now, told = SpeedMeter(), Advice(64), 0.0, []
        meter.resume(now)
        for number in range(1, 41):
            meter.count(8, now := now + batch_s)
            meter.resume(now := now + (wait_s if number > 1 else 0.1 * wait_s))
            if text := advice.of_waiting(meter.computed_s, meter.waited_s):
                assert 'delay="gradients"' in text
                told.append(number)
        return told

    assert said(1.0, 0.25) == [10]
    assert said(1.0, 0.10) == []


def test_a_batch_that_is_larger_than_the_target_is_said_once() -> None:
    advice = Advice(2)  # of one fragment of four
    said = [advice.after_batch(samples, target_batch_size=8) for samples in (8, 9, 100, 4)]
    assert [bool(text) for text in said] == [False, True, False, False]
    assert said[1].startswith("a batch of 9 samples is larger than target_batch_size=8: ")
