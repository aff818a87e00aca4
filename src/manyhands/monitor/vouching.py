"""Decides for which trainers a coordinator vouches: those that it has long seen on the run's branch. Pure.

A position does not show which positions it follows from, and anybody can make up steps after a position that somebody
has signed. So a coordinator signs no position, but the peers that are on the run's branch; these go on with it.

The branch is that of most trainers that are vouched for already; without any, of those that were on it for long. A peer
that comes later has no say until it has been there for half as long as the one that was there longest, or for
``LONG_S``, in however many networks its owner is. Only at the very beginning do all count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from manyhands.access.messages import MAX_VOUCHED
from manyhands.averaging.peer_records import PeerRecord
from manyhands.base.identity import PeerId
from manyhands.optim.run.branches import held_by_most

LONG_S = 6 * 3600.0
OFF_BRANCH_S = 120.0
"""A trainer that was not on the branch for this long is not vouched for: it fell behind, or went elsewhere."""
MAX_KEPT = 2048


class Vouching:
    """Watches the trainers of one run. Times are loop times.

    Args:
        seen_s: for how long each trainer was seen on the branch; updated in place.
        vouched: the trainers that are vouched for already.
    """

    def __init__(self, seen_s: dict[str, float], vouched: Iterable[str] = ()) -> None:
        self._seen_s = seen_s
        self._vouched = frozenset(map(PeerId, vouched))
        self._there_at: dict[PeerId, float] = {}
        self._looked_at = math.inf

    def look(self, records: Mapping[PeerId, PeerRecord], now: float) -> frozenset[PeerId]:
        """Judge again by the trainers that are present; returns those that are vouched for."""
        since_s = min(max(now - self._looked_at, 0.0), OFF_BRANCH_S)
        self._looked_at = now
        voters = self._vouched & records.keys() or self._long_seen(records)
        position = held_by_most(records, voters) if records else None
        for peer_id, record in records.items():
            if record.position == position and record.position.step:
                self._seen_s[peer_id] = self._seen_s.get(peer_id, 0.0) + since_s
                self._there_at[peer_id] = now
        self._there_at = {peer_id: at for peer_id, at in self._there_at.items() if now - at <= OFF_BRANCH_S}
        self._vouched = self._long_seen(self._there_at)
        if len(self._seen_s) > MAX_KEPT:
            gone = sorted(self._seen_s.keys() - self._there_at.keys(), key=self._seen_s.__getitem__)
            for name in gone[: MAX_KEPT // 2]:
                del self._seen_s[name]
        return self._vouched

    def _long_seen(self, peer_ids: Iterable[PeerId]) -> frozenset[PeerId]:
        """Those of some peers that were seen on the branch for long, compared with the others."""
        seen_s = {peer_id: self._seen_s.get(peer_id, 0.0) for peer_id in peer_ids}
        enough_s = min(LONG_S, max(seen_s.values(), default=0.0) / 2)
        longest = sorted(seen_s, key=lambda peer_id: (-seen_s[peer_id], peer_id))[:MAX_VOUCHED]
        return frozenset(peer_id for peer_id in longest if seen_s[peer_id] >= enough_s)
