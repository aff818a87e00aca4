"""Limits the request rate of each peer and each machine, and what is checked and read for each network."""

from __future__ import annotations

from manyhands.base.identity import PeerId
from manyhands.base.rate import Buckets
from manyhands.dht.config import MAX_FOUND_BYTES, DhtConfig

FORGED_COSTS = 10
"""Requests that one forged record counts as: verifying it is expensive, making one up is not."""

MAX_CHECKS_PER_S = 200.0
"""Signature checks per second for one key and one network, in which an attacker may have any number of identities. Only
new or changed records are checked, which takes about 0.15 ms each. A hundred trainers behind one address publish at
this rate: twice a second each."""

READ_BYTES_PER_S = float(MAX_FOUND_BYTES)
"""Bytes per second of records of unknown owners that a node reads under one key from the holders in one network: one
page, with five at once. These are records of about 1200 trainers, so reads of a run notice it only if strangers fill
the key, or in a crowd before its peers have met."""


class RateLimit:
    """Counts requests by sender, and signature checks by network. ``now`` is always the same monotonic clock."""

    def __init__(self, config: DhtConfig) -> None:
        self._of_peer = Buckets(config.max_requests_per_s_of_peer)
        self._of_host = Buckets(config.max_requests_per_s_of_host)
        self._checks = Buckets(MAX_CHECKS_PER_S)
        self._reads = Buckets(READ_BYTES_PER_S)

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

    def may_check(self, network: str, key: str, num: int, now: float) -> bool:
        """Count checks of records of a key that came from a network; return whether they are allowed."""
        sender = f"{network} {key}"
        is_allowed = self._checks.take(sender, now)
        if is_allowed:
            self._checks.charge(sender, num - 1, now)
        return is_allowed

    def may_read(self, network: str, key: str, now: float) -> bool:
        """Whether more records of unknown owners under a key may be read from the holders in a network."""
        return self._reads.take(f"{network} {key}", now)

    def charge_read(self, network: str, key: str, num_bytes: int, now: float) -> None:
        """Count bytes of records of unknown owners that a holder in a network has shown."""
        self._reads.charge(f"{network} {key}", num_bytes, now)

    def charge_forged(self, peer_id: PeerId, host: str, num_records: int, now: float) -> None:
        """Count forged records against their sender."""
        self._of_peer.charge(peer_id, FORGED_COSTS * num_records, now)
        if host:
            self._of_host.charge(host, FORGED_COSTS * num_records, now)
