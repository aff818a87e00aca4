"""What rounds show of the uplink of a peer."""

from __future__ import annotations

import math

import pytest

from manyhands.averaging.allreduce.bandwidth import UNTESTED, RoundBandwidth
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import MAX_BANDWIDTH
from manyhands.base.errors import ConfigError

MB = 10**6


def add_round(bandwidth: RoundBandwidth, rate: float | None, *, num_bytes: int = 10 * MB, seconds: float = 1.0) -> None:
    bandwidth.end_round(num_bytes, seconds, rate)


def after(*measured: float, declared: float | None = None) -> RoundBandwidth:
    """After rounds that showed these rates, in bytes per second."""
    bandwidth = RoundBandwidth(declared)
    for rate in measured:
        add_round(bandwidth, rate)
    return bandwidth


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


def test_a_round_in_which_a_client_could_not_reduce_shows_nothing() -> None:
    """It sent a part of what a reducer sends, and the reducers' lines may have held it up."""
    bandwidth = RoundBandwidth(None)
    bandwidth.end_round(10 * MB, 1.0, None, could_reduce=False)
    bandwidth.end_round(10 * MB, 1.0, 30.0 * MB, could_reduce=False)
    assert bandwidth.bandwidth == 0
    assert bandwidth.end_slow_round(10 * MB, 10.0, could_reduce=False) == MB
    assert bandwidth.bandwidth == 0


def test_without_a_rate_a_peer_counts_as_somewhat_faster_than_it_was() -> None:
    bandwidth = RoundBandwidth(None)
    add_round(bandwidth, None, num_bytes=20 * MB, seconds=2.0)
    assert bandwidth.bandwidth == 15 * MB
    add_round(bandwidth, None, num_bytes=20 * MB, seconds=4.0)
    assert bandwidth.bandwidth == 15 * MB, "that a round was slow for others says nothing about this peer"
    for _ in range(2):
        add_round(bandwidth, 5.0 * MB)
    assert bandwidth.bandwidth == 5 * MB, "but what was measured does"
    add_round(bandwidth, None, num_bytes=20 * MB, seconds=2.0)
    assert bandwidth.bandwidth == 15 * MB, "and so does that it was faster than that"


@pytest.mark.parametrize(("num_bytes", "seconds"), [(0, 1.0), (MB, 1.0), (MB, 0.0)])
def test_a_round_with_little_to_send_says_nothing(num_bytes: int, seconds: float) -> None:
    bandwidth = RoundBandwidth(5.0 * MB)
    add_round(bandwidth, None, num_bytes=num_bytes, seconds=seconds)
    assert bandwidth.bandwidth == 5 * MB


@pytest.mark.parametrize("rate", [1e-9, 1e300])
def test_extreme_rates_stay_within_the_bounds_of_a_bandwidth(rate: float) -> None:
    assert 0 < after(rate).bandwidth <= MAX_BANDWIDTH
    bandwidth = RoundBandwidth(None)
    add_round(bandwidth, None, num_bytes=10**15, seconds=0.0)
    assert bandwidth.bandwidth == MAX_BANDWIDTH


def test_a_blamed_peer_reduces_nothing_until_a_round_shows_its_rate() -> None:
    bandwidth = after(10.0 * MB, 10.0 * MB)
    bandwidth.lose_round()
    assert (bandwidth.bandwidth, bandwidth.may_reduce) == (0, False)
    add_round(bandwidth, None, num_bytes=20 * MB, seconds=20.0)
    assert (bandwidth.bandwidth, bandwidth.may_reduce) == (UNTESTED * MB, True)
    bandwidth.lose_round()
    add_round(bandwidth, 5.0 * MB)
    assert bandwidth.bandwidth == 5 * MB
    bandwidth.lose_round()
    add_round(bandwidth, None, num_bytes=100)
    assert bandwidth.bandwidth == 0, "of a small vector it reduces its part again"


def test_after_blame_what_the_user_declared_counts_again() -> None:
    bandwidth = after(20.0 * MB, 20.0 * MB, declared=10.0 * MB)
    for num_bytes in (100, 2 * MB):
        bandwidth.lose_round()
        assert (bandwidth.bandwidth, bandwidth.may_reduce) == (0, False)
        add_round(bandwidth, None, num_bytes=num_bytes)
        assert bandwidth.bandwidth == 10 * MB


@pytest.mark.parametrize("mbit_s", [0.0, -1.0, math.nan, math.inf, 8e6 + 1])
def test_a_declared_figure_that_is_none_is_refused(mbit_s: float) -> None:
    with pytest.raises(ConfigError, match="bandwidth_mbit_s"):
        AveragingConfig(bandwidth_mbit_s=mbit_s)
