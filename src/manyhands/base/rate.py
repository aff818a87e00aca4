"""A token bucket for each sender, alone or with one of all senders together. Pure."""

from __future__ import annotations

BURST_S = 5.0
"""A sender that was quiet may send this many seconds' worth of requests at once, unless a burst is given."""

MIN_SENDERS = 64
"""Senders without debt are not dropped before there are this many senders, or twice as many as after the last time."""

MOST_OWED_S = 60.0
"""A sender is accepted again after at most this time, whatever it was charged."""


class Buckets:
    """Stores for each sender the time until which its requests so far are paid for, at the allowed rate.

    Args:
        rate: requests a second.
        burst: requests at once; by default :data:`BURST_S` seconds' worth, and at least one.

    Source: the generic cell rate algorithm (ITU-T I.371), a token bucket with one number for each sender.
    """

    def __init__(self, rate: float, burst: int | None = None) -> None:
        self.rate = rate
        self._burst_s = burst / rate if burst is not None else max(BURST_S, 1 / rate)
        self._paid_until: dict[str, float] = {}
        self._tidy_at = MIN_SENDERS  # senders

    def take(self, sender: str, now: float) -> bool:
        """Count one request, if it is within the rate; return whether it is."""
        before = self._paid_until.get(sender, now)
        if before < now:
            before = now
        paid_until = before + 1 / self.rate
        if paid_until > now + self._burst_s:
            return False
        self._paid_until[sender] = paid_until
        if len(self._paid_until) > self._tidy_at:
            self._tidy(now)
        return True

    def give_back(self, sender: str) -> None:
        """Undo :meth:`take`."""
        if sender in self._paid_until:
            self._paid_until[sender] -= 1 / self.rate

    def charge(self, sender: str, num: int, now: float) -> None:
        """Count requests that were not checked with :meth:`take`."""
        paid_until = max(self._paid_until.get(sender, now), now) + num / self.rate
        self._paid_until[sender] = min(paid_until, now + self._burst_s + MOST_OWED_S)

    def __len__(self) -> int:
        return len(self._paid_until)

    def _tidy(self, now: float) -> None:
        """Drop senders whose requests are paid for."""
        self._paid_until = {sender: paid_until for sender, paid_until in self._paid_until.items() if paid_until > now}
        self._tidy_at = max(2 * len(self._paid_until), MIN_SENDERS)


class SharedBuckets:
    """A bucket of each sender, and one that all share."""

    def __init__(self, each: Buckets, of_all: Buckets) -> None:
        self._each = each
        self._of_all = of_all

    def take(self, sender: str, now: float) -> bool:
        """Count one request, if it is within both rates; return whether it is."""
        if not self._each.take(sender, now):
            return False
        if not self._of_all.take("", now):
            self._each.give_back(sender)
            return False
        return True

    def give_back(self, sender: str) -> None:
        """Undo :meth:`take`."""
        self._each.give_back(sender)
        self._of_all.give_back("")
