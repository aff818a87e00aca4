"""What rounds show of the uplink of a peer."""

from __future__ import annotations

import math

import pytest

from manyhands.averaging.allreduce.bandwidth import UNTESTED, ExchangeFigures, RoundBandwidth
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import MAX_BANDWIDTH
from manyhands.base.errors import ConfigError

MB = 10**6
ROUND_S = 30.0


def add_round(bandwidth: RoundBandwidth, rate: float | None, *, num_bytes: int = 10 * MB, seconds: float = 1.0) -> None:
    """A whole round."""
    bandwidth.begin_round(ROUND_S)
    exchange = ExchangeFigures(num_due=num_bytes, num_sent=num_bytes, seconds=0.9 * seconds, rate=rate)
    bandwidth.add_exchange(exchange)
    bandwidth.end_round(seconds, is_whole=True)


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
def test_any_rate_can_be_told(rate: float) -> None:
    assert 0 < after(rate).bandwidth <= MAX_BANDWIDTH
    bandwidth = RoundBandwidth(None)
    add_round(bandwidth, None, num_bytes=10**15, seconds=0.0)
    assert bandwidth.bandwidth == MAX_BANDWIDTH


def broken(num_due: int, num_sent: int, seconds: float, *, declared: float | None = None) -> RoundBandwidth:
    """After the exchange of a round in which somebody was too slow, as bytes and seconds."""
    bandwidth = RoundBandwidth(declared)
    bandwidth.begin_round(ROUND_S)
    bandwidth.add_exchange(ExchangeFigures(num_due=num_due, num_sent=num_sent, seconds=seconds))
    bandwidth.add_exchange(ExchangeFigures(num_due=1, num_sent=1, seconds=1.0))  # of what was reduced again
    return bandwidth


def test_who_was_too_slow_can_send_at_most_what_would_have_been_enough() -> None:
    """All that it had to send was in the buffers, long before it had gone."""
    bandwidth = broken(1_500_000, 1_500_000, 15.2)
    bandwidth.lose_round()
    assert bandwidth.bandwidth == 50_000


def test_or_what_it_sent_if_that_is_less() -> None:
    bandwidth = broken(1_500_000, 152_000, 15.2, declared=1e6)
    bandwidth.lose_round()
    assert bandwidth.bandwidth == 10_000


def test_who_was_known_to_be_slower_is_not_faster_now() -> None:
    bandwidth = broken(1_500_000, 1_500_000, 15.2, declared=20_000.0)
    bandwidth.lose_round()
    assert bandwidth.bandwidth == 20_000


def test_who_was_lost_sooner_was_not_too_slow() -> None:
    bandwidth = broken(1_000_000, 152_000, 8.0, declared=1e6)
    bandwidth.lose_round()
    assert bandwidth.bandwidth == 1_000_000


def test_the_others_sent_all_of_theirs_meanwhile() -> None:
    """So they know that they are faster, also if this is their first round."""
    bandwidth = broken(1_500_000, 1_500_000, 15.0)
    bandwidth.end_round(16.0, is_whole=False)
    assert bandwidth.bandwidth == UNTESTED * 100_000
    faster = broken(1_500_000, 1_500_000, 15.0, declared=1e6)
    faster.end_round(16.0, is_whole=False)
    assert faster.bandwidth == 1_000_000


def test_a_round_in_which_somebody_died_shows_nothing() -> None:
    bandwidth = broken(1_500_000, 1_500_000, 2.0)
    bandwidth.end_round(8.0, is_whole=False)
    assert bandwidth.bandwidth == 0


def test_a_group_that_formed_when_the_time_was_over_shows_nothing() -> None:
    bandwidth = RoundBandwidth(1e6)
    bandwidth.begin_round(-0.1)
    bandwidth.add_exchange(ExchangeFigures(num_due=1_000_000, num_sent=0, seconds=0.1))
    bandwidth.lose_round()
    assert bandwidth.bandwidth == 1_000_000


@pytest.mark.parametrize("mbit_s", [0.0, -1.0, math.nan, math.inf, 8e6 + 1])
def test_a_declared_figure_that_is_none_is_refused(mbit_s: float) -> None:
    with pytest.raises(ConfigError, match="bandwidth_mbit_s"):
        AveragingConfig(bandwidth_mbit_s=mbit_s)
