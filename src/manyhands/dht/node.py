"""One node of the DHT: what a peer publishes, and what it finds of others."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from manyhands.base.address import Address
from manyhands.base.identity import PeerId
from manyhands.dht.config import MAX_STORED_RECORDS, DhtConfig
from manyhands.dht.findings import Findings, StoredValue
from manyhands.dht.handover import Handover
from manyhands.dht.ids import ID_BITS, distance, id_from_bytes, id_to_bytes, key_id, node_id
from manyhands.dht.issuing import Issuer, check_key
from manyhands.dht.joining import InitialPeers
from manyhands.dht.known_peers import KnownPeers
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
from manyhands.dht.records import AgedRecord, Reason, Record, digest_of
from manyhands.dht.replicas import Replicas
from manyhands.dht.routing import Contact
from manyhands.dht.storage import Storage
from manyhands.dht.together import all_of
from manyhands.rpc.endpoint import Endpoint
from manyhands.runtime.tasks import TaskOwner

logger = logging.getLogger(__name__)

PASSED = (Reason.ACCEPTED, Reason.UNCHANGED, Reason.STALE)
"""What becomes of a record that is as it should be."""

REMEMBERED_READS = 16
"""Keys whose records, as they were read last, need not be checked again; each is bounded, as all of a key is."""

MAX_DOUBTED = 2
"""Far contacts that a round of upkeep asks if they are there: a lookup that meets a dead one goes on without."""

NEWCOMERS_ASKED = 3
"""New neighbours that are asked whom else they know."""

MAX_QUIET_ROUNDS = 16
"""Rounds of upkeep between two looks around, when nobody comes or goes."""


class DhtNode:
    """Stores and finds small records at the peers nearest to their keys.

    A node whose endpoint is in client mode reads and writes, but holds nothing and is in nobody's table.
    Source: Maymounkov & Mazieres, Kademlia, 2002.

    Args:
        endpoint: the connections of this peer; the node serves ``dht.*`` on it until :meth:`close`.
        config: settings of this node.
        rng: for the times and targets of upkeep.
        wall_clock: seconds since 1970.
        known_peers: peers seen before, to join by as well.

    Attributes:
        refusals: how many records of others were refused, by reason.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        config: DhtConfig,
        rng: random.Random,
        wall_clock: Callable[[], float],
        known_peers: KnownPeers | None = None,
    ) -> None:
        self.refusals: Counter[Reason] = Counter()
        self._known_peers = known_peers if known_peers is not None else KnownPeers()
        self._endpoint = endpoint
        self._config = config
        self._rng = rng
        self._wall_clock = wall_clock
        self._tasks = TaskOwner("dht")
        self._overlay = Overlay(endpoint, config)
        self._initial_peers = InitialPeers(
            endpoint, self._overlay, config, self._tasks, rng=rng, wall_clock=wall_clock, known=self._known_peers
        )
        self._issuer = Issuer(endpoint.identity, config, wall_clock)
        self._storage = Storage(config)
        own_id = None if endpoint.client_mode else endpoint.peer_id
        self._replicas = Replicas(own_id, self._overlay.table, config)
        self._handover = Handover()
        self._read: OrderedDict[str, dict[str, Record]] = OrderedDict()  # by key and subkey
        self._neighbours_seen: set[PeerId] = set()
        self._quiet_rounds = 0
        self._upkeep: asyncio.Task[None] | None = None
        self._rejoining: asyncio.Task[None] | None = None
        if not endpoint.client_mode:
            endpoint.handle(PING, self._on_ping)
            endpoint.handle(FIND, self._on_find)
            endpoint.handle(STORE, self._on_store)
        endpoint.on_lost.append(self._on_lost)

    @property
    def num_known_peers(self) -> int:
        """Peers in the routing table."""
        return len(self._overlay.table)

    @property
    def num_records(self) -> int:
        """Records that this node holds, those too that have just expired."""
        return len(self._storage)

    def contacts(self) -> list[Contact]:
        """The peers in the routing table."""
        return self._overlay.table.contacts()

    def known_peers(self) -> KnownPeers:
        """The peers that were seen lately or before, lost ones too."""
        self._initial_peers.note_known()
        return self._known_peers

    async def join(self, initial_peers: Sequence[Address], *, must_join: bool = True) -> None:
        """Reach an initial peer, or one seen before, and learn one's neighbours; takes ``join_timeout_s`` at most.

        Those that do not answer are tried again in the background. Without initial peers this is the first peer, unless
        one that was seen before answers.

        Args:
            must_join: False to begin alone when nobody answers, and go on trying, as a coordinator does.
        Raises:
            JoinFailed: none answered; it says why for each address. Joining again is possible. A peer whose own address
                is among the initial peers begins alone instead.
        """
        await self._initial_peers.join(initial_peers, must_join=must_join)
        if self._upkeep is None:
            self._upkeep = self._tasks.spawn(self._keep_up(), name="upkeep")
            self._tasks.spawn(self._initial_peers.keep_trying(), name="looking for lost initial peers")

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
        outcomes = await self._write(record)
        shown = [outcome.later.record for outcome in outcomes if outcome.later is not None]
        above = self._issuer.sequence_to_exceed(record, shown)
        if above is not None:
            outcomes = await self._write(self._issuer.issue(key, subkey or "", value, ttl_s, above))
        return sum(outcome.is_stored for outcome in outcomes)

    async def get(self, key: str, *, quickly: bool = False) -> dict[str, StoredValue]:
        """Find the values of a key, by subkey: of each the latest that the peers nearest to the key hold.

        A majority of them is asked, one for the records and the others for a digest of theirs; who has others is then
        asked for them. A write that a majority has taken is therefore seen, though a holder may have missed it.
        Whenever a holder does not answer, all of them are looked up and asked.

        An empty answer may also mean that nobody could be reached.

        Args:
            quickly: ask one of them only, drawn by chance. It may have missed a write, so this is for who reads again
                soon, from another one then, and keeps the latest that it has seen.
        Raises:
            ConfigError: not a key.
        """
        check_key(key)
        self._rejoin_if_lost()
        loop = asyncio.get_running_loop()
        found = Findings(key, self._config, self._read.get(key))
        for held in self._storage.get(key, loop.time()):
            found.add(held.record, held.expires_at)
        found.note_shown(self._endpoint.peer_id, len(self._storage.get(key, loop.time())))
        if not await self._read_at_some(key, found, quickly):
            await self._read_at_all(key, found)
        self._remember_read(key, found)
        return found.values(loop.time())

    def _remember_read(self, key: str, found: Findings) -> None:
        self._read[key] = found.records()
        self._read.move_to_end(key)
        if len(self._read) > REMEMBERED_READS:
            self._read.popitem(last=False)

    async def refresh(self) -> None:
        """One round of upkeep; happens by itself about every ``refresh_period_s``."""
        await self._initial_peers.retry()
        await self._refresh_table()
        await self._hand_over()

    async def close(self) -> None:
        """End the background tasks and serve no more; the endpoint stays open. May be called twice."""
        if not self._endpoint.client_mode:
            for method in (PING, FIND, STORE):
                self._endpoint.unhandle(method)
        if self._on_lost in self._endpoint.on_lost:
            self._endpoint.on_lost.remove(self._on_lost)
        await self._tasks.close()

    def _on_lost(self, peer_id: PeerId) -> None:
        self._overlay.table.lost(peer_id)
        self._handover.forget(peer_id)

    # served to others

    def _on_ping(self, remote: PeerId, request: PingRequest) -> PingResponse:
        self._overlay.seen(remote)
        return PingResponse()

    def _on_find(self, remote: PeerId, request: FindRequest) -> FindResponse:
        self._overlay.seen(remote)
        return self._answer(remote, request)

    def _answer(self, remote: PeerId, request: FindRequest) -> FindResponse:
        now = asyncio.get_running_loop().time()
        contacts: list[Contact] = []
        if request.wants_contacts:
            nearest = self._overlay.table.nearest(id_from_bytes(request.target), self._config.k + 1)
            contacts = [contact for contact in nearest if contact.peer_id != remote][: self._config.k]
        if not request.key:
            return FindResponse(contacts)
        is_responsible = self._replicas.is_own(request.key)
        if not request.wants_records:
            return FindResponse(contacts, [], self._storage.digest(request.key, now), is_responsible)
        records = [held.aged(now) for held in self._storage.get(request.key, now)]
        return FindResponse(contacts, records, is_responsible=is_responsible)

    def _on_store(self, remote: PeerId, request: StoreRequest) -> StoreResponse:
        self._overlay.seen(remote)
        return StoreResponse([self._hold(remote, aged) for aged in request.records])

    def _hold(self, source: PeerId, aged: AgedRecord) -> StoreOutcome:
        now = asyncio.get_running_loop().time()
        record = aged.record
        reason = self._storage.offer(aged, now, self._wall_clock())
        self._note(reason, source, record)
        later = self._storage.held(record.key, record.subkey, now) if reason is Reason.STALE else None
        is_responsible = self._replicas.is_own(record.key)
        return StoreOutcome(reason.is_stored, reason.value, later.aged(now) if later else None, is_responsible)

    def _note(self, reason: Reason, source: PeerId, record: Record) -> None:
        if not reason.is_stored and reason is not Reason.STALE:
            self.refusals[reason] += 1
            logger.debug("peer %s sent a record that is %s: %r, %r", source, reason.value, record.key, record.subkey)

    # asked of others

    async def _lookup(self, key: str, found: Findings | None = None) -> list[PeerId]:
        """Look up who should hold a key, nearest first, perhaps this peer among them; and read from all on the way."""

        def merge(source: PeerId, records: list[AgedRecord]) -> None:
            if found is not None:
                self._merge(found, source, records)

        config, target = self._config, key_id(key)
        wanted_key = key if found is not None else None
        contacts = await self._overlay.lookup(target, config.lookup_timeout_s, config.replicas, wanted_key, merge)
        return self._replicas.among(key, (contact.peer_id for contact in contacts))

    def _merge(self, found: Findings, source: PeerId, records: list[AgedRecord]) -> list[Record]:
        """Take in what a peer shows; returns what passes."""
        now, wall_now = asyncio.get_running_loop().time(), self._wall_clock()
        passed: list[Record] = []
        for aged in records:
            reason = found.offer(aged, now, wall_now)
            if reason in PASSED:
                passed.append(aged.record)
            else:
                self._note(reason, source, aged.record)
        found.note_shown(source, len(passed))
        return passed

    async def _write(self, record: Record) -> list[StoreOutcome]:
        """Have a record held by the peers nearest to its key; one outcome for each that answers."""
        replicas = self._replicas.recall(record.key, asyncio.get_running_loop().time())
        outcomes = await self._store_at(replicas, record)
        if not replicas or len(outcomes) < len(replicas) or not all(o.is_responsible for o in outcomes.values()):
            found = await self._lookup(record.key)
            self._replicas.remember(record.key, found, asyncio.get_running_loop().time())
            outcomes |= await self._store_at([peer_id for peer_id in found if peer_id not in outcomes], record)
        return list(outcomes.values())

    async def _store_at(self, replicas: Sequence[PeerId], record: Record) -> dict[PeerId, StoreOutcome]:
        sent = [AgedRecord(record, 0.0)]
        outcomes = await all_of(*(self._send(peer_id, sent) for peer_id in replicas))
        return {peer_id: answer[0] for peer_id, answer in zip(replicas, outcomes, strict=True) if answer}

    async def _read_at_all(self, key: str, found: Findings) -> None:
        replicas = await self._lookup(key, found)
        now, are_complete = asyncio.get_running_loop().time(), found.are_complete(replicas)
        self._replicas.remember(key, replicas, now, are_complete)

    async def _read_at_some(self, key: str, found: Findings, quickly: bool) -> bool:
        """Read from one or a majority of the peers that are known to hold a key; whether all was well."""
        replicas = list(self._replicas.recall_complete(key, asyncio.get_running_loop().time()))
        if not replicas:
            return False
        self._rng.shuffle(replicas)
        replicas.sort(key=lambda peer_id: peer_id != self._endpoint.peer_id)  # what is held here costs nothing
        first, *others = replicas[: 1 if quickly else len(replicas) // 2 + 1]
        answers = await all_of(
            self._read_at(first, key, wants_records=True),
            *(self._read_at(peer_id, key, wants_records=False) for peer_id in others),
        )
        if not all(answer is not None and answer.is_responsible for answer in answers):
            self._replicas.forget(key)
            return False
        records, *digests = (answer for answer in answers if answer is not None)
        passed = self._merge(found, first, records.records)
        if not others:
            return True
        digest = digest_of(passed)
        differing = [peer_id for peer_id, answer in zip(others, digests, strict=True) if answer.digest != digest]
        more = await all_of(*(self._read_at(peer_id, key, wants_records=True) for peer_id in differing))
        for peer_id, answer in zip(differing, more, strict=True):
            self._merge(found, peer_id, answer.records if answer is not None else [])
        if differing and not found.are_complete([first, *differing]):
            self._replicas.forget(key)
            return False
        return True

    async def _read_at(self, peer_id: PeerId, key: str, *, wants_records: bool) -> FindResponse | None:
        request = FindRequest(id_to_bytes(key_id(key)), key, wants_contacts=False, wants_records=wants_records)
        if peer_id == self._endpoint.peer_id:
            return self._answer(peer_id, request)
        return await self._overlay.ask(peer_id, FIND, request)

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
        """Doubt the contacts that nothing was heard of, and look around near this node and anywhere.

        As long as the nearest peers stay the same, looking around finds what is known: it is done ever more seldom.
        Those that came have made themselves known to all near them, unless they come from another part of the swarm.
        """
        await asyncio.gather(*(self._overlay.ask(peer_id, PING, PingRequest()) for peer_id in self._doubted()))
        before, self._neighbours_seen = self._neighbours_seen, self._neighbours()
        has_lost = any(peer_id not in self._overlay.table for peer_id in before)
        self._quiet_rounds = 0 if has_lost else self._quiet_rounds + 1
        is_quiet = self._quiet_rounds not in (0, 1, 3) and self._quiet_rounds % MAX_QUIET_ROUNDS
        if is_quiet and not await self._tell_news(self._neighbours_seen - before):
            return
        config = self._config
        await self._overlay.lookup(node_id(self._endpoint.peer_id), config.lookup_timeout_s, config.k)
        await self._overlay.lookup(self._rng.getrandbits(ID_BITS), config.lookup_timeout_s, config.replicas)
        self._neighbours_seen = self._neighbours()

    async def _tell_news(self, newcomers: set[PeerId]) -> bool:
        """Whether some of these new neighbours know peers near this node that it does not know."""
        asked = sorted(newcomers)[:NEWCOMERS_ASKED]
        own_point = node_id(self._endpoint.peer_id)
        request = FindRequest(id_to_bytes(own_point))
        answers = await asyncio.gather(*(self._overlay.ask(peer_id, FIND, request) for peer_id in asked))
        distances = [distance(node_id(peer_id), own_point) for peer_id in self._neighbours_seen]
        farthest = max(distances) if len(distances) >= self._config.k else 1 << ID_BITS
        return any(
            contact.peer_id not in self._overlay.table
            and contact.peer_id != self._endpoint.peer_id
            and distance(node_id(contact.peer_id), own_point) < farthest
            for answer in answers
            if answer is not None
            for contact in answer.contacts
        )

    def _neighbours(self) -> set[PeerId]:
        nearest = self._overlay.table.nearest(node_id(self._endpoint.peer_id), self._config.k)
        return {contact.peer_id for contact in nearest}

    def _doubted(self) -> list[PeerId]:
        """Whose life to make sure of: all that should hold what is held here, and a few of the rest."""
        keys = self._storage.keys(asyncio.get_running_loop().time())
        partners = self._overlay.doubtful(peer_id for key in keys for peer_id in self._other_replicas(key))
        rest = self._overlay.doubtful(contact.peer_id for contact in self._overlay.table.least_recently_seen())
        return list(dict.fromkeys([*partners, *rest[:MAX_DOUBTED]]))

    async def _hand_over(self) -> None:
        """Give the records held here to peers that should hold them since others came or went."""
        keys = self._storage.keys(asyncio.get_running_loop().time())
        plan = self._handover.plan(keys, self._other_replicas)
        await asyncio.gather(*(self._give(peer_id, gift) for peer_id, gift in plan.items()))

    def _other_replicas(self, key: str) -> list[PeerId]:
        return [peer_id for peer_id in self._replicas.known(key) if peer_id != self._endpoint.peer_id]

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
