"""Reads the records of a key from the peers that hold them."""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from manyhands.base.identity import PeerId
from manyhands.dht.config import DhtConfig
from manyhands.dht.handlers import RequestHandlers
from manyhands.dht.holder_cache import HolderCache
from manyhands.dht.ids import id_to_bytes, key_id
from manyhands.dht.messages import FIND, FindRequest, FindResponse
from manyhands.dht.overlay import Overlay
from manyhands.dht.quotas import Membership
from manyhands.dht.read_result import Found, ReadResult
from manyhands.dht.records import AgedRecord, Reason, Record, digest_of_records, topic_of
from manyhands.dht.schema import Schema
from manyhands.dht.storage import Storage
from manyhands.runtime.concurrently import gathered

PASSED = (Reason.ACCEPTED, Reason.UNCHANGED, Reason.STALE)
"""Outcomes for a valid record."""

PAGES_TIMEOUT_S = 30.0
"""Timeout for the pages of one holder after the first: 8 MiB from each of five holders, over 12 Mbit/s."""

REMEMBERED_KEYS = 16
"""Keys whose records are kept after a read, so that the next read need not verify them again."""

REMEMBERED_RECORDS = 16_384
"""Records kept in total; the key that was read longest ago is dropped first."""


class Reader:
    """Reads for one node.

    Args:
        own_id: the node's peer id; its own records are read without a request.
        schemas: by key; may be extended later.
        members: by topic, the members of a run; may be extended later.
    """

    def __init__(
        self,
        own_id: PeerId,
        config: DhtConfig,
        overlay: Overlay,
        storage: Storage,
        holder_cache: HolderCache,
        handlers: RequestHandlers,
        schemas: Mapping[str, Schema],
        members: Mapping[str, Membership],
        rng: random.Random,
        wall_clock: Callable[[], float],
    ) -> None:
        self._own_id = own_id
        self._config = config
        self._overlay = overlay
        self._storage = storage
        self._holder_cache = holder_cache
        self._handlers = handlers
        self._schemas = schemas
        self._members = members
        self._rng = rng
        self._wall_clock = wall_clock
        self._flooders: dict[str, set[PeerId]] = {}  # by key, of runs whose members are known
        self._read: OrderedDict[str, dict[str, Found]] = OrderedDict()  # by key and subkey

    async def read(self, key: str, quickly: bool) -> ReadResult:
        """See :meth:`manyhands.dht.DhtNode.get`."""
        now = asyncio.get_running_loop().time()
        schema = self._schemas.get(key)
        found = ReadResult(key, self._config, self._read.get(key), schema, self._members.get(topic_of(key)))
        own = self._storage.get(key, now)
        for held in own:
            found.add(held.record, held.expires_at, held.num_bytes)
        if not await self._read_at_some(key, found, quickly):
            found.forget_shown()
            found.note_shown(self._own_id, (held.record for held in own))
            await self._read_at_all(key, found)
        if self._schemas.get(key) is not schema:  # declared meanwhile
            return await self.read(key, quickly)
        self._remember(key, found)
        return found

    def forget(self, key: str) -> None:
        """Verify all records of a key again at its next read."""
        self._read.pop(key, None)

    def _remember(self, key: str, found: ReadResult) -> None:
        self._read[key] = found.found
        self._read.move_to_end(key)
        while len(self._read) > REMEMBERED_KEYS or sum(map(len, self._read.values())) > REMEMBERED_RECORDS:
            self._read.popitem(last=False)

    async def _read_at_all(self, key: str, found: ReadResult) -> None:
        """Look up the holders of the key, and read from all peers asked on the way."""
        first_pages: dict[PeerId, FindResponse] = {}

        def take(source: PeerId, response: FindResponse) -> None:
            first_pages[source] = response
            found.note_shown(source, self._merge(found, source, response.records))

        config = self._config
        contacts = await self._overlay.lookup(key_id(key), config.lookup_timeout_s, config.replicas, key, take)
        holders = self._holder_cache.among(key, (contact.peer_id for contact in contacts))
        asked = [peer_id for peer_id in holders if peer_id in first_pages]
        await gathered(*(self._read_on(peer_id, key, found, first_pages[peer_id]) for peer_id in asked))
        self._flooders.pop(key, None)
        self._note_flooders(key, found, holders)
        sound = set(holders) - self._flooders.get(key, set())
        now = asyncio.get_running_loop().time()
        are_complete = found.are_complete(sound)
        self._holder_cache.remember(key, holders, now, are_complete)

    def _note_flooders(self, key: str, found: ReadResult, holders: Iterable[PeerId]) -> None:
        """Remember which of these holders are to be read after the others, until the next lookup."""
        if flooders := set(filter(found.is_flooded_by, holders)):
            self._flooders[key] = self._flooders.get(key, set()) | flooders

    async def _read_at_some(self, key: str, found: ReadResult, quickly: bool) -> bool:
        """Read from one or a majority of the remembered holders; return whether the result is complete."""
        replicas = list(self._holder_cache.recall_complete(key, asyncio.get_running_loop().time()))
        if not replicas:
            return False
        self._rng.shuffle(replicas)
        # this node first, as that takes no request; holders with many records of strangers last, as those cost most
        flooders = self._flooders.get(key, set())
        replicas.sort(key=lambda peer_id: (peer_id in flooders, peer_id != self._own_id))
        first, *others = replicas[: 1 if quickly else len(replicas) // 2 + 1]
        answers = await gathered(
            self._ask(first, key, wants_records=True),
            *(self._ask(peer_id, key, wants_records=False) for peer_id in others),
        )
        if not all(answer is not None and answer.is_responsible for answer in answers):
            self._holder_cache.forget(key)
            return False
        records, *digests = (answer for answer in answers if answer is not None)
        passed = self._merge(found, first, records.records)
        found.note_shown(first, passed)
        passed += await self._read_on(first, key, found, records)
        if not others:
            return True
        digest = digest_of_records(passed)
        differing = [peer_id for peer_id, answer in zip(others, digests, strict=True) if answer.digest != digest]
        await gathered(*(self._read_whole(peer_id, key, found) for peer_id in differing))
        self._note_flooders(key, found, [first, *differing])
        if differing and not found.are_complete([first, *differing]):
            self._holder_cache.forget(key)
            return False
        return True

    async def _read_whole(self, peer_id: PeerId, key: str, found: ReadResult) -> None:
        """Read all pages of one holder."""
        answer = await self._ask(peer_id, key, wants_records=True)
        if answer is not None:
            found.note_shown(peer_id, self._merge(found, peer_id, answer.records))
            await self._read_on(peer_id, key, found, answer)

    async def _read_on(self, peer_id: PeerId, key: str, found: ReadResult, page: FindResponse) -> list[Record]:
        """Read the pages after this one and return the valid records; stop at a page without progress."""
        passed: list[Record] = []
        num_left = self._config.max_records_per_key - len(page.records)
        deadline = asyncio.get_running_loop().time() + PAGES_TIMEOUT_S
        while page.is_more and page.records and num_left > 0 and asyncio.get_running_loop().time() < deadline:
            after = page.records[-1].record.subkey
            answer = await self._ask(peer_id, key, wants_records=True, after=after)
            if answer is None or not answer.records or answer.records[0].record.subkey <= after:
                break
            page = answer
            num_left -= len(page.records)
            more = self._merge(found, peer_id, page.records)
            found.note_shown(peer_id, more)
            passed += more
        return passed

    async def _ask(
        self, peer_id: PeerId, key: str, *, wants_records: bool, after: str | None = None
    ) -> FindResponse | None:
        target = id_to_bytes(key_id(key))
        request = FindRequest(target, key, wants_contacts=False, wants_records=wants_records, after=after)
        if peer_id == self._own_id:
            return self._handlers.answer(peer_id, request)
        return await self._overlay.ask(peer_id, FIND, request)

    def _merge(self, found: ReadResult, source: PeerId, records: list[AgedRecord]) -> list[Record]:
        """Add the records that a peer sent; return the valid ones, and those that exceed the limit of checks."""
        now = asyncio.get_running_loop().time()
        wall_now = self._wall_clock()
        left_out = self._not_checked_now(found, source, records)
        passed: list[Record] = []
        for number, aged in enumerate(records):
            if number in left_out:
                found.keep(aged.record.subkey)
                passed.append(aged.record)  # the holder has it, valid or not
                continue
            reason = found.offer(aged, now, wall_now)
            if reason in PASSED:
                passed.append(aged.record)
            else:
                self._handlers.note(reason, source, aged.record)
        return passed

    def _not_checked_now(self, found: ReadResult, source: PeerId, records: list[AgedRecord]) -> set[int]:
        """Return the numbers of records that exceed the limit of checks for their sender's network, chosen at random.

        The first record of each peer that this node has met is always checked.
        """
        to_check: list[int] = []
        met: set[str] = set()
        for number, aged in enumerate(records):
            record = aged.record
            if not found.is_to_be_checked(record):
                continue
            if self._handlers.has_met(record) and record.owner not in met:
                met.add(record.owner)  # once for each owner: any holder can make up more
            else:
                to_check.append(number)
        num_left = len(to_check)
        while num_left and self._handlers.may_check(source, [records[to_check[0]].record]):
            num_left -= 1
        return set(self._rng.sample(to_check, num_left))
