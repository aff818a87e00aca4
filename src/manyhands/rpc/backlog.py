"""How fast the streams of a round go while the line, and nothing else, holds them up, by what their other ends
acknowledge. Pure.

What a member sends in a round, over its time, is no measure of its line: it also waits for values and means of others,
and all members get on together. How long sends take is none, either: the first megabytes of each stream go into the
buffers of the system. But a stream that has something to send, and whose other end has room for it, goes as fast as the
lines let it. So what a member could send is what its streams carry in such times, added up.

Streams that never have something to send at the same time would each show all of the line. Such a sum is too high for a
round only: who is taken for fast gets more to send, and all of its streams have enough to send then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manyhands.transport.api import Delivery

SETTLE_S = 0.3
"""A stream needs a few round trips to get going."""
MIN_BUSY_S = 0.3
"""Less shows no rate: acknowledgements come in bursts."""
BUSY = 0.5
"""Of the time between two looks: a stream that was busy for so long was backlogged."""
NEARLY_ALL = 0.9
"""Of what a round sends: streams that carry so much speak for all. The others have hardly anything to send."""


@dataclass
class Shown:
    """What one stream has shown.

    Attributes:
        size: what it carries in the round, in bytes.
        since: when it was there first, seconds of one clock.
        num_bytes, busy_s: delivered, once it had settled, and how long it was busy.
    """

    size: float
    since: float
    num_bytes: int = 0
    busy_s: float = 0.0


class Backlog:
    """Adds up what the streams of one round do.

    Attributes:
        seconds: in which nearly all were backlogged at once.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._looked_at = 0.0
        self._shown: dict[Any, Shown] = {}

    def add(self, now: float, sizes: Mapping[Any, float], changes: Mapping[Any, Delivery]) -> None:
        """Count what was done since the last look.

        Args:
            now: seconds of one clock.
            sizes: what each open stream carries in the round, in bytes; by any key, the same each time.
            changes: what each has done since it was there, or looked at.
        """
        before, self._looked_at = self._looked_at, now
        busy = 0.0
        for stream, change in changes.items():
            if (shown := self._shown.get(stream)) is None:
                self._shown[stream] = Shown(sizes[stream], now)
            elif before >= shown.since + SETTLE_S:
                shown.num_bytes += change.delivered
                shown.busy_s += change.busy_s
                busy += sizes[stream] if change.busy_s >= BUSY * (now - before) else 0.0
        if changes and busy >= NEARLY_ALL * max(sum(sizes.values()), 1.0):
            self.seconds += now - before

    @property
    def rate(self) -> float | None:
        """Bytes per second, > 0, of all streams together; None if they were busy for too short a time to tell."""
        told = [shown for shown in self._shown.values() if shown.busy_s >= MIN_BUSY_S]
        if sum(shown.size for shown in told) < NEARLY_ALL * sum(shown.size for shown in self._shown.values()):
            return None
        return sum(shown.num_bytes / shown.busy_s for shown in told) or None
