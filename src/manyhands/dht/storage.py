"""The records that one node holds, by key and subkey.

Rules:
    * a record replaces the one with the same key and subkey only if it supersedes it;
    * storing the same record again only extends its expiry: an age may omit time on the network, but never counts too
      much. So the order of arrival does not matter;
    * each record expires at an instant of this node's monotonic clock;
    * records and bytes are limited in total, per key, per owner and per source, which is the machine that sent them;
      a record beyond a limit is refused;
    * a record that does not match the schema declared for its key is refused;
    * in a run whose members are known, the records of other peers get only a small part of each key's capacity.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from manyhands.dht.config import MAX_FOUND_BYTES, MAX_FOUND_RECORDS, DhtConfig
from manyhands.dht.quotas import Membership, Quotas
from manyhands.dht.records import (
    TOMBSTONE,
    AgedRecord,
    Reason,
    Record,
    digest_of_sum,
    number_of,
    remaining_s,
    sum_of,
    topic_of,
)
from manyhands.dht.schema import Schema, examined_under


class Held(msgspec.Struct, gc=False):
    """A record in the storage.

    Attributes:
        expires_at: an instant of the node's monotonic clock, in seconds.
        source: the machine that sent it; empty if it is this one.
        num_bytes: size of the record as counted against the limits.
        is_strangers: the members of the run are known, and the owner was not one of them when this was counted.
    """

    record: Record
    expires_at: float
    source: str = ""
    num_bytes: int = 0
    is_strangers: bool = False
    _fingerprint: bytes = b""

    def fingerprint(self) -> bytes:
        """Return the fingerprint of the record, computed once."""
        if not self._fingerprint:
            self._fingerprint = self.record.fingerprint()
        return self._fingerprint

    def aged(self, now: float) -> AgedRecord:
        """Return the record as it is sent to others."""
        return AgedRecord(self.record, max(0.0, self.record.ttl_s - (self.expires_at - now)))


class Storage:
    """Records by key and subkey; see the rules at the top of this file. ``now`` is always the same monotonic clock.

    Args:
        schemas: by key; may be extended later, with effect on records that arrive then.
        members: by topic, the members of a run; see :meth:`recount`.
    """

    def __init__(
        self,
        config: DhtConfig,
        schemas: Mapping[str, Schema] | None = None,
        members: Mapping[str, Membership] | None = None,
    ) -> None:
        self._config = config
        self._schemas = schemas if schemas is not None else {}
        self._members = members if members is not None else {}
        self._held: dict[str, dict[str, Held]] = {}
        self._quotas = Quotas(config)
        self._in_order: dict[str, list[str]] = {}  # sorted subkeys by key; dropped when one is added or removed
        self._sums: dict[str, int] = {}  # of the fingerprints of a key, from its first digest on
        self._expiries: list[tuple[float, str, str]] = []  # a heap; entries that no longer match are skipped

    def __len__(self) -> int:
        return sum(len(subkeys) for subkeys in self._held.values())

    def keys(self, now: float) -> list[str]:
        """Return the keys with at least one record."""
        self.expire(now)
        return list(self._held)

    def topics(self, kind: str, now: float) -> set[str]:
        """Return the topics with a key ``TOPIC.KIND`` that has a record other than a tombstone."""
        return {
            topic
            for topic, _, key_kind in (key.partition(".") for key in self.keys(now))
            if key_kind == kind
            and any(held.record.value != TOMBSTONE for held in self._held[f"{topic}.{kind}"].values())
        }

    def get(self, key: str, now: float, owners: Collection[str] | None = None) -> list[Held]:
        """Return the records of a key that have not expired, including tombstones; of some owners, or of all."""
        self.expire(now)
        held = self._held.get(key, {})
        return list(held.values()) if owners is None else [held[owner] for owner in held.keys() & set(owners)]

    def page(
        self,
        key: str,
        after: str | None,
        now: float,
        owners: Sequence[str] | None = None,
        most: int | None = None,
    ) -> tuple[list[Held], bool]:
        """Return records of a key in the order of their subkeys, as many as fit into one reply.

        Args:
            after: begin after this subkey.
            owners: only the records of these.
            most: the largest number of records; those after the last one are the first ones. None for as many as fit.
        Returns:
            The records, and whether there are more.
        """
        self.expire(now)
        subkeys = self._held.get(key, {})
        if not subkeys:
            return [], False
        in_order = self._subkeys_in_order(key) if owners is None else sorted(subkeys.keys() & set(owners))
        start = 0 if after is None else bisect.bisect_right(in_order, after)
        num_after = len(in_order) - start
        if most is not None:
            in_order, num_after = in_order[start:] + in_order[:start], len(in_order)
            start = 0
        page = [subkeys[subkey] for subkey in in_order[start : start + (most or MAX_FOUND_RECORDS)]]
        left = MAX_FOUND_BYTES
        for number, held in enumerate(page):
            left -= held.num_bytes
            if left < 0:
                return page[:number], True
        return page, len(page) < num_after

    def _subkeys_in_order(self, key: str) -> list[str]:
        if key not in self._in_order:
            self._in_order[key] = sorted(self._held[key])
        return self._in_order[key]

    def num_held(self, key: str, now: float) -> int:
        """Return the number of records that :meth:`get` returns."""
        self.expire(now)
        return len(self._held.get(key, ()))

    def digest(self, key: str, now: float, owners: Sequence[str] | None = None) -> bytes:
        """Return the digest of what :meth:`get` returns; see :func:`manyhands.dht.records.digest_of_records`.

        Args:
            owners: only of the records of these.
        """
        self.expire(now)
        if key not in self._held:
            return sum_of([])
        if owners is not None:
            held = self._held[key]
            return sum_of(held[owner].fingerprint() for owner in held.keys() & set(owners))
        if key not in self._sums:
            self._sums[key] = sum(number_of(held.fingerprint()) for held in self._held[key].values())
        return digest_of_sum(self._sums[key])

    def held(self, key: str, subkey: str, now: float) -> Held | None:
        """Return one record, if it is held and has not expired."""
        self.expire(now)
        return self._held.get(key, {}).get(subkey)

    def offer(self, aged: AgedRecord, now: float, wall_now: float, source: str = "") -> Reason:
        """Verify a record from another peer, and store it if it is valid.

        Args:
            source: the machine that sent it; empty if unknown.
        Returns:
            Whether it was stored, or why not.
        """
        record = aged.record
        held = self.held(record.key, record.subkey, now)
        if held is None or held.record != record:  # else it was verified before
            record, fault = examined_under(self._schemas.get(record.key), record, self._config)
            if fault is not None:
                return fault
        remaining = remaining_s(aged, wall_now, self._config)
        return remaining if isinstance(remaining, Reason) else self.put(record, now + remaining, now, source)

    def put(self, record: Record, expires_at: float, now: float, source: str = "") -> Reason:
        """Store a verified record, if there is room.

        Returns:
            Whether it was stored, or why not.
        """
        held = self.held(record.key, record.subkey, now)
        if expires_at <= now:
            return Reason.EXPIRED
        if held is not None and held.record == record:
            self._write(held, max(expires_at, held.expires_at))
            return Reason.UNCHANGED
        if held is not None and not record.supersedes(held.record):
            return Reason.STALE
        is_strangers = self._is_strangers(record)
        if held is not None:
            self._count(held, -1)
        refusal = self._quotas.bound_broken_by(record, source, is_strangers=is_strangers)
        if refusal is not None:
            if held is not None:
                self._count(held)
            return refusal
        if held is None:
            self._in_order.pop(record.key, None)
        else:
            self._add_to_sum(held, -1)
        held = Held(record, expires_at, source, record.num_bytes, is_strangers)
        self._count(held)
        self._add_to_sum(held)
        self._write(held, expires_at)
        return Reason.ACCEPTED

    def recount(self, topic: str, now: float) -> None:
        """Count the records of a topic again, as its members have changed; drop those that have no room."""
        for key in [key for key in self.keys(now) if topic_of(key) == topic]:
            for subkey, held in list(self._held[key].items()):
                if self._is_strangers(held.record) != held.is_strangers:
                    self._drop(key, subkey, held)
                    self.put(held.record, held.expires_at, now, held.source)

    def _is_strangers(self, record: Record) -> bool:
        members = self._members.get(topic_of(record.key))
        return members is not None and not (record.owner and members.takes(record))

    def _count(self, held: Held, sign: int = 1) -> None:
        self._quotas.add(held.record, held.source, sign, is_strangers=held.is_strangers)

    def _add_to_sum(self, held: Held, sign: int = 1) -> None:
        key = held.record.key
        if key in self._sums:
            self._sums[key] += sign * number_of(held.fingerprint())

    def recheck(self, key: str) -> None:
        """Drop the records of a key that do not match its newly declared schema."""
        schema = self._schemas[key]
        for subkey, held in list(self._held.get(key, {}).items()):
            if schema.fault_of(held.record) is not None:
                self._drop(key, subkey, held)

    def expire(self, now: float) -> None:
        """Drop expired records."""
        while self._expiries and self._expiries[0][0] <= now:
            expires_at, key, subkey = heapq.heappop(self._expiries)
            held = self._held.get(key, {}).get(subkey)
            if held is None or held.expires_at != expires_at:  # replaced since
                continue
            self._drop(key, subkey, held)

    def _drop(self, key: str, subkey: str, held: Held) -> None:
        self._count(held, -1)
        del self._held[key][subkey]
        self._add_to_sum(held, -1)
        self._in_order.pop(key, None)
        if not self._held[key]:
            del self._held[key]
            self._sums.pop(key, None)

    def _write(self, held: Held, expires_at: float) -> None:
        held.expires_at = expires_at
        record = held.record
        self._held.setdefault(record.key, {})[record.subkey] = held
        heapq.heappush(self._expiries, (expires_at, record.key, record.subkey))
        if len(self._expiries) > 2 * self._quotas.num_records + 64:  # some records are renewed often
            self._expiries = [(held.expires_at, held.record.key, held.record.subkey) for held in self._all()]
            heapq.heapify(self._expiries)

    def _all(self) -> Iterator[Held]:
        for subkeys in self._held.values():
            yield from subkeys.values()
