"""What a node does now and then, so that its table is true and the records that it holds stay where they belong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from manyhands.base.identity import PeerId
from manyhands.dht.config import MAX_STORED_RECORDS, DhtConfig
from manyhands.dht.handover import Handover
from manyhands.dht.holder import Holder
from manyhands.dht.ids import ID_BITS, node_id
from manyhands.dht.news import tell_news
from manyhands.dht.overlay import Overlay
from manyhands.dht.replicas import Replicas
from manyhands.dht.routing import Contact
from manyhands.dht.storage import Storage
from manyhands.dht.writer import Writer

MAX_DOUBTED = 2
"""Far contacts that a round of upkeep asks if they are there, if one of the last ones was not, else half as many: a
lookup that meets a dead one goes on without, and a dial for a ping is most of what an idle peer does."""

NEWCOMERS_ASKED = 3
"""New neighbours that are asked whom else they know."""

MAX_QUIET_ROUNDS = 16
"""Rounds of upkeep between two looks around, when nobody comes or goes."""


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
        replicas: Replicas,
        holder: Holder,
        writer: Writer,
        rng: random.Random,
    ) -> None:
        self._own_id = own_id
        self._config = config
        self._overlay = overlay
        self._storage = storage
        self._replicas = replicas
        self._holder = holder
        self._writer = writer
        self._rng = rng
        self._handover = Handover()
        self._neighbours_seen: list[PeerId] = []
        self._quiet_rounds = 0
        self._num_doubted = MAX_DOUBTED
        self._num_partners = min(2 * config.replicas, config.k)  # those with which this node shares keys, and more

    def pause_s(self) -> float:
        """How long until the next round; not the same for all."""
        return self._config.refresh_period_s * self._rng.uniform(0.75, 1.25)

    def lost(self, peer_id: PeerId) -> None:
        """Note that the connection to a peer is lost: if it comes back, it may hold nothing."""
        self._handover.forget(peer_id)

    async def refresh_table(self) -> None:
        """Doubt the contacts that nothing was heard of, and look around near this node and anywhere.

        As long as the nearest peers stay the same, looking around finds what is known: it is done ever more seldom.
        Those that came have made themselves known to all near them, unless they come from another part of the swarm.
        """
        await self._ping_doubted()
        before, self._neighbours_seen = self._neighbours_seen, self._neighbours()
        has_lost = any(peer_id not in self._overlay.table for peer_id in before[: self._num_partners])
        self._quiet_rounds = 0 if has_lost else self._quiet_rounds + 1
        overlay, config, own_point = self._overlay, self._config, node_id(self._own_id)
        is_time = self._quiet_rounds % MAX_QUIET_ROUNDS == 0  # 0 is just after a loss
        news: list[Contact] = []
        if not is_time:
            newcomers = [peer_id for peer_id in self._neighbours_seen if peer_id not in before][:NEWCOMERS_ASKED]
            news = await tell_news(overlay, self._own_id, self._num_partners, newcomers) if newcomers else []
        if is_time or news:
            seeds = [*overlay.table.nearest(own_point, config.k), *news]
            await overlay.lookup(own_point, config.lookup_timeout_s, self._num_partners, seeds=seeds)
            self._neighbours_seen = self._neighbours()
        if self._quiet_rounds == 1 or (is_time and self._quiet_rounds):
            await overlay.lookup(self._rng.getrandbits(ID_BITS), config.lookup_timeout_s, config.replicas)

    async def hand_over(self) -> None:
        """Give the records held here to peers that should hold them since others came or went."""
        keys = self._storage.keys(asyncio.get_running_loop().time())
        plan = self._handover.plan(keys, self._other_replicas)
        await asyncio.gather(*(self._give(peer_id, gift) for peer_id, gift in plan.items()))

    def _neighbours(self) -> list[PeerId]:
        return [contact.peer_id for contact in self._overlay.table.nearest(node_id(self._own_id), self._config.k)]

    async def _ping_doubted(self) -> None:
        """Make sure of the life of all that should hold what is held here, and of a few of the rest."""
        overlay, keys = self._overlay, self._storage.keys(asyncio.get_running_loop().time())
        partners = overlay.doubtful(peer_id for key in keys for peer_id in self._other_replicas(key))
        rest = overlay.doubtful(contact.peer_id for contact in overlay.table.least_recently_seen())
        rest = [peer_id for peer_id in rest if peer_id not in partners][: self._num_doubted]
        answers = await asyncio.gather(*(overlay.ping(peer_id) for peer_id in [*partners, *rest]))
        self._num_doubted = MAX_DOUBTED // 2 if all(answers[len(partners) :]) else MAX_DOUBTED

    def _other_replicas(self, key: str) -> list[PeerId]:
        return [peer_id for peer_id in self._replicas.known(key) if peer_id != self._own_id]

    async def _give(self, peer_id: PeerId, keys: Sequence[str]) -> None:
        """Hand over keys, for one period at most: a peer that takes its time holds up the upkeep of all."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        records = [held for key in keys for held in self._storage.get(key, began)]
        for start in range(0, len(records), MAX_STORED_RECORDS):
            now, end = loop.time(), start + MAX_STORED_RECORDS
            if now - began > self._config.refresh_period_s:
                return
            response = await self._writer.send(peer_id, [held.aged(now) for held in records[start:end]])
            if response is None:
                return  # it is tried again in the next round
            for outcome in response.outcomes:
                if outcome.later is not None:
                    self._holder.hold(peer_id, outcome.later)
            unfinished = records[end].record.key if end < len(records) else None
            done = {held.record.key for held in records[start:end]} - {unfinished}
            self._handover.given(peer_id, done)
