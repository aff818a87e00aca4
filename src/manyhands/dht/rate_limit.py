"""Limits the request rate of each peer and each machine with token buckets."""

from __future__ import annotations

from manyhands.base.identity import PeerId
from manyhands.dht.config import DhtConfig
from manyhands.rpc.rate import Buckets

FORGED_COSTS = 10
"""A forged record counts as this many requests: verifying it is expensive, making it up is not."""


class RateLimit:
    """Counts requests by sender. ``now`` is always the same monotonic clock."""

    def __init__(self, config: DhtConfig) -> None:
        self._of_peer = Buckets(config.max_requests_per_s_of_peer)
        self._of_host = Buckets(config.max_requests_per_s_of_host)

    def broken_by(self, peer_id: PeerId, host: str, now: float) -> float | None:
        """Count one request.

        Args:
            host: the machine that it came from; empty if unknown.
        Returns:
            The limit that it exceeds, in requests per second; None if it is allowed.
        """
        if not self._of_peer.take(peer_id, now):
            return self._of_peer.rate
        if host and not self._of_host.take(host, now):
            return self._of_host.rate
        return None

    def charge_forged(self, peer_id: PeerId, host: str, num_records: int, now: float) -> None:
        """Count forged records against their sender."""
        self._of_peer.charge(peer_id, FORGED_COSTS * num_records, now)
        if host:
            self._of_host.charge(host, FORGED_COSTS * num_records, now)
