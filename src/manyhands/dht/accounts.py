"""How much a node holds: in total, and of whom; and which bound one more record would break."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from manyhands.dht.config import DhtConfig
from manyhands.dht.networks import network_of
from manyhands.dht.records import Reason, Record

OPEN_SHARE = 0.5
"""Of a key's room, what records that anybody may have written can take."""

SOURCE_SHARE = 0.75
"""Of a key's room, what can come from one network: key pairs and its addresses cost little, and it must not keep others
out. More than ``OPEN_SHARE``, so that what anybody wrote there leaves room for what its other peers sign."""


@dataclass
class _Usage:
    num_records: int = 0
    num_bytes: int = 0


class Accounts:
    """Records and bytes by scope: in total, of an owner, from a source, of a key; of that also open, and by network."""

    def __init__(self, config: DhtConfig) -> None:
        self._usage: defaultdict[tuple[str, str], _Usage] = defaultdict(_Usage)
        room = (config.max_records_per_key, config.max_bytes_per_key)
        self._bounds = {
            "total": (config.max_records, config.max_bytes, Reason.STORAGE_FULL),
            "key": (*room, Reason.KEY_FULL),
            "open": (*open_room(config), Reason.KEY_FULL),
            "share": (*_room(config, SOURCE_SHARE), Reason.SOURCE_FULL),
            "owner": (config.max_records_per_owner, config.max_bytes_per_owner, Reason.OWNER_FULL),
            "source": (config.max_records_per_source, config.max_bytes_per_source, Reason.SOURCE_FULL),
        }

    @property
    def num_records(self) -> int:
        """Of all records together."""
        return self._usage["total", ""].num_records

    def add(self, record: Record, source: str, sign: int = 1) -> None:
        """Count a record, or with ``sign`` -1 count it no longer."""
        num_bytes = record.num_bytes
        for scope in _scopes_of(record, source):
            usage = self._usage[scope]
            usage.num_records += sign
            usage.num_bytes += sign * num_bytes
            if not usage.num_records:
                del self._usage[scope]

    def bound_broken_by(self, record: Record, source: str) -> Reason | None:
        """Why there is no room for one more record; None if there is."""
        num_bytes = record.num_bytes
        for scope in _scopes_of(record, source):
            usage = self._usage.get(scope, _Usage())
            max_records, max_bytes, reason = self._bounds[scope[0]]
            if usage.num_records + 1 > max_records or usage.num_bytes + num_bytes > max_bytes:
                return reason
        return None


def open_room(config: DhtConfig) -> tuple[int, int]:
    """How many records under one key anybody may have written, and their bytes."""
    return _room(config, OPEN_SHARE)


def _room(config: DhtConfig, share: float) -> tuple[int, int]:
    return max(1, int(config.max_records_per_key * share)), int(config.max_bytes_per_key * share)


def _scopes_of(record: Record, source: str) -> list[tuple[str, str]]:
    """The accounts on which a record counts."""
    scopes = [("total", ""), ("key", record.key), ("owner", record.owner) if record.owner else ("open", record.key)]
    return [*scopes, ("source", source), ("share", f"{_network_of(source)} {record.key}")] if source else scopes


def _network_of(source: str) -> str:
    """The network of a source, which is an IP address or an IPv6 network."""
    return network_of(source.partition("/")[0])
