"""Stores records at the peers nearest to their keys."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from manyhands.dht.messages import STORE, Nearest, StoreOutcome, StoreRequest, StoreResponse
from manyhands.dht.overlay import Overlay
from manyhands.dht.quotas import Membership
from manyhands.dht.records import AgedRecord, Reason, Record, topic_of
from manyhands.runtime.concurrently import gathered, gathered_within

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


@dataclass
class _Answer:
    """The answer of one peer to the records of a key."""

    outcomes: list[StoreOutcome]
    knows_same: bool

    @property
    def is_responsible(self) -> bool:
        return self.outcomes[0].is_responsible


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

    async def send(
        self, peer_id: PeerId, records: Sequence[AgedRecord], nearest: Nearest | None = None
    ) -> StoreResponse | None:
        """Ask a peer, which may be this one, to store records, at most as many as one request carries.

        Returns:
            The outcome of each; None if it does not answer.
        """
        if peer_id == self._own_id:
            return StoreResponse([self._handlers.hold(peer_id, aged) for aged in records], knows_same=True)
        response = await self._overlay.ask(peer_id, STORE, StoreRequest(list(records), nearest))
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
        if replicas:
            answers = await self._store_at(replicas, records)
            is_done = len(answers) == len(replicas) and all(answer.is_responsible for answer in answers.values())
        else:
            answers, is_done = await self._store_near(key, records)
        if not is_done:
            contacts = await self._overlay.lookup(key_id(key), config.lookup_timeout_s, config.replicas)
            found = self._holder_cache.among(key, (contact.peer_id for contact in contacts))
            self._holder_cache.remember(key, found, loop.time())
            answers |= await self._store_at([peer_id for peer_id in found if peer_id not in answers], records)
        return [
            {peer_id: answer.outcomes[number] for peer_id, answer in answers.items()} for number in range(len(records))
        ]

    async def _store_near(self, key: str, records: Sequence[Record]) -> tuple[dict[PeerId, _Answer], bool]:
        """Store records without a lookup, if this node may know the whole swarm.

        If all of the assumed holders know the same nearest peers, a lookup would find no others.

        Returns:
            The answers that came soon, and whether they are enough.
        """
        config = self._config
        target = key_id(key)
        if len(records) > MAX_STORED_RECORDS or not self._overlay.table.may_hold_all():  # many records take long
            return {}, False
        peers, nearest = self._overlay.nearest_known(target, config.replicas)
        answers = await self._store_at(peers, records, nearest, config.slow_after_s)
        is_done = len(answers) == len(peers) > 1 and all(answer.knows_same for answer in answers.values())
        if is_done:
            self._holder_cache.remember(key, peers, asyncio.get_running_loop().time())
        return answers, is_done

    async def _store_at(
        self,
        peers: Sequence[PeerId],
        records: Sequence[Record],
        nearest: Nearest | None = None,
        timeout_s: float | None = None,
    ) -> dict[PeerId, _Answer]:
        """Store records at each peer; return the answers.

        Args:
            timeout_s: for all peers together; by default each has the timeout of a request.
        """
        sending = (self._send_all(peer_id, records, nearest) for peer_id in peers)
        answers = await (gathered(*sending) if timeout_s is None else gathered_within(timeout_s, *sending))
        return {peer_id: answer for peer_id, answer in zip(peers, answers, strict=True) if answer is not None}

    async def _send_all(self, peer_id: PeerId, records: Sequence[Record], nearest: Nearest | None) -> _Answer | None:
        answer = _Answer([], True)
        for batch in _batches(records):
            aged = [AgedRecord(record, 0.0) for record in batch]
            response = await self.send(peer_id, aged, nearest)
            if response is not None and await self._is_member_now(peer_id, batch[0].key, response):
                response = await self.send(peer_id, aged, nearest)
            if response is None:
                return None
            answer.outcomes += response.outcomes
            answer.knows_same &= response.knows_same
        return answer

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
