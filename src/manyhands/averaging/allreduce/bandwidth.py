"""Estimates this peer's upload bandwidth from what it sent in its last rounds. Pure.

The estimate counts only the time in which this peer's own uplink is the bottleneck. On long links the operating system
reports that time (:mod:`manyhands.rpc.backlog`). Elsewhere it is inferred from the duration of sends: the uplink counts
as the bottleneck while sends to most members are in progress. While only a few are, these wait for the other end, and
the rate says little. The first megabytes go into the system's buffers at memory speed; the median over short windows
ignores them. Where everything fits into the buffers, nothing is measured.

The estimate is the median of the last rounds: one odd round changes nothing, and a line that became faster or slower is
found in the second round. Errors must not feed back: a peer that seems slow gets less to send, and must not look slow
because of that.

A peer whose uplink is hardly ever the bottleneck could have sent more, by an unknown amount. It counts as somewhat
faster. So a peer that wrongly seemed slow has its full part again after a few rounds. Where no uplink is a bottleneck,
all peers are judged by the same round, and the spans stay as they are.

A peer that was too slow for a round does not know the rate at which its values left, because they wait in the system's
buffers. But the peers that waited for it report that its values would not have arrived in the time of the round: that
bounds its bandwidth from above. In the next round it reduces nothing.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from manyhands.averaging.messages import MAX_BANDWIDTH
from manyhands.transport.api import Stream
from manyhands.transport.passing import PassingStream

WINDOW_S = 0.02
MIN_COUNTED_S = 0.1
"""Total time with most streams busy from which a round shows the rate."""
MIN_BYTES = 1 << 20
"""Below this, a round says nothing about a peer with spare uplink: it took as long as its messages."""
MIN_BYTES_TO_ONE = 1 << 21
"""Below this per member, everything may fit into the buffers, and a round shows no rate."""
UNTESTED = 1.5
"""Factor from the bytes that a peer sent with spare uplink to those that it is assumed able to send."""
SHORTEST_S = 1e-6
"""Minimum duration of a send, also by a clock that did not move meanwhile."""
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
    """An estimate that follows the measurements, round by round.

    Args:
        declared: bytes per second, the first guess, which counts as one round; None if there is none.
    """

    def __init__(self, declared: float | None = None) -> None:
        self._latest = deque([declared] if declared is not None else [], maxlen=NUM_ROUNDS)

    @property
    def bandwidth(self) -> int:
        """Bytes per second; 0 if unknown."""
        return min(max(1, round(self._estimate())), MAX_BANDWIDTH) if self._latest else 0

    def _estimate(self) -> float:
        return statistics.median_high(self._latest)

    def add_round(self, measured: float | None, num_bytes: int, seconds: float) -> None:
        """Add the measurements of one round.

        Args:
            measured: bytes per second, > 0, while this peer's uplink was the bottleneck; None if it hardly was.
            num_bytes: bytes sent in all.
            seconds: until all of them had arrived.
        """
        if measured is not None:
            self._latest.append(measured)
        elif num_bytes >= MIN_BYTES:
            self.add_at_least(num_bytes, seconds)

    def add_at_least(self, num_bytes: int, seconds: float) -> None:
        """Add a round in which this peer sent this much while others held it up."""
        least = UNTESTED * num_bytes / max(seconds, SHORTEST_S)
        if not self._latest or self._estimate() < least:
            self._restart(least)

    def add_at_most(self, bytes_per_s: float) -> None:
        """Add a round in which this peer held the others up."""
        if not self._latest or self._estimate() > bytes_per_s:
            self._restart(bytes_per_s)

    def _restart(self, estimate: float) -> None:
        self._latest.clear()
        self._latest.append(estimate)


def backlogged_rate(sends: Sequence[Send]) -> float | None:
    """Bytes per second, > 0, over the time in which sends to more than half of the members were in progress.

    None if that is too little for an estimate.
    """
    num_receivers = len({send.receiver for send in sends})
    if sum(send.num_bytes for send in sends) < MIN_BYTES_TO_ONE * num_receivers:
        return None
    changes: list[tuple[float, int, float]] = []  # time, change of streams in progress, change of bytes per second
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
        rate = rate + rate_more if num_sending else 0.0  # rounding errors end here
        before = now
    return _median(windows)


def _median(windows: list[tuple[float, float]]) -> float | None:
    """Median of the rates, weighted by their seconds."""
    counted_s = math.fsum(seconds for _, seconds in windows)
    if counted_s < MIN_COUNTED_S:
        return None
    passed_s = 0.0
    for rate, seconds in sorted(windows):
        passed_s += seconds
        if 2 * passed_s >= counted_s:
            return rate if rate > 0 else None
    return None


JUDGED_SHARE = 0.45
"""Share of a round's time before which no slow member is given up: half of it, less the difference of the members'
starts."""
OWN_VALUES = 1.05
"""A peer that had to send no more than this multiple of the vector reduced practically nothing."""


class RoundBandwidth:
    """Follows the rounds of one peer.

    Args:
        declared: bytes per second, the first guess; None if there is none.

    Attributes:
        sends: of the current round.
    """

    def __init__(self, declared: float | None) -> None:
        self._meter = BandwidthMeter(declared)
        self.begin_round(0.0)

    @property
    def bandwidth(self) -> int:
        """Bytes per second; 0 if unknown."""
        return self._meter.bandwidth

    def begin_round(self, round_s: float) -> None:
        """Begin a round with this time limit, as its group has formed; infinite for no limit."""
        self.sends: list[Send] = []
        self._is_told = False
        self._told_rate: float | None = None
        self._round_s = max(round_s, 0.0)
        self._vector_bytes = self._num_due = self._num_sent = 0
        self._exchange_s = 0.0

    def tell_rate(self, rate: float | None) -> None:
        """Set the rate of all streams in the round as the system reports it, in place of an estimate from the sends.

        Args:
            rate: bytes per second while only the line held them up; None if that time was too short to tell.
        """
        self._is_told, self._told_rate = True, rate

    def add_exchange(self, vector_bytes: int, num_due: int, num_sent: int, seconds: float) -> None:
        """Add an exchange. Of a round only the first counts, as it is that of the whole vector.

        Args:
            vector_bytes: size of the encoded vector.
            num_due: bytes that this peer had to send.
            num_sent: bytes that it sent.
            seconds: until all was done, or no member listened any more.
        """
        if not self._vector_bytes:
            self._vector_bytes, self._num_due, self._num_sent = vector_bytes, num_due, num_sent
            self._exchange_s = seconds

    def end_round(self, seconds: float, *, is_whole: bool) -> None:
        """End a round that gave this peer the mean; ``is_whole`` if no member was lost on the way."""
        if is_whole:
            measured = self._told_rate if self._is_told else backlogged_rate(self.sends)
            self._meter.add_round(measured, sum(send.num_bytes for send in self.sends), seconds)
        elif self._was_judged():
            self._meter.add_at_least(self._num_sent, self._exchange_s)

    def lose_round(self) -> str:
        """End a round in which this peer is to blame; returns advice if its own values are too much for the time."""
        if not self._num_due or not self._was_judged():
            return ""
        self._meter.add_at_most(min(self._num_due / self._round_s, self._num_sent / self._exchange_s))
        if self._num_due > OWN_VALUES * self._vector_bytes:
            return ""
        return (
            f"this peer had only its own values to send, and they are too much for the {self._round_s:.0f} s that the "
            "round had: a larger averaging_timeout_s on all peers, or a codec of fewer bits, would help"
        )

    def _was_judged(self) -> bool:
        return self._round_s > 0 and 0 < self._exchange_s >= JUDGED_SHARE * self._round_s


class MeteredStream(PassingStream):
    """Passes everything through, counts bytes from 0, and records its sends.

    Args:
        receiver: the rank at the other end.
        sends: gets each send once it is complete.
        before: bytes that earlier rounds sent and received on it.
    """

    def __init__(self, stream: Stream, receiver: int, sends: list[Send], before: tuple[int, int]) -> None:
        super().__init__(stream)
        self._receiver = receiver
        self._sends = sends
        self._sent_before, self._received_before = before

    @property
    def bytes_sent(self) -> int:
        return super().bytes_sent - self._sent_before

    @property
    def bytes_received(self) -> int:
        return super().bytes_received - self._received_before

    async def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await super().send(*buffers)
        num_bytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        self._sends.append(Send(self._receiver, began, loop.time(), num_bytes))

    async def send_each(self, pieces: Iterator[memoryview]) -> None:
        loop = asyncio.get_running_loop()

        def metered() -> Iterator[memoryview]:
            for piece in pieces:  # making it takes no time of the link
                began = loop.time()
                yield piece
                self._sends.append(Send(self._receiver, began, loop.time(), len(piece)))

        await super().send_each(metered())
