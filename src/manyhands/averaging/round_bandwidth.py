"""What one peer's rounds show of its uplink, also one in which somebody was too slow. Pure.

What is sent lies in the buffers of the system for a while, so a peer that was too slow does not know at what pace its
values left. But all that it had to send would not have gone in the time of the round, say those who waited for it:
that is what it can send at most. The others sent all of theirs in half of that time: so in the next round the slow one
reduces nothing.
"""

from __future__ import annotations

from manyhands.averaging.bandwidth import BandwidthMeter, Send, backlogged_rate

JUDGED_SHARE = 0.45
"""Of a round's time: who was too slow was not given up sooner. It is half of it, but the members begin at slightly
different moments."""
OWN_VALUES = 1.05
"""Of the vector: who had no more than this to send, reduced nothing to speak of."""


class RoundBandwidth:
    """Follows the rounds of one peer.

    Args:
        declared: bytes per second, the first guess; None if there is none.

    Attributes:
        sends: of the round that is under way.
    """

    def __init__(self, declared: float | None) -> None:
        self._meter = BandwidthMeter(declared)
        self.begin_round(0.0)

    @property
    def bandwidth(self) -> int:
        """Bytes per second; 0 as long as nothing is known."""
        return self._meter.bandwidth

    def begin_round(self, round_s: float) -> None:
        """A group has formed, which has so much time; infinite if there is no bound."""
        self.sends: list[Send] = []
        self._is_told = False
        self._told_rate: float | None = None
        self._round_s = max(round_s, 0.0)
        self._vector_bytes = self._num_due = self._num_sent = 0
        self._exchange_s = 0.0

    def tell_rate(self, rate: float | None) -> None:
        """The system tells what all streams of the round carried, so nobody has to guess it from the sends.

        Args:
            rate: bytes per second while only the line held them up; None if that was too short a time to tell.
        """
        self._is_told, self._told_rate = True, rate

    def add_exchange(self, vector_bytes: int, num_due: int, num_sent: int, seconds: float) -> None:
        """Values were exchanged; of a round the first time counts, as it is that of the whole vector.

        Args:
            vector_bytes: of all that is averaged, as it travels.
            num_due: bytes that this peer had to send.
            num_sent: bytes that it sent.
            seconds: until all was done, or nobody listened any more.
        """
        if not self._vector_bytes:
            self._vector_bytes, self._num_due, self._num_sent = vector_bytes, num_due, num_sent
            self._exchange_s = seconds

    def end_round(self, seconds: float, *, is_whole: bool) -> None:
        """A round of so many seconds has given this peer the mean; ``is_whole`` if nobody was lost on the way."""
        if is_whole:
            measured = self._told_rate if self._is_told else backlogged_rate(self.sends)
            self._meter.add_round(measured, sum(send.num_bytes for send in self.sends), seconds)
        elif self._was_judged():
            self._meter.add_at_least(self._num_sent, self._exchange_s)

    def lose_round(self) -> str:
        """This peer is to blame in a round. Says what would help if that is because its own values are too much."""
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
