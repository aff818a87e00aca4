"""Estimates this peer's upload bandwidth from its last rounds. Pure.

On long links the operating system reports how fast each stream went while only the line held it up
(:mod:`manyhands.rpc.backlog`). The estimate is the median of the last rounds: one odd round changes nothing, and a line
that became faster or slower is found in the second round.

Where the system reports nothing, a round only bounds the bandwidth. A peer that sent all that it had to send could have
sent more, by an unknown amount: it counts as somewhat faster. All peers of one round are judged by the same time, so
the spans stay as they are. But next to peers that were measured, a slow peer is soon seen to be slow.

A peer that was too slow for a round does not know the rate at which its values left, because they wait in the system's
buffers. But the peers that waited for it report that its values would not have arrived in the time of the round: that
bounds its bandwidth from above. In the next round it reduces nothing.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from manyhands.averaging.messages import MAX_BANDWIDTH

MIN_BYTES = 1 << 20
"""With less to send, a round says nothing: it took as long as its messages."""
UNTESTED = 1.5
"""Factor from the bytes that a peer sent, held up by others, to those that it is assumed able to send."""
SHORTEST_S = 1e-6
"""Minimum duration of a round, also by a clock that did not move meanwhile."""
NUM_ROUNDS = 3
"""Rounds that count. Of two the better one: an estimate that is too high costs a round, one too low all later ones."""
UNJUDGED_SHARE = 0.45
"""Share of a round's time before which no slow member is given up: half of it, less the difference of the members'
starts."""


@dataclass(frozen=True, kw_only=True)
class ExchangeFigures:
    """What one exchange of values showed.

    Attributes:
        num_due, num_sent: bytes that this peer had to send, and those that it sent.
        seconds: until all was done, or no member listened any more.
        rate: bytes per second, > 0, of all streams while only the line held them up; None if the system cannot tell.
    """

    num_due: int
    num_sent: int
    seconds: float
    rate: float | None = None


class RoundBandwidth:
    """Follows the rounds of one peer.

    Args:
        declared: bytes per second, the first guess, which counts as one round; None if there is none.
    """

    def __init__(self, declared: float | None) -> None:
        self._latest = deque([declared] if declared is not None else [], maxlen=NUM_ROUNDS)
        self.begin_round(0.0)

    @property
    def bandwidth(self) -> int:
        """Bytes per second; 0 if unknown."""
        return min(max(1, round(statistics.median_high(self._latest))), MAX_BANDWIDTH) if self._latest else 0

    def begin_round(self, round_s: float) -> None:
        """Begin a round with this time limit, as its group has formed; infinite for no limit."""
        self._round_s = max(round_s, 0.0)
        self._exchange: ExchangeFigures | None = None

    def add_exchange(self, exchange: ExchangeFigures) -> None:
        """Add an exchange. Of a round only the first counts, as it is that of the whole vector."""
        self._exchange = self._exchange or exchange

    def end_round(self, seconds: float, *, is_whole: bool) -> None:
        """End a round that gave this peer the mean.

        Args:
            seconds: from the forming of the group to the verdict: until then bytes may wait in the system's buffers.
            is_whole: no member was lost on the way.
        """
        if (exchange := self._exchange) is None:
            return
        if not is_whole:
            if self._was_judged(exchange):
                self._is_at_least(exchange.num_sent, exchange.seconds)
        elif exchange.rate is not None:
            self._latest.append(exchange.rate)
        elif exchange.num_sent >= MIN_BYTES:
            self._is_at_least(exchange.num_sent, seconds)

    def lose_round(self) -> None:
        """End a round in which this peer is to blame."""
        exchange = self._exchange
        if exchange is None or not exchange.num_due or not self._was_judged(exchange):
            return
        most = min(exchange.num_due / self._round_s, exchange.num_sent / exchange.seconds)
        if not self._latest or statistics.median_high(self._latest) > most:
            self._restart(most)

    def _was_judged(self, exchange: ExchangeFigures) -> bool:
        return self._round_s > 0 and 0 < exchange.seconds >= UNJUDGED_SHARE * self._round_s

    def _is_at_least(self, num_bytes: int, seconds: float) -> None:
        least = UNTESTED * num_bytes / max(seconds, SHORTEST_S)
        if not self._latest or statistics.median_high(self._latest) < least:
            self._restart(least)

    def _restart(self, bytes_per_s: float) -> None:
        self._latest.clear()
        self._latest.append(bytes_per_s)
