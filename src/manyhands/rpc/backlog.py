"""Estimates the upload rate of this peer from the acknowledgements of its streams while they are backlogged. Pure.

The bytes that a member sends in a round, divided by its duration, do not measure its line: the member also waits for
values and means of others. Neither do the durations of sends: the first megabytes of each stream go into the buffers of
the system. But a backlogged stream, which has data to send and room at the receiver, goes as fast as the line allows.
The rate of a peer is the sum of the rates of its streams while they are backlogged.

If streams are never backlogged at the same time, each shows the whole line, and the sum is too high. This lasts for one
round only: the peer is then given more to send, so that all of its streams are backlogged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manyhands.transport.api import Delivery

SETTLE_S = 0.3
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
            elif before >= shown.since + SETTLE_S:
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
