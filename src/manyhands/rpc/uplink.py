"""Congestion control of this peer's upload to distant peers: its streams are paced to the rate of the line.

Several streams that each try to fill one line overflow its queue and get unfair shares, and a round waits for the last
one. `benchmarks/allreduce_link.py --rounds 6` with four peers, each with a line of 100 Mbit/s, 50 ms one way:

=======================  ===============================  =====================
share of the line used   each stream finds its own rate   paced by this file
=======================  ===============================  =====================
no losses                0.75                             0.87
0.1% of losses           0.66                             0.88
=======================  ===============================  =====================

Three parts: :class:`Backlog` measures the rate of the line, :class:`Pace` decides how fast to send (both are pure), and
:class:`Uplink` applies the pace to the streams of all rounds, each in proportion to what it has left to send
(docs/adr/0010-paced-streams.md).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from manyhands.runtime.tasks import TaskOwner
from manyhands.transport.api import Delivery, Stream, total_of

# the rate of the line, from acknowledgements of the streams while they are backlogged
#
# The bytes that a member sends in a round, divided by its duration, do not measure its line: the member also waits
# for values and means of others. Neither do the durations of sends: the first megabytes of each stream go into the
# buffers of the system. But a backlogged stream, which has data to send and room at the receiver, goes as fast as the
# line allows. The rate of a peer is the sum of the rates of its streams while they are backlogged.
#
# If streams are never backlogged at the same time, each shows the whole line, and the sum is too high. This lasts for
# one round only: the peer is then given more to send, so that all of its streams are backlogged.

RAMP_UP_S = 0.3
"""Seconds from the opening of a stream until it is measured: it takes a few round trips to reach its speed."""

MIN_BUSY_S = 0.3
"""Least busy time of a stream, in seconds, that gives a rate: acknowledgements come in bursts."""

BUSY = 0.5
"""Least share of the time between two samples for which a backlogged stream is busy."""

NEARLY_ALL = 0.9
"""Least share of a round's bytes whose streams represent all streams; the others have little to send."""


@dataclass
class StreamMeasurement:
    """Measurements of one stream.

    Attributes:
        size: bytes that it carries in the round.
        since: when it was first seen, seconds of one clock.
        num_bytes, busy_s: bytes delivered after it had settled, and for how long it was busy.
    """

    size: float
    since: float
    num_bytes: int = 0
    busy_s: float = 0.0


class Backlog:
    """Sums the measurements of the streams of one round.

    Attributes:
        seconds: time in which nearly all streams were backlogged together.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._looked_at = 0.0
        self._measured: dict[Any, StreamMeasurement] = {}

    def add(self, now: float, sizes: Mapping[Any, float], changes: Mapping[Any, Delivery]) -> None:
        """Add the measurements since the last sample.

        Args:
            now: seconds of one clock.
            sizes: bytes that each open stream carries in the round, by a stable key.
            changes: what each stream has delivered since it was opened, or since the last sample.
        """
        before = self._looked_at
        self._looked_at = now
        busy = 0.0
        for stream, change in changes.items():
            if (shown := self._measured.get(stream)) is None:
                self._measured[stream] = StreamMeasurement(sizes[stream], now)
            elif before >= shown.since + RAMP_UP_S:
                shown.num_bytes += change.delivered
                shown.busy_s += change.busy_s
                busy += sizes[stream] if change.busy_s >= BUSY * (now - before) else 0.0
        if changes and busy >= NEARLY_ALL * max(sum(sizes.values()), 1.0):
            self.seconds += now - before

    @property
    def rate(self) -> float | None:
        """Bytes per second, > 0, of all streams together; None if they were not busy for long enough."""
        streams = self._measured.values()
        busy = [stream for stream in streams if stream.busy_s >= MIN_BUSY_S]
        if sum(stream.size for stream in busy) < NEARLY_ALL * sum(stream.size for stream in streams):
            return None
        return sum(stream.num_bytes / stream.busy_s for stream in busy) or None


# the pace of all streams together
#
# Several streams that each try to fill one line overflow its queue and get unfair shares. They do not if the system
# paces them at about the capacity of the line. That capacity shows in the highest rate of acknowledgements within
# some seconds: no line acknowledges more than it carries, however slow the receivers are.
#
# All members of a round finish together, so none could ever show a faster line if each sent at its last rate. So the
# pace is a little above it. A pace that is too high costs almost nothing, and one that is too low costs in
# proportion. So the pace rises quickly and falls slowly:
#
# * The first interval counts if the streams were backlogged for most of it. Otherwise a peer with a fast line among
#   slow ones would take their speed for its own, and be paced to it for good.
# * An interval that kept up with its pace, without losses, has shown a faster line; the next pace is raised by more.
# * A slower interval shows nothing: streams also wait for late members.
# * Losses above the random rate hold the pace at the rate of the line for a while; in two consecutive intervals, they
#   lower it to the delivered rate. If the losses then stay the same, they are random, and do not lower the pace for a
#   while.

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
"""Lowering the pace has helped if at most this share of the losses that it could avoid is left."""

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


# the streams of all rounds

LOOK_PERIOD_S = 0.2
"""Seconds between two samples of the streams."""

INTERVAL_S = 4.0
"""Seconds after which the pace is updated; it is also updated at the end of a round."""

FIRST_INTERVAL_S = 8.0
"""Length of the first interval, in seconds: unpaced streams take longer to show the rate of the line."""

MIN_FIRST_S = 6.0
"""Least length of the first interval, in seconds, if its round ends early."""

SETTLE_S = 0.5
"""Seconds after a change of the pace that are not measured: the queues still hold what was sent before."""

MIN_ROUND_S = 4.0
"""A shorter round is not paced: it would gain little, and never fills the line for long enough to measure it."""

MIN_PACE = 1 << 16
"""Least pace of one stream, in bytes per second: one that carries almost nothing still has a few messages to send."""

SPARE = 0.05
"""Share of its expected size that an open stream is assumed to have left at least: the expected size is not exact."""


@dataclass
class Load:
    """The expected and measured traffic of one stream.

    Attributes:
        num_bytes, left: approximate size, and how much of it was not acknowledged yet.
        done: the delivery at the last sample.
        is_open: whether the stream may still carry data.
    """

    num_bytes: float
    left: float
    done: Delivery
    is_open: bool = True

    @property
    def part(self) -> float:
        """Its share of the pace, relative to those of other streams; 0 once the stream has ended."""
        return self.left + SPARE * self.num_bytes if self.is_open else 0.0


class RoundShare:
    """The streams of one round.

    Attributes:
        streams: those on long links.
        backlog: rate measurements of these while they were backlogged.
    """

    def __init__(self, uplink: Uplink) -> None:
        self.streams: dict[Stream, Load] = {}
        self.backlog = Backlog()
        self._uplink = uplink

    def add(self, stream: Stream, num_bytes: float) -> None:
        """Add a stream that will carry about ``num_bytes`` in the round; one on a short link is not paced."""
        if (delivery := stream.delivery()) is not None:
            self.streams[stream] = Load(num_bytes, num_bytes, delivery)
            self._uplink.watch()

    def is_long(self, line: float) -> bool:
        """Whether the round takes long enough to be paced, on a line of this many bytes per second."""
        return sum(load.num_bytes for load in self.streams.values()) >= MIN_ROUND_S * line

    def free(self) -> None:
        """Remove the pace of all streams."""
        for stream in self.streams:
            stream.pace(math.inf)

    def pace(self, bytes_per_s: float) -> None:
        """Set the total rate of all streams, divided so that they end together."""
        parts = sum(load.part for load in self.streams.values())
        for stream, load in self.streams.items():
            stream.pace(max(bytes_per_s * load.part / max(parts, 1), MIN_PACE))

    def look(self, now: float) -> Iterable[Delivery]:
        """Sample all streams; return the deliveries of the open ones since the last sample.

        Args:
            now: the loop's time.
        """
        changes: dict[Stream, Delivery] = {}
        for stream, load in self.streams.items():
            delivery = stream.delivery()
            load.is_open = delivery is not None
            if delivery is not None:
                change = delivery.since(load.done)
                load.left = max(load.left - change.delivered, 0.0)
                load.done = delivery
                changes[stream] = change
        self.backlog.add(now, {stream: self.streams[stream].num_bytes for stream in changes}, changes)
        return changes.values()


class Uplink:
    """Paces the streams of one endpoint to distant peers; concurrent rounds get equal shares.

    Args:
        tasks: owner of the task that watches such streams.

    Attributes:
        pace: how fast they send, all together.
    """

    def __init__(self, tasks: TaskOwner) -> None:
        self._tasks = tasks
        self._shares: list[RoundShare] = []
        self.pace = Pace()
        self._sampler = IntervalSampler()
        self._total = Delivery(0, 0, 0, 0.0)  # of all streams together; busy while those of a round were backlogged
        self._watching: asyncio.Task[None] | None = None
        self._is_changed = False
        self._settled_at = 0.0

    def _num_open(self) -> int:
        return sum(load.is_open for share in self._shares for load in share.streams.values())

    def _active(self) -> list[RoundShare]:
        return [share for share in self._shares if share.streams]

    @contextmanager
    def shared(self) -> Iterator[RoundShare]:
        """Pace the streams of a round inside the block."""
        share = RoundShare(self)
        self._shares.append(share)
        try:
            yield share
        finally:
            try:
                self._look(is_last=not any(other.streams for other in self._shares if other is not share))
            finally:
                self._shares.remove(share)
                share.free()  # the pace must not delay what a released stream still has to send
                self._divide()
                if self._watching is not None and not self._active():
                    self._tasks.cancel(self._watching)
                    self._watching = None

    def watch(self) -> None:
        """Include a new stream."""
        if not self._is_changed:  # more streams may be added in the same iteration of the loop
            self._is_changed = True
            asyncio.get_running_loop().call_soon(self._divide)
        if (self._watching is None or self._watching.done()) and not self._tasks.is_closed:
            self._watching = self._tasks.spawn(self._watch(), name="uplink measurement")

    def _divide(self) -> None:
        self._is_changed = False
        shares = self._active()
        line = self.pace.line
        pace = self.pace.bytes_per_s
        if line is not None and pace is not None:
            for share in shares:
                if share.is_long(line):
                    share.pace(pace / len(shares))
                else:
                    share.free()

    async def _watch(self) -> None:
        self._sampler.begin()
        while self._active():
            self._look()
            await asyncio.sleep(LOOK_PERIOD_S)

    def _look(self, *, is_last: bool = False) -> None:
        """Sample all streams; at the end of an interval, set the pace of the next one."""
        now = asyncio.get_running_loop().time()
        num_open = self._num_open()
        before_s = sum(share.backlog.seconds for share in self._shares)
        changes = [change for share in self._shares for change in share.look(now)]
        busy_s = self._total.busy_s + sum(share.backlog.seconds for share in self._shares) - before_s
        if self._num_open() < num_open:  # a member is lost: divide its share among the others
            self._divide()
        self._total = total_of([self._total, *changes])._replace(busy_s=busy_s)
        if now < self._settled_at:
            return
        line = self.pace.line
        if line is not None and not all(share.is_long(line) for share in self._active()):
            self._sampler.begin()  # unpaced streams say nothing about the pace
            return
        self._sampler.add(now, self._total)
        if is_last or self._sampler.seconds >= (INTERVAL_S if line is not None else FIRST_INTERVAL_S):
            is_enough = line is not None or self._sampler.seconds >= MIN_FIRST_S
            if is_enough and (interval := self._sampler.interval()) is not None:
                self.pace.add(interval)
                self._settled_at = now + SETTLE_S
                self._divide()
            self._sampler.begin()
