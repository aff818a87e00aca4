from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.averaging.allreduce.bandwidth import BandwidthMeter, Send, backlogged_rate
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import MAX_BANDWIDTH
from manyhands.base.errors import ConfigError

MB = 10**6


def steady(rate: float, num_bytes: int, *, to: int = 0, began: float = 0.0, chunk_bytes: int = MB // 2) -> list[Send]:
    """Chunks one after the other to one member, at ``rate`` bytes per second."""
    seconds = chunk_bytes / rate
    return [
        Send(to, began + number * seconds, began + (number + 1) * seconds, chunk_bytes)
        for number in range(num_bytes // chunk_bytes)
    ]


def test_streams_that_share_an_uplink_add_up() -> None:
    sends = [send for to in range(4) for send in steady(25 * MB, 20 * MB, to=to)]
    assert backlogged_rate(sends) == pytest.approx(100 * MB)


def test_pauses_in_which_nothing_is_sent_do_not_count() -> None:
    sends = [send for pause in range(10) for send in steady(50 * MB, 5 * MB, began=1.0 * pause)]
    assert backlogged_rate(sends) == pytest.approx(50 * MB)


def test_what_few_streams_wait_for_does_not_count() -> None:
    """Three streams are done soon; the fourth goes on for long, since who is at its other end is slow."""
    sends = [send for to in range(3) for send in steady(100 * MB, 100 * MB, to=to)]
    sends += steady(1 * MB, 50 * MB, to=3)
    assert backlogged_rate(sends) == pytest.approx(301 * MB, rel=0.02)


def test_what_fits_into_the_buffers_of_the_system_does_not_count() -> None:
    assert backlogged_rate(steady(10_000 * MB, 4 * MB)) is None
    into_buffers = steady(10_000 * MB, 4 * MB)
    sends = into_buffers + steady(2 * MB, 2 * MB, began=into_buffers[-1].ended)
    assert backlogged_rate(sends) == pytest.approx(2 * MB)


def test_a_backlog_that_empties_in_steps_is_seen_as_what_it_lets_through() -> None:
    """A stream takes four chunks at once, and holds up the fifth until there is room for four more."""
    sends, now = [], 0.0
    for _ in range(200):
        for seconds in (1e-5, 1e-5, 1e-5, 0.005 - 3e-5):
            sends.append(Send(0, now, now + seconds, 65536))
            now += seconds
    assert backlogged_rate(sends) == pytest.approx(4 * 65536 / 0.005, rel=0.05)


@pytest.mark.parametrize(
    "sends",
    [
        [],
        [Send(0, 1.0, 1.0, MB)],
        [Send(0, 1.0, 0.5, MB)],
        [Send(0, 0.0, 0.05, MB)],
        [Send(0, 0.0, 5.0, 0)],
        [Send(to, 10.0 * to, 10.0 * to + 5.0, MB // 10) for to in range(5)],
    ],
)
def test_rounds_that_say_nothing_change_nothing(sends: list[Send]) -> None:
    assert backlogged_rate(sends) is None
    meter = BandwidthMeter(5 * MB)
    meter.add_round(None, sum(send.num_bytes for send in sends), 1.0)
    assert meter.bandwidth == 5 * MB


@given(
    st.lists(
        st.builds(Send, st.integers(0, 3), st.floats(0, 100), st.floats(0, 100), st.integers(0, 10**12)), max_size=20
    )
)
def test_any_sends_give_a_rate_that_can_be_told(sends: list[Send]) -> None:
    rate = backlogged_rate(sends)
    assert rate is None or 0 < rate < math.inf
    meter = BandwidthMeter()
    meter.add_round(rate, sum(send.num_bytes for send in sends), 0.0)
    assert 0 <= meter.bandwidth <= MAX_BANDWIDTH
    assert rate is None or meter.bandwidth > 0


def test_sends_that_may_all_be_in_the_buffers_show_no_rate() -> None:
    sends = [send for to in range(8) for send in steady(5 * MB, 1 * MB, to=to)]
    assert backlogged_rate(sends) is None


def after(*measured: float, declared: float | None = None) -> BandwidthMeter:
    """After rounds that showed these rates, in bytes per second."""
    meter = BandwidthMeter(declared)
    for rate in measured:
        meter.add_round(rate, 10 * MB, 1.0)
    return meter


def test_nothing_is_known_before_the_first_round() -> None:
    assert after().bandwidth == 0
    assert after(10.0 * MB).bandwidth == 10 * MB


@pytest.mark.parametrize("declared", [1.0, 10.0 * MB, 1e12])
def test_a_guess_is_forgotten_within_some_rounds(declared: float) -> None:
    assert after(declared=declared).bandwidth == declared
    assert after(10.0 * MB, 10.0 * MB, declared=declared).bandwidth == 10 * MB


@pytest.mark.parametrize("odd", [1.0, 5.0 * MB, 40.0 * MB, 1e12])
def test_one_odd_round_does_not_count(odd: float) -> None:
    good = 10.0 * MB
    for number in range(1, 5):
        rounds = [good] * 5
        rounds[number] = odd
        for seen in range(3, 6):
            assert after(*rounds[:seen]).bandwidth == good


def test_of_two_rounds_the_better_one_counts() -> None:
    """What seems too slow gets less to send, and may never show that it is not."""
    assert after(5.0 * MB, 10.0 * MB).bandwidth == after(10.0 * MB, 5.0 * MB).bandwidth == 10 * MB


@pytest.mark.parametrize("factor", [0.1, 0.25, 0.5, 2, 10])
def test_a_line_that_became_faster_or_slower_is_found_in_the_second_round(factor: float) -> None:
    assert after(*[10.0 * MB] * 8, *[factor * 10 * MB] * 2).bandwidth == factor * 10 * MB


def test_who_was_not_held_up_counts_as_somewhat_faster_than_it_was() -> None:
    meter = BandwidthMeter()
    meter.add_round(None, 20 * MB, 2.0)
    assert meter.bandwidth == 15 * MB
    meter.add_round(None, 20 * MB, 4.0)
    assert meter.bandwidth == 15 * MB, "that a round was slow for others says nothing about this peer"
    for _ in range(2):
        meter.add_round(5.0 * MB, 10 * MB, 2.0)
    assert meter.bandwidth == 5 * MB, "but what was measured does"
    meter.add_round(None, 20 * MB, 2.0)
    assert meter.bandwidth == 15 * MB, "and so does that it was faster than that"


def test_who_held_the_others_up_is_no_faster_than_that() -> None:
    meter = after(10.0 * MB, 10.0 * MB, 10.0 * MB)
    meter.add_at_most(20.0 * MB)
    assert meter.bandwidth == 10 * MB
    meter.add_at_most(2.0 * MB)
    assert meter.bandwidth == 2 * MB


@pytest.mark.parametrize("mbit_s", [0.0, -1.0, math.nan, math.inf, 8e6 + 1])
def test_a_declared_figure_that_is_none_is_refused(mbit_s: float) -> None:
    with pytest.raises(ConfigError, match="bandwidth_mbit_s"):
        AveragingConfig(bandwidth_mbit_s=mbit_s)
