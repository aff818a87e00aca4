"""One node of the DHT: publishes records of this peer and finds those of others."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any

from manyhands.base.address import Address
from manyhands.base.errors import PeerError, Unavailable
from manyhands.base.identity import PeerId
from manyhands.dht.config import DhtConfig
from manyhands.dht.handlers import RequestHandlers
from manyhands.dht.holder_cache import HolderCache
from manyhands.dht.initial_peers import InitialPeers
from manyhands.dht.issuing import Issuer, check_key
from manyhands.dht.known_peers import KnownPeers
from manyhands.dht.messages import TOPICS, TopicsRequest
from manyhands.dht.overlay import Overlay
from manyhands.dht.quotas import Membership
from manyhands.dht.read_result import Part, ReadResult, StoredValue
from manyhands.dht.reader import Reader
from manyhands.dht.records import Reason, topic_of
from manyhands.dht.routing import Contact
from manyhands.dht.schema import Schema
from manyhands.dht.storage import Storage
from manyhands.dht.upkeep import Upkeep
from manyhands.dht.writer import KEYS_AT_ONCE, Entry, Writer
from manyhands.rpc.endpoint import Endpoint
from manyhands.runtime.concurrently import gathered
from manyhands.runtime.tasks import TaskOwner

logger = logging.getLogger(__name__)

Filter = Callable[[str, dict[str, StoredValue]], dict[str, StoredValue]]
"""Takes a key and the values found under it; returns those that are valid."""

NUM_ASKED = 16
"""Number of peers that :meth:`DhtNode.topics` and :meth:`DhtNode.anyone_answers` ask."""


class DhtNode:
    """Stores and finds small records at the peers nearest to their keys.

    A node whose endpoint is in client mode reads and writes, but holds nothing and is in no other peer's table.
    Source: Maymounkov & Mazieres, Kademlia, 2002.

    Args:
        endpoint: the connections of this peer; the node serves ``dht.*`` on it until :meth:`close`.
        config: settings of this node.
        rng: for the times and targets of upkeep.
        wall_clock: seconds since 1970.
        known_peers: peers seen before, through which the node may also join.

    Attributes:
        filters: by topic, a filter that hides some records from readers; the topic of a key is the part before its
            first ``.``.
        members: by topic, the members of a run by invitation. Records of other peers do not count, and get only a small
            part of a key's capacity. Call :meth:`recount` when the members have changed.
        met: by topic, a function that returns the peers that this one knows as members of an open run. Their records
            are read and checked at once, whatever else comes from their networks.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        config: DhtConfig,
        rng: random.Random,
        wall_clock: Callable[[], float],
        known_peers: KnownPeers | None = None,
    ) -> None:
        self._known_peers = known_peers if known_peers is not None else KnownPeers()
        self._endpoint = endpoint
        self._config = config
        self._tasks = TaskOwner("dht")
        self._overlay = overlay = Overlay(endpoint, config)
        self._initial_peers = InitialPeers(
            endpoint, overlay, config, self._tasks, rng=rng, wall_clock=wall_clock, known=self._known_peers
        )
        self._schemas: dict[str, Schema] = {}
        self.filters: dict[str, Filter] = {}
        self.met: dict[str, Callable[[], Collection[str]]] = {}
        self.members: dict[str, Membership] = {}
        self._storage = storage = Storage(config, self._schemas, self.members)
        own_id = endpoint.peer_id
        holder_cache = HolderCache(own_id, overlay.table, config, overlay.network_of, overlay.is_client)
        handlers = RequestHandlers(
            endpoint, config, overlay, storage, holder_cache, self._schemas, self._known_owners, wall_clock
        )
        self._handlers = handlers
        self._reader = Reader(
            own_id,
            config,
            overlay,
            storage,
            holder_cache,
            handlers,
            self._schemas,
            self.members,
            self._known_owners,
            rng,
            wall_clock,
        )
        issuer = Issuer(endpoint.identity, config, wall_clock, self._schemas)
        writer = self._writer = Writer(own_id, config, overlay, holder_cache, handlers, issuer, self.members)
        self._upkeep = Upkeep(own_id, config, overlay, storage, holder_cache, handlers, writer, rng)
        self._upkeeping: asyncio.Task[None] | None = None
        self._rejoining: asyncio.Task[None] | None = None
        endpoint.on_lost.append(self._on_lost)
        endpoint.on_moved.append(overlay.moved)

    @property
    def refusals(self) -> Counter[Reason]:
        """Refused records of other peers, by reason."""
        return self._handlers.refusals

    @property
    def num_known_peers(self) -> int:
        """Peers in the routing table."""
        return len(self._overlay.table)

    @property
    def num_nodes(self) -> int:
        """Nodes in the routing table, except those that were lost or did not answer and were not heard of since."""
        return self._overlay.table.num_sound()

    @property
    def num_records(self) -> int:
        """Records that this node holds, including those that have just expired."""
        return len(self._storage)

    async def anyone_answers(self) -> bool:
        """Ping some peers in the routing table; return whether any of them answers."""
        asked = (contact.peer_id for contact in self.contacts()[:NUM_ASKED])
        return any(await asyncio.gather(*map(self._overlay.ping, asked)))

    def contacts(self) -> list[Contact]:
        """Return the peers in the routing table."""
        return self._overlay.table.contacts()

    def known_peers(self) -> KnownPeers:
        """Return the peers that were seen recently or before, including lost ones."""
        self._initial_peers.note_known()
        return self._known_peers

    def initial_peers(self) -> frozenset[PeerId]:
        """Return the ids of the initial peers, as far as their addresses name them or they have answered."""
        return self._initial_peers.known_ids()

    async def join(self, initial_peers: Sequence[Address], *, must_join: bool = True) -> None:
        """Reach an initial peer, or one seen before, and learn the neighbours; takes ``join_timeout_s`` at most.

        Peers that do not answer are dialled again in the background. Without initial peers this is the first peer,
        unless a peer seen before answers.

        Args:
            must_join: False to begin alone when no peer answers, and keep trying, as a coordinator does.
        Raises:
            JoinFailed: none answered; has the reason for each address. You may call :meth:`join` again. A peer whose
                own address is among the initial peers begins alone instead.
        """
        await self._initial_peers.join(initial_peers, must_join=must_join)
        if self._upkeeping is None:
            self._upkeeping = self._tasks.spawn(self._keep_up(), name="upkeep")
            self._tasks.spawn(self._initial_peers.keep_trying(), name="looking for lost initial peers")

    def declare(self, key: str, schema: Schema) -> None:
        """Hold, return and write only records that match the schema under this key from now on."""
        check_key(key)
        if self._schemas.get(key) == schema:
            return
        self._schemas[key] = schema
        self._storage.recheck(key)
        self._reader.forget(key)

    def recount(self, topic: str) -> None:
        """Count the records of a topic again that this node holds, as its members have changed."""
        self._storage.recount(topic, asyncio.get_running_loop().time())

    async def store(self, key: str, value: Any, ttl_s: float, subkey: str | None = None) -> int:
        """Publish a value under a key and an optional subkey at the peers nearest to the key.

        With this peer's own id as subkey the record is signed, and no other peer can replace it. Any peer can replace
        any other record; the last write wins, even if the clock of an earlier writer is ahead.

        Args:
            key: 1 to 256 characters.
            value: bool, int, float, str, bytes, or lists and dicts of them; at most 64 KiB in msgpack. None deletes: it
                hides the earlier value for ``ttl_s``, which should not be shorter than the remaining lifetime of that
                value.
            ttl_s: seconds until the record expires, at most ``max_ttl_s``.
            subkey: at most 128 characters; None is the empty one.
        Returns:
            How many peers hold it now, including this one if it is among the nearest; 0 if no peer could be reached.
        Raises:
            ConfigError: an argument breaks its rule or the schema of the key, or the subkey is the id of another peer.
            Refused: all reachable peers refuse it; ``code`` is a value of :class:`Reason`, such as ``key_full``.
        """
        return (await self.store_many([Entry(key, value, ttl_s, subkey)]))[0]

    async def store_many(self, entries: Sequence[Entry]) -> list[int]:
        """Like :meth:`store`, for many entries: one lookup per key, and one message for many subkeys of a key.

        Returns:
            For each entry, how many peers hold it now.
        Raises:
            ConfigError, Refused: as :meth:`store`, for one of the entries; the others may have been stored.
        """
        self._rejoin_if_lost()
        return await self._writer.store(entries)

    def _known_owners(self, key: str) -> Collection[str]:
        """Return the ids of the peers whose records under a key are read and checked in any case."""
        topic = topic_of(key)
        if (members := self.members.get(topic)) is not None:
            return members.known()
        met = self.met.get(topic)
        return {*self.initial_peers(), *(met() if met is not None else ())}

    async def get(
        self, key: str, *, quickly: bool = False, owners: Iterable[str] | None = None
    ) -> dict[str, StoredValue]:
        """Return the values of a key by subkey: the latest of each that the peers nearest to the key hold.

        The node asks a majority of them, one for the records and the others for a digest; it then asks those with
        another digest for their records. So it sees a write that a majority has taken, although a holder missed it.
        If a holder does not answer, the node looks up all holders and asks them. Many subkeys are read in pages, for at
        most half a minute per holder.

        An empty answer may also mean that no peer could be reached.

        Args:
            quickly: ask one random holder only. It may have missed a write, so use this to read repeatedly and keep the
                latest value seen.
            owners: the peers whose records are wanted; no others are read, and no other signatures are checked. Without
                it, these are the members in a run by invitation, and all peers in others, within the limits that
                :mod:`manyhands.dht.reader` describes.
        Raises:
            ConfigError: not a key.
        """
        only = frozenset(owners) if owners is not None else None
        return (await self._read(key, lambda: self._reader.read(key, quickly, only))).values

    async def get_part(self, key: str, most: int) -> Part:
        """Return some values of a key: those of about ``most`` subkeys, beginning with a random one, in their order.

        They are read from one random holder, which is this node if it is one, so it may have missed a write. Peer ids
        are spread evenly, so the values that peers have signed are a fair sample. If there are no more, these are all.

        Args:
            most: from 1 to ``MAX_FOUND_RECORDS``.
        Raises:
            ConfigError: not a key.
        """
        return await self._read(key, lambda: self._reader.read_part(key, most))

    async def _read(self, key: str, read: Callable[[], Awaitable[ReadResult]]) -> Part:
        check_key(key)
        self._rejoin_if_lost()
        topic = topic_of(key)
        members = self.members.get(topic)
        result = await read()
        if result.unknown and members is not None and await members.look_up(result.unknown):
            result = await read()
        found = result.values(asyncio.get_running_loop().time())
        passing = self.filters.get(topic)
        values = found if passing is None else passing(key, found)
        return Part(values, result.num_shown, result.num_held)

    async def get_many(self, keys: Iterable[str], *, quickly: bool = False) -> dict[str, dict[str, StoredValue]]:
        """Like :meth:`get`, for many keys: some are read concurrently, and their lookups share what they find.

        Raises:
            ConfigError: one is not a key.
        """
        wanted = list(keys)
        for key in wanted:
            check_key(key)
        wanted = list(dict.fromkeys(wanted))
        found: dict[str, dict[str, StoredValue]] = {key: {} for key in wanted}
        left = wanted[::-1]

        async def read_next() -> None:
            while left:
                key = left.pop()
                found[key] = await self.get(key, quickly=quickly)

        await gathered(*(read_next() for _ in range(min(KEYS_AT_ONCE, len(left)))))
        return found

    async def topics(self, kind: str) -> set[str]:
        """Return topics with keys ``TOPIC.KIND``, as known to :data:`NUM_ASKED` peers in the routing table.

        In a small swarm each node holds all records. In a large one each node that takes part in a topic knows it.
        """
        asked = [contact.peer_id for contact in self.contacts()][:NUM_ASKED]
        answers = await asyncio.gather(*(self._topics_of(peer_id, kind) for peer_id in asked))
        return set().union(*answers)

    async def _topics_of(self, peer_id: PeerId, kind: str) -> set[str]:
        timeout_s = self._config.request_timeout_s
        try:
            response = await self._endpoint.call(peer_id, TOPICS, TopicsRequest(kind), timeout_s)
        except (Unavailable, PeerError) as error:  # it may run an older version
            logger.debug("peer %s did not list its topics: %s", peer_id, error)
            return set()
        return set(response.topics)

    async def refresh(self) -> None:
        """Run one round of upkeep; it also runs by itself about every ``refresh_period_s``."""
        await self._initial_peers.retry()
        await self._upkeep.refresh_table()
        await self._upkeep.hand_over()

    async def close(self) -> None:
        """Stop the background tasks and stop serving; the endpoint stays open. May be called twice."""
        self._handlers.close()
        if self._on_lost in self._endpoint.on_lost:
            self._endpoint.on_lost.remove(self._on_lost)
            self._endpoint.on_moved.remove(self._overlay.moved)
        await self._overlay.close()
        await self._tasks.close()

    def _on_lost(self, peer_id: PeerId) -> None:
        self._overlay.table.lost(peer_id)
        self._upkeep.lost(peer_id)

    def _rejoin_if_lost(self) -> None:
        """If the table is empty, as after a freeze, dial the initial peers now instead of at the next upkeep."""
        if not len(self._overlay.table) and (self._rejoining is None or self._rejoining.done()):
            self._rejoining = self._tasks.spawn(self._initial_peers.retry(), name="rejoining")

    async def _keep_up(self) -> None:
        while True:
            await asyncio.sleep(self._upkeep.pause_s())
            await self.refresh()
