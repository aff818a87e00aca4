"""Collects the records that the holders of one key return, and keeps the latest valid record of each subkey.

The rules are those of :mod:`manyhands.dht.storage`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from manyhands.base.identity import PeerId
from manyhands.dht.config import DhtConfig
from manyhands.dht.looked_for import LookedFor
from manyhands.dht.quotas import open_room
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


class Part(NamedTuple):
    """Some of the records of a key.

    Attributes:
        values: the live values by subkey, as :meth:`manyhands.dht.DhtNode.get` returns them.
        num_shown: number of records that were read, with deleted and invalid ones.
        num_held: number of records that there are, as one holder says.
    """

    values: dict[str, StoredValue]
    num_shown: int
    num_held: int


class ReadResult:
    """The records of one key that one reader has found. ``now`` is always the same monotonic clock.

    Attributes:
        key: the key.
        found: the accepted records by subkey.
        unknown: owners whose records were not checked, as only those of members count.
        is_partial: some records were not read, as the network of their holder could not afford them.
        num_shown: number of records that were read, with those that do not count; set at the end of a read.
        num_held: number of records that there are. It is higher only after a read of a part.

    Args:
        checked: records that the last read of the key accepted; they are not verified again.
        schema: the declared schema of the key.
        looked_for: the owners whose records are wanted.
    """

    def __init__(
        self,
        key: str,
        config: DhtConfig,
        checked: Mapping[str, Found] | None = None,
        schema: Schema | None = None,
        looked_for: LookedFor | None = None,
    ) -> None:
        self.key = key
        self._schema = schema
        self._config = config
        self._checked = checked or {}
        self.found: dict[str, Found] = {}
        self.unknown: set[PeerId] = set()
        self.is_partial = False
        self.num_shown = self.num_held = 0
        self.looked_for = looked_for or LookedFor()
        self._num_shown: Counter[PeerId] = Counter()
        self._num_known_shown: Counter[PeerId] = Counter()
        self._num_bytes = 0
        self._num_open = 0  # unsigned records
        self._open_bytes = 0
        self._open_room = open_room(config)

    def begin_with(self, found: dict[str, Found]) -> None:
        """Begin with the records that this node holds: they have kept to the same limits."""
        self.found = found
        self._num_bytes = sum(size for _, _, size in found.values())
        of_nobody = [size for record, _, size in found.values() if not record.owner]
        self._num_open, self._open_bytes = len(of_nobody), sum(of_nobody)

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
        if not self.looked_for.is_known(record):  # others leave room for the known ones, however many they are
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
            if record.key != self.key:
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

    def keep_unread(self, now: float) -> None:
        """If some records were not read, add those that the last read accepted."""
        if self.is_partial:
            for record, expires_at, num_bytes in self._checked.values():
                if expires_at > now and record.subkey not in self.found and self.looked_for.counts(record):
                    self.add(record, expires_at, num_bytes)

    def to_remember(self, now: float) -> dict[str, Found]:
        """Return the records that the next read of the key need not check: those found, and those not looked for."""
        others = {
            subkey: one for subkey, one in self._checked.items() if one[1] > now and not self.looked_for.counts(one[0])
        }
        return others | self.found

    def note_shown(self, source: PeerId, records: Iterable[Record]) -> None:
        """Count further valid records from a holder."""
        counted = [record for record in records if self.looked_for.counts(record)]
        self._num_shown[source] += len(counted)
        self._num_known_shown[source] += sum(map(self.looked_for.is_known, counted))

    def forget_shown(self) -> None:
        """Reset the counts of all holders."""
        self._num_shown.clear()
        self._num_known_shown.clear()

    def are_complete(self, holders: Iterable[PeerId]) -> bool:
        """Whether each of these holders has returned most of all records; it may be about to receive the rest.

        If there are records of known owners, only these count: a stranger can show any number that others do not hold.
        """
        num, shown = len(self.found), self._num_shown
        num_known = sum(self.looked_for.is_known(record) for record, _, _ in self.found.values())
        if num_known or self.is_partial:
            num, shown = num_known, self._num_known_shown
        return all(shown[holder] >= COMPLETE_SHARE * num for holder in holders)

    def values(self, now: float) -> dict[str, StoredValue]:
        """Return the live values by subkey, without deleted ones."""
        return {
            subkey: StoredValue(record.value, record.sequence, expires_at - now, record.owner)
            for subkey, (record, expires_at, _) in self.found.items()
            if expires_at > now and record.value != TOMBSTONE
        }
