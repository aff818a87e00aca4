"""What counts is what a member's streams carry while nothing but lines holds them up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.rpc.uplink import MIN_BUSY_S, RAMP_UP_S, Backlog
from manyhands.transport.api import Delivery

MB = 10**6
LOOK_S = 0.1


class Streams:
    """The streams of one round, looked at again and again."""

    def __init__(self, *sizes: float) -> None:
        self.backlog = Backlog()
        self.sizes = list(sizes)
        self._now = 100.0
        self._look(0.0, [0.0] * len(sizes), [0.0] * len(sizes))

    def _look(self, seconds: float, rates: Sequence[float], busy: Sequence[float]) -> None:
        self._now += seconds
        changes = {
            number: Delivery(round(rate * seconds), round(rate * seconds), 0, share * seconds)
            for number, (rate, share) in enumerate(zip(rates, busy, strict=True))
        }
        self.backlog.add(self._now, {number: self.sizes[number] for number in changes}, changes)

    def send(self, seconds: float, rates: Sequence[float], busy: Sequence[float] | None = None) -> None:
        """For so long, at so many bytes per second; by default all streams are busy all of the time."""
        for _ in range(round(seconds / LOOK_S)):
            self._look(LOOK_S, rates, [1.0] * len(rates) if busy is None else busy)


def test_streams_that_share_a_line_add_up() -> None:
    streams = Streams(1.0, 1.0, 1.0)
    streams.send(3.0, [5.0 * MB, 4.0 * MB, 3.0 * MB])
    assert streams.backlog.rate == pytest.approx(12 * MB)
    assert streams.backlog.seconds == pytest.approx(3.0 - RAMP_UP_S, abs=1.5 * LOOK_S)


def test_the_beginning_of_streams_does_not_count_in_their_rate() -> None:
    streams = Streams(1.0, 1.0)
    streams.send(RAMP_UP_S + LOOK_S, [0.1 * MB, 0.1 * MB])
    streams.send(1.0, [6.0 * MB, 6.0 * MB])
    assert streams.backlog.rate == pytest.approx(12 * MB, rel=0.1)


def test_time_in_which_a_stream_waits_for_others_does_not_count() -> None:
    streams = Streams(1.0, 1.0, 1.0)
    streams.send(2.0, [4.0 * MB, 4.0 * MB, 4.0 * MB])
    streams.send(20.0, [4.0 * MB, 0.4 * MB, 0.0], [1.0, 0.1, 0.0])
    assert streams.backlog.rate == pytest.approx(12 * MB)
    assert streams.backlog.seconds < 2.0


def test_a_sender_that_mostly_waits_for_slow_members_still_shows_its_rate() -> None:
    """The stream to a fast member is busy for a tenth of the time; the others go as slow members let them."""
    streams = Streams(2.0, 1.0, 1.0)
    streams.send(10.0, [0.8 * MB, 2.0 * MB, 2.0 * MB], [0.1, 1.0, 1.0])
    assert streams.backlog.rate == pytest.approx(12 * MB)
    assert streams.backlog.seconds == 0.0


def test_a_large_stream_that_was_hardly_ever_busy_says_nothing() -> None:
    streams = Streams(1.0, 1.0, 1.0)
    streams.send(2.0, [4.0 * MB, 4.0 * MB, 0.5 * MB], [1.0, 1.0, 0.1])
    assert streams.backlog.rate is None


def test_a_stream_that_has_hardly_anything_to_send_need_not_be_busy() -> None:
    streams = Streams(10.0, 10.0, 1.0)
    streams.send(2.0, [6.0 * MB, 6.0 * MB, 0.0], [1.0, 1.0, 0.0])
    assert streams.backlog.rate == pytest.approx(12 * MB)
    assert streams.backlog.seconds > 1.0


def test_a_stream_that_comes_later_settles_first() -> None:
    streams = Streams(1.0)
    streams.send(1.2, [6.0 * MB])
    streams.sizes.append(1.0)
    streams.send(RAMP_UP_S, [6.0 * MB, 0.1 * MB])
    streams.send(2.0, [6.0 * MB, 6.0 * MB])
    assert streams.backlog.rate == pytest.approx(12 * MB, rel=0.1)


def test_the_rate_of_a_closed_stream_counts() -> None:
    streams = Streams(1.0, 1.0)
    streams.send(1.2, [6.0 * MB, 6.0 * MB])
    streams.send(3.0, [6.0 * MB])
    assert streams.backlog.rate == pytest.approx(12 * MB)


def test_a_short_time_gives_no_rate() -> None:
    streams = Streams(1.0)
    streams.send(RAMP_UP_S + MIN_BUSY_S / 2, [12.0 * MB])
    assert streams.backlog.rate is None
    streams.send(2 * MIN_BUSY_S, [12.0 * MB])
    assert streams.backlog.rate == pytest.approx(12 * MB)


def test_no_streams_give_no_rate() -> None:
    streams = Streams()
    streams.send(3.0, [])
    assert streams.backlog.rate is None
    assert streams.backlog.seconds == 0.0


@given(
    st.lists(
        st.tuples(
            st.floats(0, 5), st.lists(st.tuples(st.integers(0, 10**12), st.floats(0, 10)), max_size=4), st.floats(0, 10)
        ),
        max_size=20,
    )
)
def test_any_looks_give_a_rate_that_can_be_told(looks: list[tuple[float, list[tuple[int, float]], float]]) -> None:
    backlog, now = Backlog(), 0.0
    for seconds, streams, size in looks:
        now += seconds
        changes = {number: Delivery(amount, amount, 0, busy_s) for number, (amount, busy_s) in enumerate(streams)}
        backlog.add(now, dict.fromkeys(changes, size), changes)
    assert backlog.rate is None or 0 < backlog.rate < math.inf
