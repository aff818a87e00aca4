"""How fast this peer can send, by what it sent in rounds. Pure.

What counts is the time in which its uplink, and nobody else, holds it up. On long links the system tells which that is
(:mod:`manyhands.rpc.backlog`). Elsewhere it is guessed from how long sends take: it is the time in which sends to most
members are under way. While few are, these wait for who is at their other end, or for nothing at all, and the rate says
little. The median over short windows ignores that the first megabytes go into the buffers of the system at the speed of
memory; where all goes there, nothing is measured.

The estimate is the median of the last rounds: one odd round changes nothing, and a line that became faster or slower is
found in the second one. It must not feed its own errors back: who is taken for slow gets less to send, and must not
look slow because of that.

A peer that is hardly ever held up, since others are slower, can send more than it did, nobody knows how much. It counts
as somewhat faster. So one that was taken for slow without being so has its full part again after a few rounds; and
where nobody is held up, all are judged by the same round, and the spans stay as they are.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from manyhands.averaging.messages import MAX_BANDWIDTH

WINDOW_S = 0.02
MIN_COUNTED_S = 0.1
"""A round shows the rate if it had most streams busy for so long in all."""
MIN_BYTES = 1 << 20
"""A round in which less was sent says nothing about a peer that was not held up: it took as long as its messages."""
MIN_BYTES_TO_ONE = 1 << 21
"""A round in which less was sent to each member may be all in the buffers, and shows no rate."""
UNTESTED = 1.5
"""What a peer that was not held up can send, over what it did send."""
SHORTEST_S = 1e-6
"""What a send takes at least, also by a clock that did not move meanwhile."""
NUM_ROUNDS = 3
"""Rounds that count. Of two the better one: an estimate that is too high costs a round, one too low all later ones."""


class Send(NamedTuple):
    """One send to one member; there is one at a time.

    Attributes:
        receiver: the member's rank.
        began, ended: seconds of one clock; in between the stream held the sender up, or copied.
    """

    receiver: int
    began: float
    ended: float
    num_bytes: int


class BandwidthMeter:
    """An estimate that follows what was measured, round by round.

    Args:
        declared: bytes per second, the first guess, as good as one round; None if there is none.
    """

    def __init__(self, declared: float | None = None) -> None:
        self._latest = deque([declared] if declared is not None else [], maxlen=NUM_ROUNDS)

    @property
    def bandwidth(self) -> int:
        """Bytes per second; 0 as long as nothing is known."""
        return min(max(1, round(self._estimate())), MAX_BANDWIDTH) if self._latest else 0

    def _estimate(self) -> float:
        return statistics.median_high(self._latest)

    def add_round(self, measured: float | None, num_bytes: int, seconds: float) -> None:
        """Count what one round showed.

        Args:
            measured: bytes per second, > 0, while this peer's uplink held it up; None if it hardly did.
            num_bytes: what was sent in all.
            seconds: until all that was sent had arrived.
        """
        if measured is not None:
            self._latest.append(measured)
        elif num_bytes >= MIN_BYTES:
            self.add_at_least(num_bytes, seconds)

    def add_at_least(self, num_bytes: int, seconds: float) -> None:
        """Count that so much was sent while others held this peer up."""
        least = UNTESTED * num_bytes / max(seconds, SHORTEST_S)
        if not self._latest or self._estimate() < least:
            self._restart(least)

    def add_at_most(self, bytes_per_s: float) -> None:
        """Count that this peer held the others up."""
        if not self._latest or self._estimate() > bytes_per_s:
            self._restart(bytes_per_s)

    def _restart(self, estimate: float) -> None:
        self._latest.clear()
        self._latest.append(estimate)


def backlogged_rate(sends: Sequence[Send]) -> float | None:
    """Bytes per second, > 0, over the time in which sends to more than half of the members were under way.

    None when that is too little to say anything.
    """
    num_receivers = len({send.receiver for send in sends})
    if sum(send.num_bytes for send in sends) < MIN_BYTES_TO_ONE * num_receivers:
        return None
    changes: list[tuple[float, int, float]] = []  # time, streams more under way, bytes per second more
    for send in sends:
        seconds = max(send.ended - send.began, SHORTEST_S)
        rate = send.num_bytes / seconds
        changes += [(send.began, 1, rate), (send.began + seconds, -1, -rate)]
    windows: list[tuple[float, float]] = []  # bytes per second, seconds
    window_bytes = window_s = rate = before = 0.0
    num_sending = 0
    for now, num_more, rate_more in sorted(changes):
        if 2 * num_sending > num_receivers:
            window_s += now - before
            window_bytes += rate * (now - before)
        if window_s >= WINDOW_S:
            windows.append((window_bytes / window_s, window_s))
            window_bytes = window_s = 0.0
        num_sending += num_more
        rate = rate + rate_more if num_sending else 0.0  # what rounding left over ends here
        before = now
    return _median(windows)


def _median(windows: list[tuple[float, float]]) -> float | None:
    """Of the rates, weighted by their seconds."""
    counted_s = math.fsum(seconds for _, seconds in windows)
    if counted_s < MIN_COUNTED_S:
        return None
    passed_s = 0.0
    for rate, seconds in sorted(windows):
        passed_s += seconds
        if 2 * passed_s >= counted_s:
            return rate if rate > 0 else None
    return None
