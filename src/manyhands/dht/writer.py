"""Stores records at the peers nearest to their keys."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from manyhands.base.errors import Refused
from manyhands.base.identity import PeerId
from manyhands.base.text import counted
from manyhands.dht.config import MAX_STORED_RECORDS, DhtConfig
from manyhands.dht.handlers import RequestHandlers
from manyhands.dht.holder_cache import HolderCache
from manyhands.dht.ids import key_id
from manyhands.dht.issuing import Issuer
from manyhands.dht.messages import STORE, StoreOutcome, StoreRequest, StoreResponse
from manyhands.dht.overlay import Overlay
from manyhands.dht.quotas import Membership
from manyhands.dht.records import AgedRecord, Reason, Record, topic_of
from manyhands.runtime.concurrently import gathered

KEYS_AT_ONCE = 8
"""Keys of one bulk call that are looked up concurrently; later lookups use what earlier ones found."""

Outcomes = dict[PeerId, StoreOutcome]

NO_ROOM = (Reason.KEY_FULL.value, Reason.SOURCE_FULL.value)
"""Codes of a holder whose room for strangers is taken."""


class Entry(msgspec.Struct, frozen=True):
    """One value to store; see :meth:`manyhands.dht.DhtNode.store`."""

    key: str
    value: Any
    ttl_s: float
    subkey: str | None = None


class Writer:
    """Writes for one node.

    Args:
        members: by topic, the members of a run by invitation; may be extended later.
    """

    def __init__(
        self,
        own_id: PeerId,
        config: DhtConfig,
        overlay: Overlay,
        holder_cache: HolderCache,
        handlers: RequestHandlers,
        issuer: Issuer,
        members: Mapping[str, Membership],
    ) -> None:
        self._own_id = own_id
        self._config = config
        self._overlay = overlay
        self._holder_cache = holder_cache
        self._handlers = handlers
        self._issuer = issuer
        self._members = members

    async def store(self, entries: Sequence[Entry]) -> list[int]:
        """See :meth:`manyhands.dht.DhtNode.store_many`."""
        records = [self._issue(entry) for entry in entries]
        outcomes = await self._write(records)
        again: dict[int, Record] = {}
        for number, (entry, record) in enumerate(zip(entries, records, strict=True)):
            shown = [outcome.later.record for outcome in outcomes[number].values() if outcome.later is not None]
            above = self._issuer.sequence_to_exceed(record, shown)
            if above is not None:
                again[number] = self._issue(entry, above)
        if again:
            for number, outcome in zip(again, await self._write(list(again.values())), strict=True):
                outcomes[number] = outcome
        for record, of_record in zip(records, outcomes, strict=True):
            _check_taken(record, of_record)
        return [sum(outcome.is_stored for outcome in of_record.values()) for of_record in outcomes]

    async def send(self, peer_id: PeerId, records: Sequence[AgedRecord]) -> StoreResponse | None:
        """Ask a peer, which may be this one, to store records, at most as many as one request carries.

        Returns:
            The outcome of each; None if it does not answer.
        """
        if peer_id == self._own_id:
            return StoreResponse([self._handlers.hold(peer_id, aged) for aged in records])
        response = await self._overlay.ask(peer_id, STORE, StoreRequest(list(records)))
        return response if response is not None and len(response.outcomes) == len(records) else None

    def _issue(self, entry: Entry, above: int = 0) -> Record:
        return self._issuer.issue(
            entry.key, "" if entry.subkey is None else entry.subkey, entry.value, entry.ttl_s, above
        )

    async def _write(self, records: Sequence[Record]) -> list[Outcomes]:
        """Store each record at the peers nearest to its key; return the outcome at each peer that answered."""
        numbers: dict[str, list[int]] = {}
        for number, record in enumerate(records):
            numbers.setdefault(record.key, []).append(number)
        outcomes: list[Outcomes] = [{} for _ in records]

        async def write_next() -> None:
            while keys:
                key = keys.pop()
                of_key = await self._write_key(key, [records[number] for number in numbers[key]])
                for number, outcome in zip(numbers[key], of_key, strict=True):
                    outcomes[number] = outcome

        keys = list(numbers)[::-1]
        await gathered(*(write_next() for _ in range(min(KEYS_AT_ONCE, len(keys)))))
        return outcomes

    async def _write_key(self, key: str, records: Sequence[Record]) -> list[Outcomes]:
        loop = asyncio.get_running_loop()
        config = self._config
        replicas = self._holder_cache.recall(key, loop.time())
        answers = await self._store_at(replicas, records)
        is_done = 0 < len(replicas) == len(answers) and all(its[0].is_responsible for its in answers.values())
        if not is_done:
            contacts = await self._overlay.lookup(key_id(key), config.lookup_timeout_s, config.replicas)
            found = self._holder_cache.among(key, (contact.peer_id for contact in contacts))
            self._holder_cache.remember(key, found, loop.time())
            answers |= await self._store_at([peer_id for peer_id in found if peer_id not in answers], records)
        return [{peer_id: outcomes[number] for peer_id, outcomes in answers.items()} for number in range(len(records))]

    async def _store_at(self, peers: Sequence[PeerId], records: Sequence[Record]) -> dict[PeerId, list[StoreOutcome]]:
        """Store records at each peer; return the outcomes at each that answers."""
        answers = await gathered(*(self._send_all(peer_id, records) for peer_id in peers))
        return {peer_id: outcomes for peer_id, outcomes in zip(peers, answers, strict=True) if outcomes is not None}

    async def _send_all(self, peer_id: PeerId, records: Sequence[Record]) -> list[StoreOutcome] | None:
        outcomes: list[StoreOutcome] = []
        for batch in _batches(records):
            aged = [AgedRecord(record, 0.0) for record in batch]
            response = await self.send(peer_id, aged)
            if response is not None and await self._is_member_now(peer_id, batch[0].key, response):
                response = await self.send(peer_id, aged)
            if response is None:
                return None
            outcomes += response.outcomes
        return outcomes

    async def _is_member_now(self, holder: PeerId, key: str, response: StoreResponse) -> bool:
        """Whether a holder that has no room for strangers has learnt just now that this peer is a member."""
        members = self._members.get(topic_of(key))
        if members is None or not any(outcome.code in NO_ROOM for outcome in response.outcomes):
            return False
        return await members.introduce(holder)


def _batches(records: Iterable[Record]) -> Iterable[list[Record]]:
    remaining = iter(records)
    while batch := list(itertools.islice(remaining, MAX_STORED_RECORDS)):
        yield batch


def _check_taken(record: Record, outcomes: Outcomes) -> None:
    """Check that the holders did not all refuse a record; a stale one counts as replaced by a later one.

    Raises:
        Refused: all of them refused it; names one of them, with its reason.
    """
    if not outcomes:
        return
    if any(outcome.is_stored or outcome.code == Reason.STALE.value for outcome in outcomes.values()):
        return
    peer_id, outcome = next(iter(outcomes.items()))
    what = f"the record {record.key!r}" + (f", {record.subkey!r}" if record.subkey else "")
    who = f"the {counted(len(outcomes), 'peer')} nearest to its key"
    raise Refused(peer_id, outcome.code, f"{who} refused {what}")
