"""The line over which one peer sends to others far away: its rounds share it, and none of its streams overflows it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from manyhands.rpc.backlog import Backlog
from manyhands.rpc.pace import Pace, Stretches
from manyhands.runtime.tasks import TaskOwner
from manyhands.transport.api import Delivery, Stream

LOOK_PERIOD_S = 0.2
STRETCH_S = 4.0
"""The pace is looked at again after so long, and at the end of a round."""
FIRST_STRETCH_S = 8.0
MIN_FIRST_S = 6.0
"""Not paced, streams take long to show what the line carries: so long, or until the round ends, but never less."""
SETTLE_S = 0.5
"""After a new pace the queues of the line still hold what was sent before."""

MIN_ROUND_S = 4.0
"""A round that would be over sooner is not paced: it would be hardly faster, and never fills the line for long enough
to show what that carries."""

MIN_PACE = 1 << 16
"""Bytes per second; for the few messages of a stream that has nearly nothing to carry."""


SPARE = 0.05
"""How far off a guess of what a stream is to carry may be."""


@dataclass
class Load:
    """What one stream is to carry.

    Attributes:
        num_bytes, left: in all, and what the other end has not confirmed yet; about.
        done: what the stream had done when it was last looked at.
        is_open: it may still carry something.
    """

    num_bytes: float
    left: float
    done: Delivery
    is_open: bool = True

    @property
    def part(self) -> float:
        """Of the pace, in any unit: one that seems to be done has something to send, perhaps, unless it is closed."""
        return self.left + SPARE * self.num_bytes if self.is_open else 0.0


class Share:
    """The streams of one round.

    Attributes:
        streams: those on long links.
        backlog: what these carried while they had enough to send.
    """

    def __init__(self, uplink: Uplink) -> None:
        self.streams: dict[Stream, Load] = {}
        self.backlog = Backlog()
        self._uplink = uplink

    def add(self, stream: Stream, num_bytes: float) -> None:
        """A stream that is to carry so many bytes in the round, about; one on a short link is as free as ever."""
        if (delivery := stream.delivery()) is not None:
            self.streams[stream] = Load(num_bytes, num_bytes, delivery)
            self._uplink.watch()

    def is_long(self, line: float) -> bool:
        """Whether the round takes so long on a line of so many bytes per second that it is paced."""
        return sum(load.num_bytes for load in self.streams.values()) >= MIN_ROUND_S * line

    def free(self) -> None:
        """Have no stream paced."""
        for stream in self.streams:
            stream.pace(math.inf)

    def pace(self, bytes_per_s: float) -> None:
        """Have all streams together send so fast, and each so that all end together."""
        parts = sum(load.part for load in self.streams.values())
        for stream, load in self.streams.items():
            stream.pace(max(bytes_per_s * load.part / max(parts, 1), MIN_PACE))

    def look(self, now: float) -> Iterable[Delivery]:
        """What each stream has done since it was last looked at, but for those that are closed.

        Args:
            now: the loop's time.
        """
        changes: dict[Stream, Delivery] = {}
        for stream, load in self.streams.items():
            delivery = stream.delivery()
            load.is_open = delivery is not None
            if delivery is not None:
                change = delivery.since(load.done)
                load.left, load.done = max(load.left - change.delivered, 0.0), delivery
                changes[stream] = change
        self.backlog.add(now, {stream: self.streams[stream].num_bytes for stream in changes}, changes)
        return changes.values()


class Uplink:
    """Paces the streams of one endpoint that go to far peers; each of several rounds at once gets the same.

    Args:
        tasks: look after it as long as such streams are there.
    """

    def __init__(self, tasks: TaskOwner) -> None:
        self._tasks = tasks
        self._shares: list[Share] = []
        self._pace = Pace()
        self._stretches = Stretches()
        self._total = Delivery(0, 0, 0, 0.0)  # of all streams together; busy while those of a round were backlogged
        self._watching: asyncio.Task[None] | None = None
        self._is_changed = False
        self._settled_at = 0.0

    def _num_open(self) -> int:
        return sum(load.is_open for share in self._shares for load in share.streams.values())

    def _active(self) -> list[Share]:
        return [share for share in self._shares if share.streams]

    @contextmanager
    def shared(self) -> Iterator[Share]:
        """A round, whose streams are paced within the block."""
        share = Share(self)
        self._shares.append(share)
        try:
            yield share
        finally:
            try:
                self._look(is_last=not any(other.streams for other in self._shares if other is not share))
            finally:
                self._shares.remove(share)
                share.free()  # what a stream that is let go still has to send shall not wait
                self._divide()
                if self._watching is not None and not self._active():
                    self._tasks.cancel(self._watching)
                    self._watching = None

    def watch(self) -> None:
        """Another stream shares the line from now on."""
        if not self._is_changed:  # others come in the same moment
            self._is_changed = True
            asyncio.get_running_loop().call_soon(self._divide)
        if (self._watching is None or self._watching.done()) and not self._tasks.is_closed:
            self._watching = self._tasks.spawn(self._watch(), name="what the uplink carries")

    def _divide(self) -> None:
        self._is_changed = False
        shares, line, pace = self._active(), self._pace.line, self._pace.bytes_per_s
        if line is not None and pace is not None:
            for share in shares:
                if share.is_long(line):
                    share.pace(pace / len(shares))
                else:
                    share.free()

    async def _watch(self) -> None:
        self._stretches.begin()
        while self._active():
            self._look()
            await asyncio.sleep(LOOK_PERIOD_S)

    def _look(self, *, is_last: bool = False) -> None:
        """See what the streams have done; at the end of a stretch, find the pace of the next one."""
        now, num_open = asyncio.get_running_loop().time(), self._num_open()
        before_s = sum(share.backlog.seconds for share in self._shares)
        changes = [change for share in self._shares for change in share.look(now)]
        busy_s = self._total.busy_s + sum(share.backlog.seconds for share in self._shares) - before_s
        if self._num_open() < num_open:  # a member is lost: the others get its part
            self._divide()
        self._total = Delivery(*map(sum, zip(self._total, *changes, strict=True)))._replace(busy_s=busy_s)
        if now < self._settled_at:
            return
        line = self._pace.line
        if line is not None and not all(share.is_long(line) for share in self._active()):
            self._stretches.begin()  # what is not paced shows no pace
            return
        self._stretches.add(now, self._total)
        if is_last or self._stretches.seconds >= (STRETCH_S if line is not None else FIRST_STRETCH_S):
            is_enough = line is not None or self._stretches.seconds >= MIN_FIRST_S
            if is_enough and (stretch := self._stretches.stretch()) is not None:
                self._pace.add(stretch)
                self._settled_at = now + SETTLE_S
                self._divide()
            self._stretches.begin()
