"""Counts the records that a node holds, in total and by owner, source and key, against the limits of the config."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Set
from dataclasses import dataclass
from typing import Protocol

from manyhands.base.identity import PeerId
from manyhands.dht.config import DhtConfig
from manyhands.dht.networks import network_of
from manyhands.dht.records import Reason, Record

OPEN_SHARE = 0.5
"""The share of a key's capacity that unsigned records may take."""

SOURCE_SHARE = 0.75
"""The share of a key's capacity that records from one network may take: keys and addresses there cost an attacker
little. Above ``OPEN_SHARE``, so that unsigned records of a network leave capacity for the signed ones of its peers."""

STRANGERS_SHARE = 1 / 64
"""The share of a key's capacity that records of peers which are not members may take, in a run whose members are known.
Each read of the key costs that much more. It is enough for the newcomers of a few seconds."""


class Membership(Protocol):
    """Tells which peers are members of a run by invitation."""

    def known(self) -> Collection[str]:
        """Return the ids of the peers that are known to be members."""

    async def look_up(self, peer_ids: Set[PeerId]) -> bool:
        """Find out whether these peers are members; return whether one of them is now known to be."""

    async def introduce(self, holder: PeerId) -> bool:
        """Show a holder that this peer is a member; return whether that was done."""

    def takes(self, record: Record) -> bool:
        """Whether a signed record that is to be held here is a member's. The record itself may prove the membership."""


@dataclass
class _Usage:
    num_records: int = 0
    num_bytes: int = 0


class Quotas:
    """Counts records and their bytes: in total, by owner, source, key, and key and network.

    Unsigned records of a key, and records of peers that are not members, are also counted by themselves.
    """

    def __init__(self, config: DhtConfig) -> None:
        self._usage: defaultdict[tuple[str, str], _Usage] = defaultdict(_Usage)
        room = (config.max_records_per_key, config.max_bytes_per_key)
        self._bounds = {
            "total": (config.max_records, config.max_bytes, Reason.STORAGE_FULL),
            "key": (*room, Reason.KEY_FULL),
            "open": (*open_room(config), Reason.KEY_FULL),
            "share": (*_room(config, SOURCE_SHARE), Reason.SOURCE_FULL),
            "strangers": (*_room(config, STRANGERS_SHARE), Reason.KEY_FULL),
            "strangers' share": (*_room(config, STRANGERS_SHARE * SOURCE_SHARE), Reason.SOURCE_FULL),
            "owner": (config.max_records_per_owner, config.max_bytes_per_owner, Reason.OWNER_FULL),
            "source": (config.max_records_per_source, config.max_bytes_per_source, Reason.SOURCE_FULL),
        }

    @property
    def num_records(self) -> int:
        """Records held in total."""
        return self._usage["total", ""].num_records

    def add(self, record: Record, source: str, sign: int = 1, *, is_strangers: bool = False) -> None:
        """Add a record to the counts; ``sign=-1`` removes it."""
        num_bytes = record.num_bytes
        for scope in _scopes_of(record, source, is_strangers):
            usage = self._usage[scope]
            usage.num_records += sign
            usage.num_bytes += sign * num_bytes
            if not usage.num_records:
                del self._usage[scope]

    def bound_broken_by(self, record: Record, source: str, *, is_strangers: bool = False) -> Reason | None:
        """Return the limit that one more record would break, or None."""
        num_bytes = record.num_bytes
        for scope in _scopes_of(record, source, is_strangers):
            usage = self._usage.get(scope, _Usage())
            max_records, max_bytes, reason = self._bounds[scope[0]]
            if usage.num_records + 1 > max_records or usage.num_bytes + num_bytes > max_bytes:
                return reason
        return None


def open_room(config: DhtConfig) -> tuple[int, int]:
    """Return how many unsigned records one key may hold, and how many bytes of them."""
    return _room(config, OPEN_SHARE)


def _room(config: DhtConfig, share: float) -> tuple[int, int]:
    return max(1, int(config.max_records_per_key * share)), int(config.max_bytes_per_key * share)


def _scopes_of(record: Record, source: str, is_strangers: bool) -> list[tuple[str, str]]:
    """Return the scopes that a record counts in."""
    key = record.key
    scopes = [("total", ""), ("key", key), ("owner", record.owner) if record.owner else ("open", key)]
    if is_strangers:
        scopes.append(("strangers", key))
    if source:
        in_network = f"{_network_of(source)} {key}"
        scopes += [("source", source), ("strangers' share" if is_strangers else "share", in_network)]
    return scopes


def _network_of(source: str) -> str:
    """Return the network of a source, which is an IP address or an IPv6 network."""
    return network_of(source.partition("/")[0])
