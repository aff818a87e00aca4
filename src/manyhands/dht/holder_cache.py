"""Determines the holders of a key: the peers nearest to it, as the last lookup found them.

Rules:
    * few of them are in one network (:mod:`manyhands.dht.networks`);
    * the result of a lookup is cached for ``REMEMBERED_PERIODS`` periods of upkeep, so that a peer that reads and
      writes the same keys seldom looks them up;
    * it is invalid once this node knows a nearer peer, such as a newcomer or one of a part that was cut off;
    * the caller drops it when a holder does not answer, or answers that it is no longer among the nearest;
    * writers need the nearest peers, but readers need peers that hold the records; a peer that replaced a dead holder
      may have none yet, and a stranger may show others. So a lookup that read records notes which holders are
      *complete*. Readers ask these alone if they are more than half, and otherwise all holders.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from manyhands.base.identity import PeerId
from manyhands.dht.config import DhtConfig
from manyhands.dht.ids import distance, key_id, node_id
from manyhands.dht.networks import spread
from manyhands.dht.routing import RoutingTable

REMEMBERED_PERIODS = 16.0
"""Periods of upkeep for which the result of a lookup is cached. It may be long: a holder that a newcomer displaces
usually reports that it is no longer among the nearest. The limit is for holders that never hear of the newcomer."""

REMEMBERED_KEYS = 1024
"""Keys whose holders are cached."""


@dataclass(frozen=True)
class _Found:
    holders: tuple[PeerId, ...]
    until: float
    complete: frozenset[PeerId]


class HolderCache:
    """The peers that should hold each key, and those that a lookup found.

    Args:
        own_id: the peer id of this node.
        table: the peers that this node knows.
        network_of: returns the network of a peer, including this one.
        is_client: returns whether this node is in no other peer's table, and so holds nothing for others.
    """

    def __init__(
        self,
        own_id: PeerId,
        table: RoutingTable,
        config: DhtConfig,
        network_of: Callable[[PeerId], str] = lambda _: "",
        is_client: Callable[[], bool] = lambda: False,
    ) -> None:
        self._own_id = own_id
        self._network_of = network_of
        self._is_client = is_client
        self._table = table
        self._num = config.replicas
        self._memory_s = REMEMBERED_PERIODS * config.refresh_period_s
        self._known: dict[str, tuple[tuple[int, bool], list[PeerId]]] = {}  # with the version of the table
        self._is_own: dict[str, tuple[tuple[int, int], bool]] = {}  # likewise
        self._found: OrderedDict[str, _Found] = OrderedDict()

    def among(self, key: str, peers: Iterable[PeerId]) -> list[PeerId]:
        """Return which of these peers and this node should hold a key, nearest first."""
        candidates = list(peers) if self._is_client() else [*peers, self._own_id]
        target = key_id(key)
        candidates.sort(key=lambda peer: distance(node_id(peer), target))
        return spread(candidates, self._num, self._network_of)

    def known(self, key: str) -> list[PeerId]:
        """Return which of all known peers should hold a key."""
        version = (self._table.num_changes, self._is_client())
        cached = self._known.get(key)
        if cached is not None and cached[0] == version:
            return cached[1]
        own_network = None if self._is_client() else self._network_of(self._own_id)
        peers = self._table.holders(key_id(key), self._num, own_network)  # includes failed ones: a link may fail once
        if len(self._known) >= REMEMBERED_KEYS:
            self._known.clear()
        self._known[key] = (version, peers)
        return peers

    def is_own(self, key: str) -> bool:
        """Whether this node should hold a key, as far as it knows."""
        if self._is_client():
            return False
        version = (self._table.num_changes, self._table.num_silences)
        cached = self._is_own.get(key)
        if cached is not None and cached[0] == version:
            return cached[1]
        own_network = self._network_of(self._own_id)
        holders = self._table.holders(key_id(key), self._num, own_network, with_silent=False)
        is_own = self._own_id in holders
        if len(self._is_own) >= REMEMBERED_KEYS:
            self._is_own.clear()
        self._is_own[key] = (version, is_own)
        return is_own

    def recall(self, key: str, now: float) -> tuple[PeerId, ...]:
        """Return the cached holders of a key; empty if there are none."""
        found = self._found.get(key)
        if found is None or found.until <= now or self._knows_nearer(key, found.holders):
            return ()
        if self._own_id in found.holders and self._is_client():  # it became a client since then
            return ()
        return found.holders

    def _knows_nearer(self, key: str, holders: Sequence[PeerId]) -> bool:
        """Whether a nearer peer than the holders is known; the holders of a distant key need not be in the table."""
        others = [peer_id for peer_id in self.known(key) if peer_id not in holders]
        if not others or len(holders) < self._num:
            return bool(others)
        target = key_id(key)
        farthest = max(distance(node_id(peer_id), target) for peer_id in holders)
        return any(distance(node_id(peer_id), target) < farthest for peer_id in others)

    def recall_complete(self, key: str, now: float) -> tuple[PeerId, ...]:
        """Like :meth:`recall`, but only those that held the records; empty unless they are more than half."""
        holders = self.recall(key, now)
        complete = tuple(peer_id for peer_id in holders if peer_id in self._found[key].complete)
        return complete if 2 * len(complete) > len(holders) else ()

    def remember(
        self, key: str, holders: Sequence[PeerId], now: float, complete: Collection[PeerId] | None = None
    ) -> None:
        """Cache the holders that a lookup found.

        Args:
            complete: those that returned the records; None if they were not asked.
        """
        if complete is None:
            before = self._found.get(key)
            complete = before.complete if before is not None and set(holders) <= set(before.holders) else ()
        self._found[key] = _Found(tuple(holders), now + self._memory_s, frozenset(complete))
        self._found.move_to_end(key)
        if len(self._found) > REMEMBERED_KEYS:
            self._found.popitem(last=False)

    def forget(self, key: str) -> None:
        """Drop the cached holders of this key."""
        self._found.pop(key, None)
