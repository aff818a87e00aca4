"""One node of the DHT: what a peer publishes, and what it finds of others."""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.base.address import Address
from manyhands.base.identity import PeerId
from manyhands.dht.config import MAX_STORED_RECORDS, DhtConfig
from manyhands.dht.handover import Handover
from manyhands.dht.ids import ID_BITS, distance, id_from_bytes, key_id, node_id
from manyhands.dht.issuing import Issuer, check_key
from manyhands.dht.joining import InitialPeers
from manyhands.dht.messages import (
    FIND,
    PING,
    STORE,
    FindRequest,
    FindResponse,
    PingRequest,
    PingResponse,
    StoreOutcome,
    StoreRequest,
    StoreResponse,
)
from manyhands.dht.overlay import Overlay
from manyhands.dht.records import AgedRecord, Reason, Record, decode_value
from manyhands.dht.routing import Contact
from manyhands.dht.storage import Storage
from manyhands.rpc.endpoint import Endpoint
from manyhands.runtime.tasks import TaskOwner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredValue:
    """What a reader gets.

    Attributes:
        value: as it was stored, but tuples have become lists.
        sequence: higher for later values of the same subkey.
        remaining_s: seconds until it expires.
        owner: the peer whose signature was checked; empty if anybody may have written it.
    """

    value: Any
    sequence: int
    remaining_s: float
    owner: str


class DhtNode:
    """Stores and finds small records at the peers nearest to their keys.

    A node whose endpoint is in client mode reads and writes, but holds nothing and is in nobody's table.
    Source: Maymounkov & Mazieres, Kademlia, 2002.

    Args:
        endpoint: the connections of this peer; the node serves ``dht.*`` on it until :meth:`close`.
        config: settings of this node.
        rng: for the times and targets of upkeep.
        wall_clock: seconds since 1970.

    Attributes:
        refusals: how many records of others were refused, by reason.
    """

    def __init__(
        self, endpoint: Endpoint, config: DhtConfig, rng: random.Random, wall_clock: Callable[[], float]
    ) -> None:
        self.refusals: Counter[Reason] = Counter()
        self._endpoint = endpoint
        self._config = config
        self._rng = rng
        self._wall_clock = wall_clock
        self._tasks = TaskOwner("dht")
        self._overlay = Overlay(endpoint, config)
        self._initial_peers = InitialPeers(endpoint, self._overlay, config, self._tasks)
        self._issuer = Issuer(endpoint.identity, config, wall_clock)
        self._storage = Storage(config)
        self._handover = Handover()
        self._upkeep: asyncio.Task[None] | None = None
        self._rejoining: asyncio.Task[None] | None = None
        if not endpoint.client_mode:
            endpoint.handle(PING, self._on_ping)
            endpoint.handle(FIND, self._on_find)
            endpoint.handle(STORE, self._on_store)
        endpoint.on_lost.append(self._handover.forget)

    @property
    def num_known_peers(self) -> int:
        """Peers in the routing table."""
        return len(self._overlay.table)

    def contacts(self) -> list[Contact]:
        """The peers in the routing table."""
        return self._overlay.table.contacts()

    async def join(self, initial_peers: Sequence[Address]) -> None:
        """Reach one of the initial peers and learn one's neighbours from it; takes ``join_timeout_s`` at most.

        Those that do not answer are tried again in the background. Without initial peers this is the first peer.

        Raises:
            JoinFailed: none answered; it says why for each address. Joining again is possible.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.join_timeout_s
        if initial_peers:
            await self._initial_peers.reach_one(initial_peers)
            await self._overlay.lookup(node_id(self._endpoint.peer_id), deadline - loop.time())
            logger.info("joined the DHT; %d peers are known", self.num_known_peers)
        if self._upkeep is None:
            self._upkeep = self._tasks.spawn(self._keep_up(), name="upkeep")

    async def store(self, key: str, value: Any, ttl_s: float, subkey: str | None = None) -> int:
        """Publish a value under a key, and perhaps a subkey, at the peers nearest to the key.

        With this peer's own id as subkey the record is signed, and nobody else can replace it. Any other record can be
        replaced by everybody; the last write counts, also if an earlier writer's clock is ahead.

        Args:
            key: 1 to 256 characters.
            value: bool, int, float, str, bytes, or lists and dicts of them. None deletes: it hides what was stored
                before for ``ttl_s``, which should not be shorter than what the deleted value has left.
            ttl_s: seconds until it is forgotten, at most ``max_ttl_s``.
            subkey: at most 128 characters; None is the empty one.
        Returns:
            How many peers hold it now, this one included if it is among the nearest; 0 if nobody could be reached.
        Raises:
            ConfigError: an argument breaks its rule, or the subkey is the id of another peer.
        """
        record = self._issuer.issue(key, subkey or "", value, ttl_s)
        self._rejoin_if_lost()
        contacts = await self._overlay.lookup(key_id(key), self._config.lookup_timeout_s)
        replicas = self._replicas(key, contacts)
        outcomes = await self._store_at(replicas, record)
        shown = [outcome.later.record for outcome in outcomes if outcome.later is not None]
        above = self._issuer.sequence_to_exceed(record, shown)
        if above is not None:
            outcomes = await self._store_at(replicas, self._issuer.issue(key, subkey or "", value, ttl_s, above))
        return sum(outcome.is_stored for outcome in outcomes)

    async def get(self, key: str) -> dict[str, StoredValue]:
        """Find the values of a key, by subkey: of each the latest that any of the peers nearest to the key holds.

        An empty answer may also mean that nobody could be reached.

        Raises:
            ConfigError: not a key.
        """
        check_key(key)
        self._rejoin_if_lost()
        loop = asyncio.get_running_loop()
        found = Storage(self._config)  # what others answer is judged as if they stored it
        for held in self._storage.get(key, loop.time()):
            found.put(held.record, held.expires_at, loop.time())

        def merge(source: PeerId, records: list[AgedRecord]) -> None:
            for aged in records:
                is_wanted = aged.record.key == key
                reason = found.offer(aged, loop.time(), self._wall_clock()) if is_wanted else Reason.MALFORMED
                self._note(reason, source, aged.record)

        await self._overlay.lookup(key_id(key), self._config.lookup_timeout_s, key, merge)
        now = loop.time()
        return {
            held.record.subkey: StoredValue(
                decode_value(held.record.value), held.record.sequence, held.expires_at - now, held.record.owner
            )
            for held in found.get(key, now)
            if not held.record.is_tombstone
        }

    async def refresh(self) -> None:
        """One round of upkeep; happens by itself about every ``refresh_period_s``."""
        await asyncio.gather(self._initial_peers.retry(), self._refresh_table())
        await self._hand_over()

    async def close(self) -> None:
        """End the background tasks and serve no more; the endpoint stays open. May be called twice."""
        if not self._endpoint.client_mode:
            for method in (PING, FIND, STORE):
                self._endpoint.unhandle(method)
        if self._handover.forget in self._endpoint.on_lost:
            self._endpoint.on_lost.remove(self._handover.forget)
        await self._tasks.close()

    # served to others

    async def _on_ping(self, remote: PeerId, request: PingRequest) -> PingResponse:
        self._overlay.seen(remote)
        return PingResponse()

    async def _on_find(self, remote: PeerId, request: FindRequest) -> FindResponse:
        self._overlay.seen(remote)
        now = asyncio.get_running_loop().time()
        nearest = self._overlay.table.nearest(id_from_bytes(request.target), self._config.k + 1)
        contacts = [contact for contact in nearest if contact.peer_id != remote][: self._config.k]
        records = [held.aged(now) for held in self._storage.get(request.key, now)] if request.key else []
        return FindResponse(contacts, records)

    async def _on_store(self, remote: PeerId, request: StoreRequest) -> StoreResponse:
        self._overlay.seen(remote)
        return StoreResponse([self._hold(remote, aged) for aged in request.records])

    def _hold(self, source: PeerId, aged: AgedRecord) -> StoreOutcome:
        now = asyncio.get_running_loop().time()
        record = aged.record
        reason = self._storage.offer(aged, now, self._wall_clock())
        self._note(reason, source, record)
        later = self._storage.held(record.key, record.subkey, now) if reason is Reason.STALE else None
        return StoreOutcome(reason.is_stored, reason.value, later.aged(now) if later is not None else None)

    def _note(self, reason: Reason, source: PeerId, record: Record) -> None:
        if not reason.is_stored and reason is not Reason.STALE:
            self.refusals[reason] += 1
            logger.debug("peer %s sent a record that is %s: %r, %r", source, reason.value, record.key, record.subkey)

    # asked of others

    def _replicas(self, key: str, contacts: Sequence[Contact]) -> list[PeerId]:
        """The peers that should hold a key, nearest first, perhaps this one among them."""
        peers = [contact.peer_id for contact in contacts]
        if not self._endpoint.client_mode:
            peers.append(self._endpoint.peer_id)
        target = key_id(key)
        return heapq.nsmallest(self._config.replicas, peers, key=lambda peer: distance(node_id(peer), target))

    async def _store_at(self, replicas: Sequence[PeerId], record: Record) -> list[StoreOutcome]:
        sent = [AgedRecord(record, 0.0)]
        outcomes = await asyncio.gather(*(self._send(peer_id, sent) for peer_id in replicas))
        return [outcome for answer in outcomes for outcome in answer]

    async def _send(self, peer_id: PeerId, records: list[AgedRecord]) -> list[StoreOutcome]:
        """Ask a peer, perhaps this one, to hold records; no outcomes if it does not answer."""
        if peer_id == self._endpoint.peer_id:
            return [self._hold(peer_id, aged) for aged in records]
        response = await self._overlay.ask(peer_id, STORE, StoreRequest(records))
        return response.outcomes if response is not None and len(response.outcomes) == len(records) else []

    # upkeep

    def _rejoin_if_lost(self) -> None:
        """Nobody is known any more, as after a freeze: dial the initial peers now, not at the next upkeep."""
        if not len(self._overlay.table) and (self._rejoining is None or self._rejoining.done()):
            self._rejoining = self._tasks.spawn(self._initial_peers.retry(), name="rejoining")

    async def _keep_up(self) -> None:
        while True:
            await asyncio.sleep(self._config.refresh_period_s * self._rng.uniform(0.75, 1.25))  # not all at once
            await self.refresh()

    async def _refresh_table(self) -> None:
        """Doubt the quietest contacts, and look around near this node and anywhere."""
        doubted = self._overlay.table.least_recently_seen()
        await asyncio.gather(*(self._overlay.ask(contact.peer_id, PING, PingRequest()) for contact in doubted))
        for target in (node_id(self._endpoint.peer_id), self._rng.getrandbits(ID_BITS)):
            await self._overlay.lookup(target, self._config.lookup_timeout_s)

    async def _hand_over(self) -> None:
        """Give the records held here to peers that should hold them since others came or went."""
        keys = self._storage.keys(asyncio.get_running_loop().time())
        plan = self._handover.plan(keys, self._other_replicas)
        await asyncio.gather(*(self._give(peer_id, gift) for peer_id, gift in plan.items()))

    def _other_replicas(self, key: str) -> list[PeerId]:
        nearest = self._overlay.table.nearest(key_id(key), self._config.replicas)
        return [peer_id for peer_id in self._replicas(key, nearest) if peer_id != self._endpoint.peer_id]

    async def _give(self, peer_id: PeerId, keys: Sequence[str]) -> None:
        now = asyncio.get_running_loop().time()
        records = [held.aged(now) for key in keys for held in self._storage.get(key, now)]
        for start in range(0, len(records), MAX_STORED_RECORDS):
            outcomes = await self._send(peer_id, records[start : start + MAX_STORED_RECORDS])
            if not outcomes:
                return  # it is tried again in the next round
            for outcome in outcomes:
                if outcome.later is not None:
                    self._hold(peer_id, outcome.later)
        self._handover.given(peer_id, keys)
