"""Rates of requests, of each sender and of all together."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.rate import BURST_S, MIN_SENDERS, Buckets, SharedBuckets


@given(
    takes=st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 5.0)), max_size=60),
    burst=st.integers(1, 4),
    rate=st.floats(0.2, 2.0),
)
def test_no_sender_gets_more_than_its_rate_nor_all_together_more_than_theirs(
    takes: list[tuple[str, float]], burst: int, rate: float
) -> None:
    buckets = SharedBuckets(Buckets(rate, burst), Buckets(1.0, 6))
    taken: dict[str, list[float]] = {sender: [] for sender in "abc"}
    now = 0.0
    for sender, pause_s in takes:
        now += pause_s
        if buckets.take(sender, now):
            taken[sender].append(now)
    of_all = sorted(itertools.chain(*taken.values()))
    for times, most, each_s in [*((its, burst, rate) for its in taken.values()), (of_all, 6, 1.0)]:
        for start in range(len(times)):
            for end in range(start, len(times)):
                assert end - start + 1 <= most + math.floor((times[end] - times[start]) * each_s + 1e-6)


def test_a_refused_request_does_not_count() -> None:
    buckets = Buckets(0.1, 2)
    assert [buckets.take("a", at_s) for at_s in (0.0, 0.0, 1.0, 9.0)] == [True, True, False, False]
    assert buckets.take("b", 9.0)
    assert [buckets.take("a", at_s) for at_s in (10.0, 10.0)] == [True, False]


def test_what_is_refused_for_all_does_not_count_for_its_sender() -> None:
    buckets = SharedBuckets(Buckets(0.1, 1), Buckets(1.0, 1))
    assert buckets.take("a", 0.0)
    assert not buckets.take("b", 0.5)
    assert buckets.take("b", 1.0)


def test_what_was_given_back_may_be_taken_again() -> None:
    buckets = SharedBuckets(Buckets(1 / 60, 1), Buckets(1 / 60, 1))
    for _ in range(3):
        assert buckets.take("here", 5.0)
        buckets.give_back("here")
    assert buckets.take("here", 5.0)
    assert not buckets.take("here", 5.0)


def test_a_quiet_sender_may_send_the_requests_of_some_seconds_at_once_and_at_least_one() -> None:
    for rate, num_at_once in ((100.0, 100 * BURST_S), (0.01, 1)):
        buckets = Buckets(rate)
        assert sum(buckets.take("a", 7.0) for _ in range(1000)) == num_at_once


def test_senders_that_owe_nothing_are_forgotten() -> None:
    buckets = Buckets(1.0, 3)
    for number in range(100 * MIN_SENDERS):
        assert buckets.take(str(number), float(number))
    assert len(buckets) <= 2 * MIN_SENDERS


def test_senders_that_are_refused_by_the_limit_of_all_are_not_remembered() -> None:
    each = Buckets(0.1, 1)
    buckets = SharedBuckets(each, Buckets(1.0, 3))
    assert sum(buckets.take(str(number), 0.001 * number) for number in range(10_000)) == 3 + 9
    assert len(each) <= 2 * MIN_SENDERS
