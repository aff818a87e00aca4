"""Plans which records to send to which peers when peers come and go.

For every key that it holds, each holder compares the peers that should hold it with those that are known to, and sends
the records to the missing ones. A newcomer near a key thus gets its records, and a lost replica is replaced, within one
or two rounds of upkeep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from manyhands.base.identity import PeerId


class ReplicationPlanner:
    """Remembers which peers were given the records of each key."""

    def __init__(self) -> None:
        self._holders: dict[str, set[PeerId]] = {}

    def plan(self, keys: Iterable[str], replicas_of: Callable[[str], Iterable[PeerId]]) -> dict[PeerId, list[str]]:
        """Return the keys whose records each peer should be given.

        Args:
            keys: all keys held here; the rest are forgotten.
            replicas_of: returns the other peers that should hold a key.
        """
        holders: dict[str, set[PeerId]] = {}
        gifts: dict[PeerId, list[str]] = {}
        for key in keys:
            replicas = dict.fromkeys(replicas_of(key))  # ordered, so that plans are reproducible
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
        """Forget what a lost peer was given: it may return without its records."""
        for holders in self._holders.values():
            holders.discard(peer_id)
