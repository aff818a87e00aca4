"""Periodic upkeep of a node: checks its routing table and hands records over to the peers that should hold them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from manyhands.base.identity import PeerId
from manyhands.dht.config import MAX_STORED_RECORDS, DhtConfig
from manyhands.dht.handlers import RequestHandlers
from manyhands.dht.holder_cache import HolderCache
from manyhands.dht.ids import ID_BITS, node_id
from manyhands.dht.neighbours import unknown_neighbours
from manyhands.dht.overlay import Overlay
from manyhands.dht.replication import ReplicationPlanner
from manyhands.dht.routing import Contact
from manyhands.dht.storage import Storage
from manyhands.dht.writer import Writer

MAX_DOUBTED = 2
"""Distant contacts that a round of upkeep pings after a round in which one of them was gone; after others, half as
many. Lookups cope with dead contacts, and dials for pings are most of the traffic of an idle peer, so these are few."""

NEWCOMERS_ASKED = 3
"""New neighbours that a round of upkeep asks for their contacts."""

MAX_QUIET_ROUNDS = 16
"""Rounds of upkeep between two lookups of this node's neighbours while the swarm does not change."""


class Upkeep:
    """The upkeep of one node.

    Args:
        own_id: the node's peer id.
    """

    def __init__(
        self,
        own_id: PeerId,
        config: DhtConfig,
        overlay: Overlay,
        storage: Storage,
        holder_cache: HolderCache,
        handlers: RequestHandlers,
        writer: Writer,
        rng: random.Random,
    ) -> None:
        self._own_id = own_id
        self._config = config
        self._overlay = overlay
        self._storage = storage
        self._holder_cache = holder_cache
        self._handlers = handlers
        self._writer = writer
        self._rng = rng
        self._replication = ReplicationPlanner()
        self._neighbours_seen: list[PeerId] = []
        self._quiet_rounds = 0
        self._num_doubted = MAX_DOUBTED
        self._num_partners = min(2 * config.replicas, config.k)  # includes all with which this node shares keys

    def pause_s(self) -> float:
        """Return the time until the next round, with jitter."""
        return self._config.refresh_period_s * self._rng.uniform(0.75, 1.25)

    def lost(self, peer_id: PeerId) -> None:
        """Note that the connection to a peer is lost; the peer may return without its records."""
        self._replication.forget(peer_id)

    async def refresh_table(self) -> None:
        """Ping contacts that may be gone, and look up peers near this node and at a random point.

        As long as the nearest peers stay the same, lookups find only known peers, so this node makes them seldom.
        Newcomers have announced themselves to their neighbours, unless they come from another part of the swarm.
        """
        await self._ping_doubted()
        before = self._neighbours_seen
        self._neighbours_seen = self._neighbours()
        has_lost = any(peer_id not in self._overlay.table for peer_id in before[: self._num_partners])
        self._quiet_rounds = 0 if has_lost else self._quiet_rounds + 1
        overlay = self._overlay
        config = self._config
        own_point = node_id(self._own_id)
        is_lookup_due = self._quiet_rounds % MAX_QUIET_ROUNDS == 0  # also just after a loss, when it is 0
        news: list[Contact] = []
        newcomers = [peer_id for peer_id in self._neighbours_seen if peer_id not in before]
        if newcomers and not is_lookup_due:
            asked = newcomers[:NEWCOMERS_ASKED]
            news = await unknown_neighbours(overlay, self._own_id, self._num_partners, asked)
        if is_lookup_due or news:
            seeds = [*overlay.table.nearest(own_point, config.k), *news]
            await overlay.lookup(own_point, config.lookup_timeout_s, self._num_partners, seeds=seeds)
            self._neighbours_seen = self._neighbours()
        if self._quiet_rounds == 1 or (is_lookup_due and self._quiet_rounds > 0):
            await overlay.lookup(self._rng.getrandbits(ID_BITS), config.lookup_timeout_s, config.replicas)

    async def hand_over(self) -> None:
        """Send the records held here to peers that should hold them after others have come or gone."""
        keys = self._storage.keys(asyncio.get_running_loop().time())
        plan = self._replication.plan(keys, self._other_replicas)
        await asyncio.gather(*(self._give(peer_id, gift) for peer_id, gift in plan.items()))

    def _neighbours(self) -> list[PeerId]:
        nearest = self._overlay.table.nearest(node_id(self._own_id), self._config.k)
        return [contact.peer_id for contact in nearest]

    async def _ping_doubted(self) -> None:
        """Ping all silent peers that share keys with this node, and a few of the rest."""
        overlay = self._overlay
        keys = self._storage.keys(asyncio.get_running_loop().time())
        partners = overlay.doubtful(peer_id for key in keys for peer_id in self._other_replicas(key))
        rest = overlay.doubtful(contact.peer_id for contact in overlay.table.least_recently_seen())
        rest = [peer_id for peer_id in rest if peer_id not in partners][: self._num_doubted]
        answers = await asyncio.gather(*(overlay.ping(peer_id) for peer_id in [*partners, *rest]))
        self._num_doubted = MAX_DOUBTED // 2 if all(answers[len(partners) :]) else MAX_DOUBTED

    def _other_replicas(self, key: str) -> list[PeerId]:
        return [peer_id for peer_id in self._holder_cache.known(key) if peer_id != self._own_id]

    async def _give(self, peer_id: PeerId, keys: Sequence[str]) -> None:
        """Send records to a peer for at most one period, as a slow peer delays the whole round."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        records = [held for key in keys for held in self._storage.get(key, began)]
        for start in range(0, len(records), MAX_STORED_RECORDS):
            now = loop.time()
            end = start + MAX_STORED_RECORDS
            if now - began > self._config.refresh_period_s:
                return
            response = await self._writer.send(peer_id, [held.aged(now) for held in records[start:end]])
            if response is None:
                return  # the next round tries again
            for outcome in response.outcomes:
                if outcome.later is not None:
                    self._handlers.hold(peer_id, outcome.later)
            unfinished = records[end].record.key if end < len(records) else None
            done = {held.record.key for held in records[start:end]} - {unfinished}
            self._replication.given(peer_id, done)
