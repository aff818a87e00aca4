"""How often one peer, and one machine, may ask this node: a token bucket for each."""

from __future__ import annotations

import math
from collections import OrderedDict

from manyhands.base.identity import PeerId
from manyhands.dht.config import DhtConfig

BURST_S = 5.0
"""So many seconds' worth of requests may come at once, by whoever was quiet for as long."""


class RateLimit:
    """Counts requests by who sent them. ``now`` is always the same monotonic clock."""

    def __init__(self, config: DhtConfig) -> None:
        self._of_peer = _Buckets(config.max_requests_per_s_of_peer)
        self._of_host = _Buckets(config.max_requests_per_s_of_host)

    def broken_by(self, peer_id: PeerId, host: str, now: float) -> float | None:
        """Count one request.

        Args:
            host: the machine that it came from; empty if that is not known.
        Returns:
            The limit that it breaks, in requests per second; None if it may be answered.
        """
        if not self._of_peer.take(peer_id, now):
            return self._of_peer.rate
        if host and not self._of_host.take(host, now):
            return self._of_host.rate
        return None


class _Buckets:
    """Of each sender only the time until which its requests so far would take it, at the rate that it may have.

    Source: the generic cell rate algorithm (ITU-T I.371), a token bucket with one number for each sender.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._burst_s = max(BURST_S, 1 / rate)  # one at least
        self._paid_until: OrderedDict[str, float] = OrderedDict()  # who asked last comes last

    def take(self, sender: str, now: float) -> bool:
        before = max(self._paid_until.pop(sender, -math.inf), now)
        paid_until = before + 1 / self.rate
        is_allowed = paid_until <= now + self._burst_s
        self._paid_until[sender] = paid_until if is_allowed else before
        while self._paid_until[first := next(iter(self._paid_until))] <= now:  # as if it had never asked
            del self._paid_until[first]
        return is_allowed
