"""How fast the streams of a round go while the line, and nothing else, holds them up, by what their other ends
acknowledge. Pure.

What a member sends in a round, over its time, is no measure of its line: it also waits for values and means of others,
and all members get on together. How long sends take is none, either: the first megabytes of each stream go into the
buffers of the system. But a stream that has something to send, and whose other end has room for it, goes as fast as the
lines let it; and while nearly all streams of a member do, its own line is full.
"""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.transport.api import Delivery

SETTLE_S = 0.5
"""A stream needs a few round trips to get going."""
MIN_COUNTED_S = 0.5
"""Less shows no rate: acknowledgements come in bursts."""
BUSY = 0.5
"""Of the time between two looks: a stream that was busy for so long counts as backlogged."""
NEARLY_ALL = 0.9
"""Of what a round sends: streams that carry so much must be backlogged. The others have hardly anything to send."""


class Backlog:
    """Adds up what the streams of one round do.

    Attributes:
        seconds: in which they were backlogged.
    """

    def __init__(self) -> None:
        self._looked_at = self._settled_at = 0.0
        self._num_streams = 0
        self._num_bytes = 0
        self.seconds = 0.0

    def add(self, now: float, sizes: Sequence[float], changes: Sequence[Delivery]) -> None:
        """Count what was done since the last look.

        Args:
            now: seconds of one clock.
            sizes: what each open stream carries in the round, in bytes, shape [S].
            changes: what each has done since it was there, or looked at, shape [S].
        """
        before, self._looked_at = self._looked_at, now
        if len(changes) > self._num_streams:
            self._settled_at = now + SETTLE_S
        self._num_streams = len(changes)
        if before < self._settled_at:
            return
        is_busy = [change.busy_s >= BUSY * (now - before) for change in changes]
        if sum(size for size, busy in zip(sizes, is_busy, strict=True) if busy) < NEARLY_ALL * max(sum(sizes), 1.0):
            return
        self._num_bytes += sum(change.delivered for change in changes)
        self.seconds += now - before

    @property
    def rate(self) -> float | None:
        """Bytes per second, > 0; None if the streams were backlogged for too short a time to tell."""
        return self._num_bytes / self.seconds if self.seconds >= MIN_COUNTED_S and self._num_bytes > 0 else None
