"""The records that one node holds: a dictionary of key and subkey with rules.

Rules:
    * a record replaces the one with the same key and subkey only if it supersedes it;
    * the same record again changes nothing, but the later of the two expiries counts: an age misses the time that the
      record was on its way, never the other way round. So the order of arrival does not matter;
    * each record expires by itself, at an instant of this node's monotonic clock;
    * there is a bound on records and bytes in total, per key and per owner; what would break one is refused.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from manyhands.dht.config import DhtConfig
from manyhands.dht.records import AgedRecord, Reason, Record, digest_of, fault_of, remaining_s


class Held(msgspec.Struct):
    """A record in the storage; ``expires_at`` is an instant of the node's monotonic clock, in seconds."""

    record: Record
    expires_at: float

    def aged(self, now: float) -> AgedRecord:
        """The record as it is sent to others."""
        return AgedRecord(self.record, max(0.0, self.record.ttl_s - (self.expires_at - now)))


@dataclass
class _Usage:
    num_records: int = 0
    num_bytes: int = 0


class Storage:
    """Records by key and subkey; see the rules at the top of this file. ``now`` is always the same monotonic clock."""

    def __init__(self, config: DhtConfig) -> None:
        self._config = config
        self._held: dict[str, dict[str, Held]] = {}
        self._usage: defaultdict[tuple[str, str], _Usage] = defaultdict(_Usage)
        self._digests: dict[str, bytes] = {}  # of the keys that did not change since they were asked for
        self._expiries: list[tuple[float, str, str]] = []  # a heap; entries that no longer match are skipped

    def __len__(self) -> int:
        return sum(len(subkeys) for subkeys in self._held.values())

    def keys(self, now: float) -> list[str]:
        """The keys with at least one record."""
        self.expire(now)
        return list(self._held)

    def get(self, key: str, now: float) -> list[Held]:
        """All records of a key that have not expired, tombstones too."""
        self.expire(now)
        return list(self._held.get(key, {}).values())

    def digest(self, key: str, now: float) -> bytes:
        """:func:`manyhands.dht.records.digest_of` what :meth:`get` returns."""
        self.expire(now)
        if key not in self._held:
            return digest_of([])
        if key not in self._digests:
            self._digests[key] = digest_of(held.record for held in self._held[key].values())
        return self._digests[key]

    def held(self, key: str, subkey: str, now: float) -> Held | None:
        """One record, if it is here and has not expired."""
        self.expire(now)
        return self._held.get(key, {}).get(subkey)

    def offer(self, aged: AgedRecord, now: float, wall_now: float) -> Reason:
        """Check a record that came from another peer, and keep it if it passes.

        Returns:
            What became of it.
        """
        record = aged.record
        held = self.held(record.key, record.subkey, now)
        if held is None or held.record != record:  # else it has been checked already
            fault = fault_of(record, self._config)
            if fault is not None:
                return fault
        remaining = remaining_s(aged, wall_now, self._config)
        return remaining if isinstance(remaining, Reason) else self.put(record, now + remaining, now)

    def put(self, record: Record, expires_at: float, now: float) -> Reason:
        """Keep a record that has been checked, if the rules allow it.

        Returns:
            What became of it.
        """
        held = self.held(record.key, record.subkey, now)
        if expires_at <= now:
            return Reason.EXPIRED
        if held is not None and held.record == record:
            self._write(record, max(expires_at, held.expires_at))
            return Reason.UNCHANGED
        if held is not None and not record.supersedes(held.record):
            return Reason.STALE
        if held is None or not _count_alike(held.record, record):
            refusal = self._broken_bound(record, held.record if held is not None else None)
            if refusal is not None:
                return refusal
            if held is not None:
                self._account(held.record, -1)
            self._account(record, +1)
        self._digests.pop(record.key, None)
        self._write(record, expires_at)
        return Reason.ACCEPTED

    def expire(self, now: float) -> None:
        """Drop the records whose time is over."""
        while self._expiries and self._expiries[0][0] <= now:
            expires_at, key, subkey = heapq.heappop(self._expiries)
            held = self._held.get(key, {}).get(subkey)
            if held is None or held.expires_at != expires_at:  # replaced since
                continue
            self._account(held.record, -1)
            del self._held[key][subkey]
            self._digests.pop(key, None)
            if not self._held[key]:
                del self._held[key]

    def _write(self, record: Record, expires_at: float) -> None:
        self._held.setdefault(record.key, {})[record.subkey] = Held(record, expires_at)
        heapq.heappush(self._expiries, (expires_at, record.key, record.subkey))
        if len(self._expiries) > 2 * self._usage["total", ""].num_records + 64:  # a record that is often renewed
            self._expiries = [(held.expires_at, held.record.key, held.record.subkey) for held in self._all()]
            heapq.heapify(self._expiries)

    def _all(self) -> Iterator[Held]:
        for subkeys in self._held.values():
            yield from subkeys.values()

    def _account(self, record: Record, sign: int) -> None:
        for scope in _scopes_of(record):
            usage = self._usage[scope]
            usage.num_records += sign
            usage.num_bytes += sign * record.num_bytes
            if not usage.num_records:
                del self._usage[scope]

    def _broken_bound(self, record: Record, replaced: Record | None) -> Reason | None:
        config = self._config
        bounds = {
            "total": (config.max_records, config.max_bytes, Reason.STORAGE_FULL),
            "key": (config.max_records_per_key, config.max_bytes_per_key, Reason.KEY_FULL),
            "owner": (config.max_records_per_owner, config.max_bytes_per_owner, Reason.OWNER_FULL),
        }
        more_records = 0 if replaced is not None else 1
        more_bytes = record.num_bytes - (replaced.num_bytes if replaced is not None else 0)
        for scope in _scopes_of(record):
            usage = self._usage.get(scope, _Usage())
            max_records, max_bytes, reason = bounds[scope[0]]
            if usage.num_records + more_records > max_records or usage.num_bytes + more_bytes > max_bytes:
                return reason
        return None


def _count_alike(one: Record, other: Record) -> bool:
    """Whether two records of one key weigh the same on the same accounts."""
    return one.owner == other.owner and one.num_bytes == other.num_bytes


def _scopes_of(record: Record) -> list[tuple[str, str]]:
    """The accounts on which a record counts."""
    scopes = [("total", ""), ("key", record.key)]
    return [*scopes, ("owner", record.owner)] if record.owner else scopes
