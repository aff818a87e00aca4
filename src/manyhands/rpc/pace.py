"""Computes the total send rate for the streams of this peer on long links, from their acknowledgements. Pure.

Several streams that each try to fill one line overflow its queue and get unfair shares. They do not if the system paces
them at about the capacity of the line. That capacity shows in the highest rate of acknowledgements within some seconds:
no line acknowledges more than it carries, however slow the receivers are.

All members of a round finish together, so none could ever show a faster line if each sent at its last rate. So the pace
is a little above it. A pace that is too high costs almost nothing, and one that is too low costs in proportion. So
the pace rises quickly and falls slowly:

* The first interval counts if the streams were backlogged for most of it. Otherwise a peer with a fast line among slow
  ones would take their speed for its own, and be paced to it for good.
* An interval that kept up with its pace, without losses, has shown a faster line; the next pace is raised by more.
* A slower interval shows nothing: streams also wait for late members.
* Losses above the random rate hold the pace at the rate of the line for a while; in two consecutive intervals, they
  lower it to the delivered rate. If the losses then stay the same, they are random, and do not lower the pace for
  a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from manyhands.transport.api import Delivery

MIN_INTERVAL_S = 3.0
"""A shorter interval gives no rate: connections take a few round trips to reach their speed."""

MIN_BACKLOGGED = 0.5
"""Least share of the first interval in which the streams were backlogged."""

MAX_WINDOW_S = 2.0
"""The best rate is measured over this time, or half of the interval. Acknowledgements come in bursts: over less time
there may be many more than the line carries."""

KEPT_UP = 0.98
"""Least ratio of the best rate to the pace if the pace was the limit, so that the interval kept up with it."""

STEP = 0.05
"""Share by which the pace exceeds the rate of the line. It doubles after each interval that kept up."""

MAX_STEP = 0.4
"""Largest share by which the pace exceeds the rate of the line."""

HOLD = 2
"""Intervals after one with losses in which the pace does not exceed the rate of the line."""

MIN_LOSS = 0.02
"""Share of retransmitted bytes up to which losses are normal."""

NUM_LOSSY = 2
"""Consecutive intervals with losses that lower the pace."""

HELPED = 0.6
"""Lowering the pace has helped if losses fell by at least ``1 - HELPED`` of what was expected."""

CHANCE = 1.5
"""Losses up to this multiple of the last random losses count as random too."""

CHANCE_INTERVALS = 64
"""Intervals for which the last random losses are remembered."""

FASTEST_FALL = 0.7
"""Least ratio of a lowered pace to the one before."""

MAX_PACE = 1e12
"""Upper limit of the pace, in bytes per second."""


class MonitorInterval(NamedTuple):
    """Measurements of all streams on long links over some seconds.

    Attributes:
        best: highest delivery rate within it, in bytes per second.
        loss: share of the sent bytes that were retransmissions.
        backlogged: share of the time in which nearly all streams had data to send, and room at the receiver.
    """

    best: float
    loss: float
    backlogged: float = 1.0


class IntervalSampler:
    """Collects samples of the streams and summarizes them as intervals."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, Delivery]] = []

    def begin(self) -> None:
        """Drop earlier samples, from an idle time or another pace."""
        self._samples.clear()

    def add(self, now: float, total: Delivery) -> None:
        """Add the totals of all streams at ``now`` (seconds of one clock), counted from any start."""
        self._samples.append((now, total))

    @property
    def seconds(self) -> float:
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0

    def interval(self) -> MonitorInterval | None:
        """Return the interval since :meth:`begin`; None if it is too short or nothing was sent."""
        if self.seconds < MIN_INTERVAL_S:
            return None
        first = self._samples[0][1]
        last = self._samples[-1][1]
        if (num_sent := last.sent - first.sent) <= 0:
            return None
        window_s = min(MAX_WINDOW_S, self.seconds / 2)
        best = _best_rate([(at, total.delivered) for at, total in self._samples], window_s)
        backlogged = (last.busy_s - first.busy_s) / self.seconds
        return MonitorInterval(best, (last.resent - first.resent) / num_sent, backlogged)


def _best_rate(samples: Sequence[tuple[float, int]], window_s: float) -> float:
    """Return the highest rate over the windows between two samples that have at least this length."""
    best = 0.0
    first = 0
    for number, (now, delivered) in enumerate(samples):
        while first + 1 < number and now - samples[first + 1][0] >= window_s:
            first += 1
        seconds = now - samples[first][0]
        if seconds >= window_s:
            best = max(best, (delivered - samples[first][1]) / seconds)
    return best


class Pace:
    """The pace, updated after each interval.

    Attributes:
        line: the measured rate of the line, in bytes per second; None before the first interval.
    """

    def __init__(self) -> None:
        self.line: float | None = None
        self._step = STEP
        self._hold = 0  # intervals that must keep up before the pace may exceed the rate of the line again
        self._num_lossy = 0  # consecutive intervals
        self._helped_below: float | None = None  # set after lowering the pace: a smaller loss shows that it helped
        self._chance = 0.0  # share of losses that is random
        self._chance_left = 0  # intervals for which that share is expected

    @property
    def bytes_per_s(self) -> float | None:
        """The pace of all streams together; None before the first measurement."""
        if self.line is None:
            return None
        return min(self.line * (1 if self._hold else 1 + self._step), MAX_PACE)

    def add(self, interval: MonitorInterval) -> None:
        """Update the pace after an interval that was sent at the current pace, or without one."""
        pace = self.bytes_per_s
        if self.line is None or pace is None:
            if interval.backlogged >= MIN_BACKLOGGED:
                self.line = interval.best or None
            return
        is_lossy = self._judge_loss(interval.loss)
        keeps_up = not is_lossy and interval.best >= KEPT_UP * pace * (1 - interval.loss)
        if is_lossy:
            self._hold = HOLD
        elif keeps_up:
            self._step = min(2 * self._step, MAX_STEP)
            self._hold = max(0, self._hold - 1)
        if self._hold or not keeps_up:
            self._step = STEP
        self._num_lossy = self._num_lossy + 1 if is_lossy else 0
        if self._num_lossy == NUM_LOSSY:
            self.line = self._lowered(pace, interval)
        else:
            self.line = min(max(self.line, interval.best), MAX_PACE)

    def _judge_loss(self, loss: float) -> bool:
        """Learn from the loss of an interval; return whether it is more than random, so that a slower pace may help."""
        helped_below = self._helped_below
        self._helped_below = None
        self._chance_left -= 1
        if self._chance_left <= 0:
            self._chance = 0.0
        if helped_below is not None and loss > max(helped_below, MIN_LOSS):
            self._chance = loss
            self._chance_left = CHANCE_INTERVALS
        return loss > CHANCE * self._chance + MIN_LOSS

    def _lowered(self, pace: float, interval: MonitorInterval) -> float:
        """Return the lowered rate; acknowledgements come in bursts, so the best rate alone may be too high."""
        carried = max(min(interval.best, pace * (1 - interval.loss)), FASTEST_FALL * pace)
        at_best = max(0.0, 1 - (1 - interval.loss) * pace / carried)
        self._helped_below = HELPED * interval.loss + (1 - HELPED) * at_best
        self._num_lossy = 0
        return carried
