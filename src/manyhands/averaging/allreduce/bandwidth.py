"""Estimates this peer's upload bandwidth from its last rounds. Pure.

On long links the operating system reports how fast each stream went while only the line held it up
(:mod:`manyhands.rpc.uplink`). The estimate is the median of the last rounds: one odd round changes nothing, and a line
that became faster or slower is found in the second round.

Where the system reports nothing, a round only shows a lower bound: the bytes that this peer sent, by the time of the
whole round. That time is the same for all members, so their spans keep their proportions. But beside members whose
bandwidth was measured, a slow one is soon seen to be slow.

The round of a client that may not reduce shows nothing. All clients send to the same few reducers then, so the lines of
those hold the streams up; and it sends far less than a reducer. It would own next to nothing once it may reduce.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping

from manyhands.averaging.messages import MAX_BANDWIDTH

MIN_BYTES = 1 << 20
"""If a peer sent fewer bytes, the round does not show its bandwidth: most of the time went into round trips."""
UNTESTED = 1.5
"""A peer may have waited for others, so it is assumed to be able to send this many times as fast as it did."""
EPSILON = 1e-6
"""The least duration of a round in seconds, as a coarse clock may not have moved during it."""
NUM_ROUNDS = 3
"""The estimate is the median rate of this many rounds; while there are only two, it is the higher one. An
estimate that is too high costs one round, one that is too low slows all later rounds."""


def needed_s(num_bytes: float, num_peers: int, rate: float) -> float:
    """Seconds that the butterfly of an encoded vector takes, if each member sends ``rate`` bytes per second."""
    return 2 * (num_peers - 1) / num_peers * num_bytes / rate


def describe_slow_round(
    *, num_bytes: int, num_peers: int, rate: float, available_s: float, codec: str, next_codec: str,
    by_codec_s: Mapping[str, float],
) -> str:  # fmt: skip
    """Say that the lines are too slow for a round, and what happens next or what to change.

    Args:
        num_bytes: bytes of the vector before it is encoded.
        rate: bytes per second that this peer sent.
        available_s: the time that the round had.
        codec, next_codec: names of the codecs of this round and of the next one.
        by_codec_s: seconds that the round takes with each codec, these two among them.
    """
    why = (
        f"the lines are too slow for this round: to average {num_bytes / 1e6:.0f} MB among {num_peers} peers with "
        f"codec {codec!r} takes {by_codec_s[codec]:.0f} s at the {rate / 125_000:.3g} Mbit/s that this peer could "
        f"send, and the round had {available_s:.0f} s"
    )
    if next_codec != codec and by_codec_s[next_codec] <= available_s:
        return f"{why}; the next one takes codec {next_codec!r}: about {by_codec_s[next_codec]:.0f} s"
    options = [
        f"codec={name!r} ({seconds:.0f} s)" for name, seconds in by_codec_s.items() if seconds < by_codec_s[next_codec]
    ]
    more_s = math.ceil(2 * by_codec_s[next_codec] / 10) * 10
    options += [f"averaging_timeout_s={more_s}", "local steps, which average less often"]
    return f"{why}; give all peers of the run one of these: {', '.join(options)}"


class RoundBandwidth:
    """The upload bandwidth of one peer, estimated anew after each of its rounds.

    Args:
        declared: bytes per second, the first guess, which counts as one round; None if there is none.

    Attributes:
        may_reduce: false if the others blamed this peer in its last round.
    """

    def __init__(self, declared: float | None) -> None:
        self.may_reduce = True
        self._declared = [declared] if declared is not None else []
        self._latest = deque(self._declared, maxlen=NUM_ROUNDS)

    @property
    def bandwidth(self) -> int:
        """The estimate in bytes per second; 0 if unknown."""
        return min(max(1, round(statistics.median_high(self._latest))), MAX_BANDWIDTH) if self._latest else 0

    def end_round(self, num_bytes: int, seconds: float, rate: float | None, *, could_reduce: bool = True) -> None:
        """End a round that gave this peer the mean.

        Args:
            num_bytes: bytes that it sent.
            seconds: from when the group had formed until the verdict, as sent bytes may wait in the system's buffers.
            rate: bytes per second, > 0, while only the line held the streams up; None if the system cannot tell.
            could_reduce: whether it sent means, too, or could have.
        """
        least = UNTESTED * num_bytes / max(seconds, EPSILON)
        was_blamed = not self.may_reduce
        self.may_reduce = True
        if rate is not None and could_reduce:
            self._latest.append(rate)
            return
        if was_blamed:
            self._restart(*self._declared)
        if could_reduce and num_bytes >= MIN_BYTES and least > self.bandwidth:
            self._restart(least)

    def end_slow_round(self, num_bytes: int, seconds: float, *, could_reduce: bool = True) -> float | None:
        """End a round that was aborted although its exchange still went on: the lines are too slow for it.

        Args:
            num_bytes: bytes that this peer sent, or received if these are fewer: sent bytes may still wait in the
                system's buffers.
            could_reduce: as for :meth:`end_round`.

        Returns:
            bytes per second, which count as measured if it could reduce; None if there were too few bytes to tell.
        """
        if num_bytes < MIN_BYTES:
            return None
        rate = num_bytes / max(seconds, EPSILON)
        self.may_reduce = True
        if could_reduce:
            self._restart(rate)
        return rate

    def lose_round(self) -> None:
        """End a round in which the others blamed this peer: it reduces nothing in the next one, if others can."""
        self.may_reduce = False
        self._restart()

    def _restart(self, *rates: float) -> None:
        self._latest.clear()
        self._latest.extend(rates)
