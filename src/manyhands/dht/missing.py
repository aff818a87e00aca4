"""Peers that did not answer of late: others may go on naming them, but nobody need ask them at every turn."""

from __future__ import annotations

from collections import OrderedDict

from manyhands.base.identity import PeerId

FIRST_S = 10.0
MOST_S = 160.0
MAX_PEERS = 128


class Missing(OrderedDict[PeerId, tuple[float, float]]):
    """Until when lookups pass over a peer, and how long that is: from failure to failure twice as long.

    Whoever is heard of is no longer in it. Bounded: the one that failed longest ago is forgotten first.
    """

    def failed(self, peer_id: PeerId, now: float) -> None:
        """It did not answer."""
        _, before_s = self.pop(peer_id, (0.0, FIRST_S / 2))
        for_s = min(2 * before_s, MOST_S)
        self[peer_id] = (now + for_s, for_s)
        if len(self) > MAX_PEERS:
            self.popitem(last=False)

    def seen(self, peer_id: PeerId) -> None:
        """It answered, or asked."""
        self.pop(peer_id, None)

    def is_missing(self, peer_id: PeerId, now: float) -> bool:
        """Whether it is too early to ask it again."""
        until, _ = self.get(peer_id, (now, 0.0))
        return now < until
