"""Serves the DHT requests of other peers from the records of this node."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from manyhands.base.errors import Refused
from manyhands.base.identity import PeerId
from manyhands.dht.config import DhtConfig
from manyhands.dht.holder_cache import HolderCache
from manyhands.dht.ids import id_from_bytes, node_id
from manyhands.dht.messages import (
    FIND,
    MAX_TOPICS,
    PING,
    STORE,
    TOO_MANY_REQUESTS,
    TOPICS,
    FindRequest,
    FindResponse,
    PingRequest,
    PingResponse,
    StoreOutcome,
    StoreRequest,
    StoreResponse,
    TopicsRequest,
    TopicsResponse,
)
from manyhands.dht.networks import network_of
from manyhands.dht.overlay import Overlay
from manyhands.dht.rate_limit import MAX_CHECKS_PER_S, RateLimit
from manyhands.dht.records import AgedRecord, Reason, Record
from manyhands.dht.routing import Contact
from manyhands.dht.schema import Schema
from manyhands.dht.storage import Storage
from manyhands.rpc.endpoint import Endpoint
from manyhands.transport.admission import source_of

logger = logging.getLogger(__name__)


class RequestHandlers:
    """Handles ``dht.*`` requests, within limits, until :meth:`close`. In client mode it serves nothing.

    Args:
        known: returns the ids of the peers whose records under a key are checked in any case.

    Attributes:
        refusals: refused records of other peers, by reason.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        config: DhtConfig,
        overlay: Overlay,
        storage: Storage,
        holder_cache: HolderCache,
        schemas: Mapping[str, Schema],
        known: Callable[[str], Collection[str]],
        wall_clock: Callable[[], float],
    ) -> None:
        self.refusals: Counter[Reason] = Counter()
        self._endpoint = endpoint
        self._config = config
        self._overlay = overlay
        self._storage = storage
        self._holder_cache = holder_cache
        self._schemas = schemas
        self._known = known
        self._wall_clock = wall_clock
        self._rate_limit = RateLimit(config)
        if not endpoint.client_mode:
            endpoint.handle(PING, self._on_ping)
            endpoint.handle(FIND, self._on_find)
            endpoint.handle(STORE, self._on_store)
            endpoint.handle(TOPICS, self._on_topics)

    def close(self) -> None:
        """Stop serving."""
        if not self._endpoint.client_mode:
            for method in (PING, FIND, STORE, TOPICS):
                self._endpoint.unhandle(method)

    def answer(self, remote: PeerId, request: FindRequest) -> FindResponse:
        """Return the contacts near a point and the records of a key that this node knows."""
        now = asyncio.get_running_loop().time()
        contacts: list[Contact] = []
        point = id_from_bytes(request.target)
        if request.wants_contacts:
            table = self._overlay.table
            is_neighbour = point == node_id(remote)  # it looks for its neighbours, which may all be in one network
            find = table.nearest if is_neighbour else table.nearest_spread
            nearest = find(point, self._config.k + 1)
            contacts = [contact for contact in nearest if contact.peer_id != remote][: self._config.k]
        if not request.key:
            return FindResponse(contacts)
        is_responsible = self._holder_cache.is_own(request.key)
        if not request.wants_records:
            digest = self._storage.digest(request.key, now, request.owners)
            return FindResponse(contacts, [], digest, is_responsible)
        page, is_more = self._storage.page(request.key, request.after, now, request.owners, request.most)
        num_held = self._storage.num_held(request.key, now) if request.most is not None else 0
        records = [held.aged(now) for held in page]
        return FindResponse(contacts, records, is_responsible=is_responsible, is_more=is_more, num_held=num_held)

    def hold(self, source: PeerId, aged: AgedRecord) -> StoreOutcome:
        """Store a record that a peer sent, if the rules allow it."""
        now = asyncio.get_running_loop().time()
        record = aged.record
        machine = self._machine_of(source) if source != self._endpoint.peer_id else ""
        reason = self._storage.offer(aged, now, self._wall_clock(), machine)
        self.note(reason, source, record)
        later = self._storage.held(record.key, record.subkey, now) if reason is Reason.STALE else None
        is_responsible = self._holder_cache.is_own(record.key)
        later_record = later.aged(now) if later is not None else None
        return StoreOutcome(reason.is_stored, reason.value, later_record, is_responsible)

    def may_check(self, source: PeerId, records: Sequence[Record]) -> bool:
        """Count signature checks of records that a peer sent; return whether its network is within the limit."""
        now = asyncio.get_running_loop().time()
        network = self._network_of(source)
        nums = Counter(record.key for record in records)
        return all(self._rate_limit.may_check(network, key, num, now) for key, num in nums.items())

    def may_read(self, source: PeerId, key: str) -> bool:
        """Whether the network of a holder can afford to show more records of unknown owners."""
        return self._rate_limit.may_read(self._network_of(source), key, asyncio.get_running_loop().time())

    def charge_read(self, source: PeerId, key: str, num_bytes: int) -> None:
        """Count bytes of records of unknown owners that a holder has shown."""
        now = asyncio.get_running_loop().time()
        self._rate_limit.charge_read(self._network_of(source), key, num_bytes, now)

    def _network_of(self, source: PeerId) -> str:
        host = self._endpoint.host_of(source)
        return network_of(host) if host else self._overlay.network_of(source)

    def note(self, reason: Reason, source: PeerId, record: Record) -> None:
        """Count an invalid or refused record of another peer."""
        if not reason.is_stored and reason is not Reason.STALE:
            self.refusals[reason] += 1
            logger.debug("refused a record of peer %s (%s): key %r, subkey %r",
                         source, reason.value, record.key, record.subkey)  # fmt: skip

    def _on_ping(self, remote: PeerId, request: PingRequest) -> PingResponse:
        self._let_in(remote)
        if not request.was_reached:
            self._overlay.doubt(remote)
        return PingResponse()

    def _on_find(self, remote: PeerId, request: FindRequest) -> FindResponse:
        self._let_in(remote)
        return self.answer(remote, request)

    def _on_store(self, remote: PeerId, request: StoreRequest) -> StoreResponse:
        self._let_in(remote)
        now = asyncio.get_running_loop().time()
        known = {key: self._known(key) for key in {aged.record.key for aged in request.records}}
        to_check = [
            aged.record
            for aged in request.records
            if aged.record.owner not in known[aged.record.key] and self._is_to_be_checked(aged.record, now)
        ]
        if not self.may_check(remote, to_check):
            raise self._too_many(f"{MAX_CHECKS_PER_S:g} changed records a second from one network")
        outcomes = [self.hold(remote, aged) for aged in request.records]
        num_forged = sum(outcome.code == Reason.BAD_SIGNATURE.value for outcome in outcomes)
        if num_forged:
            self._rate_limit.charge_forged(remote, self._machine_of(remote), num_forged, now)
        return StoreResponse(outcomes)

    def _on_topics(self, remote: PeerId, request: TopicsRequest) -> TopicsResponse:
        self._let_in(remote)
        return TopicsResponse(sorted(self.topics(request.kind))[:MAX_TOPICS])

    def topics(self, kind: str) -> set[str]:
        """Return the topics of which this node holds records of a kind or has declared a schema."""
        keys = (key.partition(".") for key in self._schemas)
        declared = {topic for topic, _, key_kind in keys if key_kind == kind}
        return declared | self._storage.topics(kind, asyncio.get_running_loop().time())

    def _let_in(self, remote: PeerId) -> None:
        """Add the caller to the routing table; refuse it if it exceeds the rate limit."""
        now = asyncio.get_running_loop().time()
        limit = self._rate_limit.broken_by(remote, self._machine_of(remote), now)
        if limit is not None:
            raise self._too_many(f"{limit:g} requests a second")
        self._overlay.seen(remote)

    def _too_many(self, limit: str) -> Refused:
        self._endpoint.counters["dht_requests_refused"] += 1
        return Refused(self._endpoint.peer_id, TOO_MANY_REQUESTS, f"more than {limit}")

    def _is_to_be_checked(self, record: Record, now: float) -> bool:
        """Whether a record that is to be stored is signed, and not held yet."""
        if not record.owner:
            return False
        held = self._storage.held(record.key, record.subkey, now)
        return held is None or held.record != record

    def _machine_of(self, peer_id: PeerId) -> str:
        """Return the machine of a peer: its IP address, or the /64 of an IPv6 address; empty if unknown."""
        host = self._endpoint.host_of(peer_id)
        return source_of(host) if ":" in host else host
