"""Reads the records of a key from the peers that hold them.

Work is bounded before it is trusted, here for all keys alike:

* signatures are checked only of the owners that are looked for (:mod:`manyhands.dht.looked_for`);
* what was checked is remembered, valid or not: an equal record is not checked again (:mod:`manyhands.dht.records`);
* for each key, the holders of one network can have a limited number of signatures checked, and bytes of unknown owners
  read (:mod:`manyhands.dht.rate_limit`);
* a holder in a network that cannot afford more is asked only for the records of known owners, which are always read,
  and is asked after the others. The unknown ones of earlier reads count until they expire, and the next read goes on
  where this one ended.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from manyhands.base.identity import PeerId, peer_id_from_public_key
from manyhands.dht.config import DhtConfig
from manyhands.dht.handlers import RequestHandlers
from manyhands.dht.holder_cache import HolderCache
from manyhands.dht.ids import id_to_bytes, key_id
from manyhands.dht.looked_for import LookedFor
from manyhands.dht.messages import FIND, FindRequest, FindResponse
from manyhands.dht.overlay import Overlay
from manyhands.dht.quotas import Membership
from manyhands.dht.read_result import Found, ReadResult
from manyhands.dht.records import AgedRecord, Reason, Record, digest_of_records, topic_of
from manyhands.dht.schema import Schema
from manyhands.dht.storage import Held, Storage
from manyhands.runtime.concurrently import gathered

PASSED = (Reason.ACCEPTED, Reason.UNCHANGED, Reason.STALE)
"""Outcomes for a valid record."""

PAGES_TIMEOUT_S = 30.0
"""Timeout for the pages of one holder after the first: 8 MiB from each of five holders, over 12 Mbit/s."""

REMEMBERED_KEYS = 16
"""Keys whose records are kept after a read, so that the next read need not verify them again."""

REMEMBERED_RECORDS = 16_384
"""Records kept in total; the key that was read longest ago is dropped first."""

MAX_UNKNOWN = 128
"""Owners of one page that are named to :meth:`.Membership.look_up`: random ones, so that strangers do not hide a
newcomer for long."""

MAX_CURSORS = 1024
"""Places where reads were cut off that are remembered."""


class Reader:
    """Reads for one node.

    Args:
        own_id: the node's peer id; its own records are read without a request.
        schemas: by key; may be extended later.
        members: by topic, the members of a run by invitation; may be extended later.
        known: returns the ids of the peers whose records under a key are read and checked in any case.
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
        known: Callable[[str], Collection[str]],
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
        self._known = known
        self._rng = rng
        self._wall_clock = wall_clock
        self._cursors: OrderedDict[tuple[str, PeerId], str] = OrderedDict()  # subkeys, by key and holder
        self._read: OrderedDict[str, dict[str, Found]] = OrderedDict()  # by key and subkey

    async def read(self, key: str, quickly: bool, only: frozenset[str] | None = None) -> ReadResult:
        """See :meth:`manyhands.dht.DhtNode.get`."""
        now = asyncio.get_running_loop().time()
        schema = self._schemas.get(key)
        found = self._begun(key, self._storage.get(key, now, only), only)
        names = found.looked_for.names(self._rng)
        if not await self._read_at_some(key, found, names, quickly):
            found.forget_shown()
            self._note_own_shown(found)
            await self._read_at_all(key, found, names)
        if self._schemas.get(key) is not schema:  # declared meanwhile
            return await self.read(key, quickly, only)
        found.keep_unread(now)
        found.num_shown = found.num_held = len(found.found)
        self._remember(key, found.to_remember(now))
        return found

    async def read_part(self, key: str, most: int) -> ReadResult:
        """See :meth:`manyhands.dht.DhtNode.get_part`."""
        now = asyncio.get_running_loop().time()
        replicas = self._holder_cache.recall_complete(key, now)
        after = peer_id_from_public_key(self._rng.randbytes(32))
        part, _ = self._storage.page(key, after, now, most=most)
        found = self._begun(key, part)
        if self._own_id in replicas:  # no request is needed
            found.num_shown, found.num_held = len(part), self._storage.num_held(key, now)
            return found
        schema, before = self._schemas.get(key), self._read.get(key, {})
        names = found.looked_for.names(self._rng)
        is_read = False
        if replicas:
            holder = self._rng.choice(replicas)
            owners = self._owners_to_ask_for(holder, key, found, names)
            answer = await self._ask(holder, key, wants_records=True, after=after, owners=owners, most=most)
            if is_read := answer is not None and answer.is_responsible:
                self._take_part(found, holder, answer)
            else:
                self._holder_cache.forget(key)
        if not is_read:
            await self._read_at_all(key, found, names, after, most)
        if self._schemas.get(key) is not schema:  # declared meanwhile
            return await self.read_part(key, most)
        found.num_shown = max(found.num_shown, len(found.found))
        found.num_held = max(found.num_held, found.num_shown)
        self._remember(key, {subkey: one for subkey, one in before.items() if one[1] > now} | found.found)
        return found

    def _begun(self, key: str, own: Iterable[Held], only: frozenset[str] | None = None) -> ReadResult:
        """A read that has these records so far, which this node holds itself."""
        looked_for = LookedFor(self._known(key), only, topic_of(key) in self._members)
        found = ReadResult(key, self._config, self._read.get(key), self._schemas.get(key), looked_for)
        counting = (held for held in own if looked_for.counts(held.record))
        found.begin_with({held.record.subkey: (held.record, held.expires_at, held.num_bytes) for held in counting})
        return found

    def _take_part(self, found: ReadResult, source: PeerId, answer: FindResponse) -> None:
        """Add a part of the records that a holder has shown. Holders that have just come may have few."""
        found.note_shown(source, self._merge(found, source, answer.records))
        num_held = max(min(answer.num_held, self._config.max_records_per_key), len(answer.records))
        if num_held > found.num_held:
            found.num_held, found.num_shown = num_held, len(answer.records)

    def forget(self, key: str) -> None:
        """Verify all records of a key again at its next read."""
        self._read.pop(key, None)

    def _remember(self, key: str, found: dict[str, Found]) -> None:
        self._read[key] = found
        self._read.move_to_end(key)
        while len(self._read) > REMEMBERED_KEYS or sum(map(len, self._read.values())) > REMEMBERED_RECORDS:
            self._read.popitem(last=False)

    async def _read_at_all(
        self, key: str, found: ReadResult, names: Sequence[str], after: str | None = None, most: int | None = None
    ) -> None:
        """Look up the holders of the key, and read from all peers asked on the way.

        Args:
            after, most: read only a part from each.
        """
        first_pages: dict[PeerId, FindResponse] = {}
        asked_for: dict[PeerId, Sequence[str] | None] = {}

        def owners(peer_id: PeerId) -> Sequence[str] | None:
            asked_for[peer_id] = self._owners_to_ask_for(peer_id, key, found, names)
            return asked_for[peer_id]

        def take(source: PeerId, response: FindResponse) -> None:
            first_pages[source] = response
            self._take_part(found, source, response)

        config = self._config
        contacts = await self._overlay.lookup(
            key_id(key), config.lookup_timeout_s, config.replicas, key, take, owners=owners, after=after, most=most
        )
        holders = self._holder_cache.among(key, (contact.peer_id for contact in contacts))
        asked = [peer_id for peer_id in holders if peer_id in first_pages]
        if most is None:
            pages = ((peer, first_pages[peer], asked_for[peer]) for peer in asked)
            await gathered(*(self._read_on(peer, key, found, names, page, owners) for peer, page, owners in pages))
        now = asyncio.get_running_loop().time()
        complete = [peer_id for peer_id in holders if found.are_complete([peer_id])]
        self._holder_cache.remember(key, holders, now, complete)

    async def _read_at_some(self, key: str, found: ReadResult, names: Sequence[str], quickly: bool) -> bool:
        """Read from one or a majority of the remembered holders; return whether the result is complete."""
        now = asyncio.get_running_loop().time()
        replicas = list(self._holder_cache.recall_complete(key, now))
        if not replicas:
            return False
        majority = len(self._holder_cache.recall(key, now)) // 2 + 1
        self._rng.shuffle(replicas)
        # this node first, as that takes no request; those last that have shown many records of unknown owners
        is_named_only = {peer_id: self._is_named_only(peer_id, key, found.looked_for) for peer_id in replicas}
        replicas.sort(key=lambda peer_id: (is_named_only[peer_id], peer_id != self._own_id))
        first, *others = replicas[: 1 if quickly else majority]
        compared = names if any(is_named_only[peer_id] for peer_id in (first, *others)) else None
        found.is_partial |= compared is not None and found.looked_for.only is None
        owners = self._owners_to_ask_for(first, key, found, names)
        is_own = first == self._own_id  # its records were added already; the digest of all of them is cached
        answers = await gathered(
            self._ask(first, key, wants_records=not is_own, owners=compared if is_own else owners),
            *(self._ask(peer_id, key, wants_records=False, owners=compared) for peer_id in others),
        )
        if not all(answer is not None and answer.is_responsible for answer in answers):
            self._holder_cache.forget(key)
            return False
        records, *digests = (answer for answer in answers if answer is not None)
        passed: list[Record] = []
        if not is_own:
            passed = self._merge(found, first, records.records)
            found.note_shown(first, passed)
            passed += await self._read_on(first, key, found, names, records, owners)
        if not others:
            return True
        if is_own:
            self._note_own_shown(found)
            digest = records.digest
        else:
            owned_by = None if compared is None else set(compared)
            digest = digest_of_records(record for record in passed if owned_by is None or record.owner in owned_by)
        differing = [peer_id for peer_id, answer in zip(others, digests, strict=True) if answer.digest != digest]
        await gathered(*(self._read_whole(peer_id, key, found, names) for peer_id in differing))
        if differing and not found.are_complete([first, *differing]):
            self._holder_cache.forget(key)
            return False
        return True

    def _note_own_shown(self, found: ReadResult) -> None:
        now = asyncio.get_running_loop().time()
        found.note_shown(
            self._own_id, (held.record for held in self._storage.get(found.key, now, found.looked_for.only))
        )

    async def _read_whole(self, peer_id: PeerId, key: str, found: ReadResult, names: Sequence[str]) -> None:
        """Read all pages of one holder."""
        owners = self._owners_to_ask_for(peer_id, key, found, names)
        answer = await self._ask(peer_id, key, wants_records=True, owners=owners)
        if answer is not None:
            found.note_shown(peer_id, self._merge(found, peer_id, answer.records))
            await self._read_on(peer_id, key, found, names, answer, owners)

    async def _read_on(
        self,
        peer_id: PeerId,
        key: str,
        found: ReadResult,
        names: Sequence[str],
        page: FindResponse,
        owners: Sequence[str] | None,
    ) -> list[Record]:
        """Read the pages after this one and return the valid records.

        It ends at a page without progress, or with records that were not asked for, and when the network of the holder
        cannot afford more; then the records of known owners are read by name.

        Args:
            owners: whose records the page is of; None for all.
        """
        passed: list[Record] = []
        if not page.is_more or not _keeps_to(owners, page):
            return passed
        loop = asyncio.get_running_loop()
        num_left = self._config.max_records_per_key - len(page.records)
        deadline = loop.time() + PAGES_TIMEOUT_S
        after = page.records[-1].record.subkey
        if owners is None and (cursor := self._cursors.pop((key, peer_id), "")) > after:
            after = cursor
            found.is_partial = True
        is_more = True
        while is_more and num_left > 0 and loop.time() < deadline:
            if owners is None and (owners := self._owners_to_ask_for(peer_id, key, found, names)) is not None:
                self._note_cut(key, peer_id, after)
                after = ""
            answer = await self._ask(peer_id, key, wants_records=True, after=after, owners=owners)
            if answer is None or not answer.records or answer.records[0].record.subkey <= after:
                break
            is_more = answer.is_more
            after = answer.records[-1].record.subkey
            num_left -= len(answer.records)
            more = self._merge(found, peer_id, answer.records)
            found.note_shown(peer_id, more)
            passed += more
            if not _keeps_to(owners, answer):
                break
        return passed

    def _note_cut(self, key: str, peer_id: PeerId, after: str) -> None:
        self._cursors[key, peer_id] = after
        if len(self._cursors) > MAX_CURSORS:
            self._cursors.popitem(last=False)

    def _owners_to_ask_for(
        self, peer_id: PeerId, key: str, found: ReadResult, names: Sequence[str]
    ) -> Sequence[str] | None:
        """Return the owners to name to a holder, or None to ask for all records."""
        if not self._is_named_only(peer_id, key, found.looked_for):
            return None
        found.is_partial |= found.looked_for.only is None
        return names

    def _is_named_only(self, peer_id: PeerId, key: str, looked_for: LookedFor) -> bool:
        """Whether only certain owners are looked for, or the network of a holder cannot afford others."""
        if looked_for.only is not None:
            return True
        return peer_id != self._own_id and not self._handlers.may_read(peer_id, key)

    async def _ask(
        self,
        peer_id: PeerId,
        key: str,
        *,
        wants_records: bool,
        after: str | None = None,
        owners: Sequence[str] | None = None,
        most: int | None = None,
    ) -> FindResponse | None:
        target = id_to_bytes(key_id(key))
        named = list(owners) if owners is not None else None
        request = FindRequest(
            target, key, wants_contacts=False, wants_records=wants_records, after=after, owners=named, most=most
        )
        if peer_id == self._own_id:
            return self._handlers.answer(peer_id, request)
        return await self._overlay.ask(peer_id, FIND, request)

    def _merge(self, found: ReadResult, source: PeerId, records: list[AgedRecord]) -> list[Record]:
        """Add the records that a peer sent that count.

        Returns:
            The valid ones, and those that were not checked.
        """
        now = asyncio.get_running_loop().time()
        wall_now = self._wall_clock()
        looked_for = found.looked_for
        if source != self._own_id:
            num_bytes = sum(aged.record.num_bytes for aged in records if not looked_for.is_known(aged.record))
            self._handlers.charge_read(source, found.key, num_bytes)
        wanted = [aged for aged in records if looked_for.counts(aged.record)]
        if looked_for.only is None and len(wanted) < len(records):
            unknown = {aged.record.owner for aged in records if not looked_for.counts(aged.record)} - {""}
            found.unknown.update(map(PeerId, self._rng.sample(sorted(unknown), min(len(unknown), MAX_UNKNOWN))))
        left_out = self._not_checked_now(found, source, wanted)
        # the holder has those that do not count, valid or not: they are part of its digest
        passed = [aged.record for aged in records if not looked_for.counts(aged.record)]
        for number, aged in enumerate(wanted):
            if number in left_out:
                found.keep(aged.record.subkey)
                passed.append(aged.record)  # likewise
                continue
            reason = found.offer(aged, now, wall_now)
            if reason in PASSED:
                passed.append(aged.record)
            else:
                self._handlers.note(reason, source, aged.record)
        return passed

    def _not_checked_now(self, found: ReadResult, source: PeerId, records: list[AgedRecord]) -> set[int]:
        """Return the numbers of records that exceed the limit of checks for their sender's network, chosen at random.

        The first record of each known owner is always checked.
        """
        to_check: list[int] = []
        known: set[str] = set()
        for number, aged in enumerate(records):
            record = aged.record
            if not found.is_to_be_checked(record):
                continue
            if found.looked_for.is_known(record) and record.owner not in known:
                known.add(record.owner)  # once for each owner: any holder can make up more
            else:
                to_check.append(number)
        num_left = len(to_check)
        while num_left and self._handlers.may_check(source, [records[to_check[0]].record]):
            num_left -= 1
        return set(self._rng.sample(to_check, num_left))


def _keeps_to(owners: Sequence[str] | None, page: FindResponse) -> bool:
    """Whether a page has records, and none but those that were asked for."""
    return bool(page.records) and (owners is None or {aged.record.owner for aged in page.records} <= set(owners))
