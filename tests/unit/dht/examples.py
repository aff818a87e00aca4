"""Peers and records for the tests of the DHT."""

from __future__ import annotations

from typing import Any

from manyhands.base.identity import Identity, PeerId
from manyhands.dht.records import Record, encode_value
from manyhands.dht.routing import Contact

WALL_NOW = 1_800_000_000.0  # seconds since 1970
ALICE = Identity.from_seed(b"a" * 32)
BOB = Identity.from_seed(b"b" * 32)
MALLORY = Identity.from_seed(b"m" * 32)


def contact(number: int) -> Contact:
    """A contact that only routing looks at."""
    return Contact(PeerId(f"peer-{number}"), [f"/ip4/10.0.0.1/tcp/{number + 1}"])


def open_record(value: Any = 1, *, key: str = "key", subkey: str = "", sequence: int = 1, **fields: Any) -> Record:
    """A record that anybody may write."""
    fields = {"issued_at": WALL_NOW, "ttl_s": 60.0, **fields}
    return Record(key=key, subkey=subkey, value=encode_value(value), sequence=sequence, **fields)


def owned_record(value: Any = 1, *, owner: Identity = ALICE, **fields: Any) -> Record:
    """A record that only its owner may write."""
    return open_record(value, subkey=owner.peer_id, **fields).signed_by(owner)
