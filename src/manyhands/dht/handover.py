"""Which records to hand to whom when peers come and go.

Each holder compares, for every key that it holds, who should hold it now with whom it knows to hold it, and sends the
records to the difference. So a newcomer near a key gets its records, and a lost replica is replaced, within one or two
rounds of upkeep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from manyhands.base.identity import PeerId


class Handover:
    """Remembers who was given the records of which key."""

    def __init__(self) -> None:
        self._holders: dict[str, set[PeerId]] = {}

    def plan(self, keys: Iterable[str], replicas_of: Callable[[str], Iterable[PeerId]]) -> dict[PeerId, list[str]]:
        """The keys that each peer should be given.

        Args:
            keys: all keys held here; others are forgotten.
            replicas_of: the other peers that should hold a key now.
        """
        holders: dict[str, set[PeerId]] = {}
        gifts: dict[PeerId, list[str]] = {}
        for key in keys:
            replicas = dict.fromkeys(replicas_of(key))  # in order, so that a plan can be repeated
            holders[key] = self._holders.get(key, set()) & replicas.keys()
            for peer_id in replicas:
                if peer_id not in holders[key]:
                    gifts.setdefault(peer_id, []).append(key)
        self._holders = holders
        return gifts

    def given(self, peer_id: PeerId, keys: Iterable[str]) -> None:
        """Note that a peer has the records of these keys."""
        for key in keys:
            self._holders.setdefault(key, set()).add(peer_id)

    def forget(self, peer_id: PeerId) -> None:
        """Note that a peer was lost: if it comes back, it may have nothing."""
        for holders in self._holders.values():
            holders.discard(peer_id)
