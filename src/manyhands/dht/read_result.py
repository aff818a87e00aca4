"""Collects the records that the holders of one key return, and keeps the latest valid record of each subkey.

The rules are those of :mod:`manyhands.dht.storage`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from manyhands.base.identity import PeerId
from manyhands.dht.config import DhtConfig
from manyhands.dht.quotas import Membership, open_room, strangers_room
from manyhands.dht.records import TOMBSTONE, AgedRecord, Reason, Record, remaining_s
from manyhands.dht.schema import Schema, examined_under

Found = tuple[Record, float, int]
"""A record, its expiry time, and its size as counted against the limits."""

COMPLETE_SHARE = 0.9
"""The share of all records of a key that a holder must have returned to count as complete."""


class StoredValue(msgspec.Struct, frozen=True, gc=False):
    """A value that a reader gets.

    Attributes:
        raw: the value, in msgpack.
        sequence: higher for later values of the same subkey.
        remaining_s: seconds until it expires.
        owner: the peer whose signature was verified; empty for an unsigned record.
    """

    raw: bytes
    sequence: int
    remaining_s: float
    owner: str

    @property
    def value(self) -> Any:
        """The value, decoded on each access, with lists in place of tuples."""
        return msgspec.msgpack.decode(self.raw)


class ReadResult:
    """The records of one key that one reader has found. ``now`` is always the same monotonic clock.

    Attributes:
        found: the accepted records by subkey.

    Args:
        checked: records that the last read of the key accepted; they are not verified again.
        schema: the declared schema of the key.
        members: the members of the run, if they are known.
    """

    def __init__(
        self,
        key: str,
        config: DhtConfig,
        checked: Mapping[str, Found] | None = None,
        schema: Schema | None = None,
        members: Membership | None = None,
    ) -> None:
        self._key = key
        self._schema = schema
        self._config = config
        self._checked = checked or {}
        self.found: dict[str, Found] = {}
        self._members = members
        self._num_shown: Counter[PeerId] = Counter()
        self._strangers_bytes: Counter[PeerId] = Counter()
        self._num_bytes = 0
        self._num_open = 0  # unsigned records
        self._open_bytes = 0
        self._open_room = open_room(config)

    def add(self, record: Record, expires_at: float, num_bytes: int | None = None) -> Reason:
        """Add a verified record if it is the latest of its subkey.

        Args:
            num_bytes: its size as counted against the limits, if known.
        """
        size = record.num_bytes if num_bytes is None else num_bytes
        before = self.found.get(record.subkey)
        more_records = 1
        more_bytes = size
        if before is not None:
            if before[0] is record or before[0] == record:
                if expires_at > before[1]:
                    self.found[record.subkey] = (record, expires_at, size)
                return Reason.UNCHANGED
            if not record.supersedes(before[0]):
                return Reason.STALE
            more_records = 0
            more_bytes = size - before[2]
        if len(self.found) + more_records > self._config.max_records_per_key:
            return Reason.KEY_FULL
        if self._num_bytes + more_bytes > self._config.max_bytes_per_key:
            return Reason.KEY_FULL
        if not record.owner:  # an earlier record of the same subkey had no owner either
            max_records, max_bytes = self._open_room
            if self._num_open + more_records > max_records or self._open_bytes + more_bytes > max_bytes:
                return Reason.KEY_FULL
            self._num_open += more_records
            self._open_bytes += more_bytes
        self._num_bytes += more_bytes
        self.found[record.subkey] = (record, expires_at, size)
        return Reason.ACCEPTED

    def offer(self, aged: AgedRecord, now: float, wall_now: float) -> Reason:
        """Verify a record that a holder returned, and add it if it is valid.

        Returns:
            Whether it was added, or why not.
        """
        record = aged.record
        num_bytes = None
        known = self._checked.get(record.subkey) or self.found.get(record.subkey)
        if known is not None and known[0] == record:
            record, _, num_bytes = known
        else:
            if record.key != self._key:
                return Reason.MALFORMED
            record, fault = examined_under(self._schema, record, self._config)
            if fault is not None:
                return fault
        remaining = remaining_s(aged, wall_now, self._config)
        return remaining if isinstance(remaining, Reason) else self.add(record, now + remaining, num_bytes)

    def is_to_be_checked(self, record: Record) -> bool:
        """Whether :meth:`offer` has to check the signature of this record."""
        known = (self._checked.get(record.subkey), self.found.get(record.subkey))
        return bool(record.owner) and all(one is None or one[0] != record for one in known)

    def keep(self, subkey: str) -> None:
        """Add the record that the last read of the key accepted, because a later one was not checked."""
        if subkey in self._checked:
            self.add(*self._checked[subkey])

    def note_shown(self, source: PeerId, records: Iterable[Record]) -> None:
        """Count further valid records from a holder."""
        for record in records:
            if self._is_strangers(record):
                self._strangers_bytes[source] += record.num_bytes
            else:
                self._num_shown[source] += 1

    def forget_shown(self) -> None:
        """Reset the counts of all holders."""
        self._num_shown.clear()
        self._strangers_bytes.clear()

    def are_complete(self, holders: Iterable[PeerId]) -> bool:
        """Whether each of these holders has returned most of all records; it may be about to receive the rest.

        Where members are known, the records of all others do not count.
        """
        num = sum(not self._is_strangers(record) for record, _, _ in self.found.values())
        return all(self._num_shown[holder] >= COMPLETE_SHARE * num for holder in holders)

    def is_flooded_by(self, holder: PeerId) -> bool:
        """Whether a holder has returned more records of strangers than members hold."""
        return self._strangers_bytes[holder] > strangers_room(self._config)[1]

    def _is_strangers(self, record: Record) -> bool:
        if self._members is None:
            return False
        return not record.owner or not self._members.is_member(PeerId(record.owner))

    def values(self, now: float) -> dict[str, StoredValue]:
        """Return the live values by subkey, without deleted ones."""
        return {
            subkey: StoredValue(record.value, record.sequence, expires_at - now, record.owner)
            for subkey, (record, expires_at, _) in self.found.items()
            if expires_at > now and record.value != TOMBSTONE
        }
