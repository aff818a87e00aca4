"""How often one peer, and one machine, may ask this node: a token bucket for each."""

from __future__ import annotations

from manyhands.base.identity import PeerId
from manyhands.dht.config import DhtConfig
from manyhands.rpc.rate import Buckets

FORGED_COSTS = 10
"""A forged record counts as so many requests: finding out costs much, making it up nothing."""


class RateLimit:
    """Counts requests by who sent them. ``now`` is always the same monotonic clock."""

    def __init__(self, config: DhtConfig) -> None:
        self._of_peer = Buckets(config.max_requests_per_s_of_peer)
        self._of_host = Buckets(config.max_requests_per_s_of_host)

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

    def charge_forged(self, peer_id: PeerId, host: str, num_records: int, now: float) -> None:
        """Count forged records against whoever sent them."""
        self._of_peer.charge(peer_id, FORGED_COSTS * num_records, now)
        if host:
            self._of_host.charge(host, FORGED_COSTS * num_records, now)
