"""Schemas for the records of a key, declared by the program that uses the key.

Nodes that know the schema neither hold nor return other records. Nodes that do not know it, as they belong to another
run or are only coordinators, hold any signed record.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import msgspec

from manyhands.base.structs import make_ready
from manyhands.dht.config import DhtConfig
from manyhands.dht.records import TOMBSTONE, Reason, Record, examined

REMEMBERED_BYTES = 512
"""Values up to this size are cached as decoded: each arrives from several holders, several times."""


@dataclass(frozen=True)
class Schema:
    """The schema of the records of one key.

    Attributes:
        value_type: the type that each value must decode to, as known to msgspec; tombstones are always allowed.
        is_owned: whether each must be signed by the peer whose id is its subkey.
        max_ttl_s: the longest lifetime.
    """

    value_type: Any
    is_owned: bool
    max_ttl_s: float

    def __post_init__(self) -> None:
        make_ready(self.value_type)

    @functools.cached_property
    def _decoder(self) -> msgspec.msgpack.Decoder[Any]:
        return msgspec.msgpack.Decoder(self.value_type)

    def described(self) -> str:
        """Describe the schema for an error message."""
        owner = "signed by the peer whose id is the subkey" if self.is_owned else "of any subkey"
        return f"{getattr(self.value_type, '__name__', self.value_type)}, {owner}, for at most {self.max_ttl_s:g} s"

    def fault_of(self, record: Record) -> Reason | None:
        """Return why a valid record does not match the schema, or None."""
        if record.ttl_s > self.max_ttl_s or (self.is_owned and not record.owner):
            return Reason.OTHER_SCHEMA
        value = record.value
        if value == TOMBSTONE:
            return None
        try:
            self.decode(value)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return Reason.OTHER_SCHEMA
        return None

    def decode(self, raw: bytes) -> Any:
        """Decode a value of this schema; small results are cached and must not be changed.

        Raises:
            msgspec.DecodeError: the value does not match.
        """
        return _decoded(self._decoder, raw) if len(raw) <= REMEMBERED_BYTES else self._decoder.decode(raw)


@functools.lru_cache(maxsize=8192)
def _decoded(decoder: msgspec.msgpack.Decoder[Any], raw: bytes) -> Any:
    return decoder.decode(raw)


def examined_under(schema: Schema | None, record: Record, config: DhtConfig) -> tuple[Record, Reason | None]:
    """Like :func:`manyhands.dht.records.examined`, and check the schema of the key, if there is one."""
    record, fault = examined(record, config)
    return record, schema.fault_of(record) if fault is None and schema is not None else fault
