"""Decides when a peer that could not be reached may be dialled again."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass

from manyhands.base.errors import Unavailable
from manyhands.base.identity import PeerId

FIRST_S = 0.5
"""Longest wait after the first failed dial; it doubles with each further one."""

MOST_S = 15.0
"""Longest wait after any failed dial."""

TOGETHER_S = 20.0
"""Peers that one network outage made unreachable are all noticed within this time."""

MAX_PEERS = 4096
"""Peers whose failed dials are remembered; the one whose last dial is the oldest is forgotten first."""


class TooEarly(Unavailable):
    """A peer was not dialled, because the last dial failed a moment ago."""


@dataclass
class _Failures:
    num: int
    since: float
    retry_at: float
    reason: str


class Backoff:
    """Exponential backoff with jitter, so that the peers that lost a peer do not all redial it at once.

    Args:
        rng: for the jitter.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._failures: OrderedDict[PeerId, _Failures] = OrderedDict()

    def failed(self, peer_id: PeerId, now: float, reason: str) -> None:
        """Note a failed dial: the next wait is up to twice as long, at most :data:`MOST_S` seconds."""
        before = self._failures.get(peer_id)
        num = 1
        since = now
        if before is not None:
            num = before.num + 1
            since = before.since
        wait_s = min(FIRST_S * 2 ** (num - 1), MOST_S) * self._rng.uniform(0.5, 1.0)
        self._failures[peer_id] = _Failures(num, since, now + wait_s, reason)
        self._failures.move_to_end(peer_id)
        if len(self._failures) > MAX_PEERS:
            self._failures.popitem(last=False)

    def forget(self, peer_id: PeerId) -> None:
        """Allow a dial at once, as the peer has another address."""
        self._failures.pop(peer_id, None)

    def connected(self, peer_id: PeerId, now: float) -> None:
        """Note that a peer was reached, or has connected by itself.

        If it had been unreachable, a network outage may be over: peers that were lost at the same time may also be
        dialled at once. Otherwise they would stay disconnected for up to :data:`MOST_S`.
        """
        back = self._failures.pop(peer_id, None)
        if back is not None:
            for failures in self._failures.values():
                if failures.since >= back.since - TOGETHER_S:
                    failures.retry_at = min(failures.retry_at, now)

    def check(self, peer_id: PeerId, now: float) -> None:
        """Raise ``TooEarly`` with the reason of the last failure while it is too early for another dial."""
        failures = self._failures.get(peer_id)
        if failures is not None and now < failures.retry_at:
            wait_s = failures.retry_at - now
            raise TooEarly(
                f"peer {peer_id} was not dialled: the last dial failed ({failures.reason}), and the next one is due in "
                f"{wait_s:.1f} s"
            )
