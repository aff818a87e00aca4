"""What the records of a key must look like, as the program that uses the key declares it.

Nodes that know the schema neither hold nor return other records. Nodes that do not, since they belong to another run or
are coordinators only, hold whatever is signed.
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
"""Values up to this size are remembered as decoded: each comes from several holders, and several times."""


@dataclass(frozen=True)
class Schema:
    """The records of one key.

    Attributes:
        value_type: what each value must decode to, a type that msgspec knows; a deleted value always may be there.
        is_owned: whether each must be signed by the peer whose id is its subkey.
        max_ttl_s: the longest life.
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
        """The schema in words."""
        owner = "signed by the peer whose id is the subkey" if self.is_owned else "of any subkey"
        return f"{getattr(self.value_type, '__name__', self.value_type)}, {owner}, for at most {self.max_ttl_s:g} s"

    def fault_of(self, record: Record) -> Reason | None:
        """Why a record, otherwise sound, does not belong under the key; None if it does."""
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
        """A value of this schema. The same small one is decoded once; nobody may change it.

        Raises:
            msgspec.DecodeError: it is none.
        """
        return _decoded(self._decoder, raw) if len(raw) <= REMEMBERED_BYTES else self._decoder.decode(raw)


@functools.lru_cache(maxsize=8192)
def _decoded(decoder: msgspec.msgpack.Decoder[Any], raw: bytes) -> Any:
    return decoder.decode(raw)


def examined_under(schema: Schema | None, record: Record, config: DhtConfig) -> tuple[Record, Reason | None]:
    """As :func:`manyhands.dht.records.examined`, and what the schema of its key says, if there is one."""
    record, fault = examined(record, config)
    return record, schema.fault_of(record) if fault is None and schema is not None else fault
