"""Divides the upload of one peer to distant peers among its rounds, and paces the streams to the rate of the line."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from manyhands.rpc.backlog import Backlog
from manyhands.rpc.pace import IntervalSampler, Pace
from manyhands.runtime.tasks import TaskOwner
from manyhands.transport.api import Delivery, Stream, total_of

LOOK_PERIOD_S = 0.2
"""Seconds between two samples of the streams."""

INTERVAL_S = 4.0
"""Seconds after which the pace is updated; it is also updated at the end of a round."""

FIRST_INTERVAL_S = 8.0
"""The same before the first measurement: unpaced streams take longer to show the rate of the line."""

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
    """

    def __init__(self, tasks: TaskOwner) -> None:
        self._tasks = tasks
        self._shares: list[RoundShare] = []
        self._pace = Pace()
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
        line = self._pace.line
        pace = self._pace.bytes_per_s
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
        line = self._pace.line
        if line is not None and not all(share.is_long(line) for share in self._active()):
            self._sampler.begin()  # unpaced streams say nothing about the pace
            return
        self._sampler.add(now, self._total)
        if is_last or self._sampler.seconds >= (INTERVAL_S if line is not None else FIRST_INTERVAL_S):
            is_enough = line is not None or self._sampler.seconds >= MIN_FIRST_S
            if is_enough and (interval := self._sampler.interval()) is not None:
                self._pace.add(interval)
                self._settled_at = now + SETTLE_S
                self._divide()
            self._sampler.begin()
