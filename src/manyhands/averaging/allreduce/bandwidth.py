"""Estimates this peer's upload bandwidth from its last rounds. Pure.

On long links the operating system reports how fast each stream went while only the line held it up
(:mod:`manyhands.rpc.backlog`). The estimate is the median of the last rounds: one odd round changes nothing, and a line
that became faster or slower is found in the second round.

Where the system reports nothing, a round only shows what a peer can send at least. All peers of one round are judged by
the same time, so the spans stay as they are. But next to peers that were measured, a slow peer is soon seen to be slow.
"""

from __future__ import annotations

import statistics
from collections import deque

from manyhands.averaging.messages import BLAMED, MAX_BANDWIDTH

MIN_BYTES = 1 << 20
"""With less to send, a round says nothing: it took as long as its messages."""
UNTESTED = 1.5
"""Factor from the bytes that a peer sent, held up by others, to those that it is assumed able to send."""
SHORTEST_S = 1e-6
"""Minimum duration of a round, also by a clock that did not move meanwhile."""
NUM_ROUNDS = 3
"""Rounds that count. Of two the better one: an estimate that is too high costs a round, one too low all later ones."""


class RoundBandwidth:
    """Follows the rounds of one peer.

    Args:
        declared: bytes per second, the first guess, which counts as one round; None if there is none.
    """

    def __init__(self, declared: float | None) -> None:
        self._declared = [declared] if declared is not None else []
        self._latest = deque(self._declared, maxlen=NUM_ROUNDS)

    @property
    def bandwidth(self) -> int:
        """Bytes per second; 0 if unknown."""
        return min(max(1, round(statistics.median_high(self._latest))), MAX_BANDWIDTH) if self._latest else 0

    def end_round(self, num_bytes: int, seconds: float, rate: float | None) -> None:
        """End a round that gave this peer the mean.

        Args:
            num_bytes: that it sent.
            seconds: from the forming of the group to the verdict: until then bytes may wait in the system's buffers.
            rate: bytes per second, > 0, while only the line held the streams up; None if the system cannot tell.
        """
        least = UNTESTED * num_bytes / max(seconds, SHORTEST_S)
        if rate is not None:
            self._latest.append(rate)
            return
        if self.bandwidth == BLAMED:
            self._restart(*self._declared)
        if num_bytes >= MIN_BYTES and least > self.bandwidth:
            self._restart(least)

    def lose_round(self) -> None:
        """End a round in which the others blamed this peer: it reduces nothing in the next one, if others can."""
        self._restart(BLAMED)

    def _restart(self, *rates: float) -> None:
        self._latest.clear()
        self._latest.extend(rates)
