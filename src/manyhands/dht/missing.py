"""Peers that did not answer of late: others may go on naming them, but nobody need ask them at every turn."""

from __future__ import annotations

from collections import OrderedDict

from manyhands.base.identity import PeerId

FIRST_S = 10.0
MOST_S = 160.0
MAX_PEERS = 512


class Missing:
    """Until when lookups pass over a peer: from failure to failure twice as long, until it is heard of.

    Bounded: the one that failed longest ago is forgotten first.
    """

    def __init__(self) -> None:
        self._peers: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()  # until when, and how long that was

    def __len__(self) -> int:
        return len(self._peers)

    def failed(self, peer_id: PeerId, now: float) -> None:
        """It did not answer."""
        _, before_s = self._peers.pop(peer_id, (0.0, FIRST_S / 2))
        for_s = min(2 * before_s, MOST_S)
        self._peers[peer_id] = (now + for_s, for_s)
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)

    def seen(self, peer_id: PeerId) -> None:
        """It answered, or asked."""
        self._peers.pop(peer_id, None)

    def is_missing(self, peer_id: PeerId, now: float) -> bool:
        """Whether it is too early to ask it again."""
        until, _ = self._peers.get(peer_id, (now, 0.0))
        return now < until
