"""Records of the DHT: format, ownership, signatures and lifetime.

A record is stored under a key and a subkey. If the subkey is a peer id, the record is *owned*: it is valid only with
that peer's signature. Any peer may write records with other subkeys, including the empty one. A record whose value is
None is a *tombstone*: it hides older ones until it expires.

Time: no record may be lost because the wall clocks of peers differ by up to ``max_clock_skew_s``. So a record is sent
with its *age*, the seconds since it was issued as measured by its holders' monotonic clocks, and expires when the age
reaches ``ttl_s``. Only the signed ``issued_at`` is compared with the wall clock, allowing for the skew, to prevent the
replay of old records.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from manyhands.base.errors import BadSignature, ConfigError
from manyhands.base.identity import Identity, PeerId, public_key_of, verify
from manyhands.dht.config import MAX_VALUE_BYTES, DhtConfig

SIGNATURE_DOMAIN = "dht-record"
MAX_KEY_LENGTH = 256
MAX_SUBKEY_LENGTH = 128
MAX_SEQUENCE = 2**62
MAX_DEPTH = 32  # nested lists and dicts; a value from a stranger must not exhaust the stack of a reader
OVERHEAD_BYTES = 256  # of one record in memory and in a message: field names, numbers, owner, signature
REMEMBERED_VERDICTS = 8192  # cached verification results: 10 megabytes at most
COMPARED_BYTES = 512  # values up to this size are compared, which costs less than hashing them
TOMBSTONE = msgspec.msgpack.encode(None)


class Reason(enum.Enum):
    """The outcome of offering a record; the value is its code on the wire."""

    ACCEPTED = "accepted"
    UNCHANGED = "unchanged"  # the holder has the same record
    STALE = "stale"  # the holder has a later one
    TOO_LARGE = "too_large"
    MALFORMED = "malformed"  # the value is not msgpack, a number is not finite, or the lifetime is out of bounds
    WRONG_OWNER = "wrong_owner"
    BAD_SIGNATURE = "bad_signature"
    FROM_THE_FUTURE = "from_the_future"
    EXPIRED = "expired"
    KEY_FULL = "key_full"
    OWNER_FULL = "owner_full"
    SOURCE_FULL = "source_full"
    STORAGE_FULL = "storage_full"
    OTHER_SCHEMA = "other_schema"  # does not match the schema declared for the key

    @property
    def is_stored(self) -> bool:
        """Whether the holder has the record now."""
        return self in (Reason.ACCEPTED, Reason.UNCHANGED)


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One value, as it is signed, stored and sent.

    Attributes:
        key: the key to look up.
        subkey: distinguishes the values of a key; a peer id makes the record owned.
        value: msgpack.
        sequence: of two records with the same key and subkey the higher one wins.
        issued_at: wall clock of the issuer, seconds since 1970.
        ttl_s: lifetime in seconds, from ``issued_at`` on.
        owner: equal to the subkey if that is a peer id, else empty.
        signature: the owner's, 64 bytes; empty without an owner.
    """

    key: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_KEY_LENGTH)]
    subkey: Annotated[str, msgspec.Meta(max_length=MAX_SUBKEY_LENGTH)]
    value: Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)]
    sequence: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)]
    issued_at: float
    ttl_s: float
    owner: Annotated[str, msgspec.Meta(max_length=64)] = ""
    signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""

    @property
    def num_bytes(self) -> int:
        """Its size as counted against the limits of the storage."""
        key = self.key
        subkey = self.subkey
        num_bytes = len(key) if key.isascii() else len(key.encode())
        num_bytes += len(subkey) if subkey.isascii() else len(subkey.encode())
        return num_bytes + len(self.value) + OVERHEAD_BYTES

    def supersedes(self, other: Record) -> bool:
        """Whether this record replaces ``other``, which has the same key and subkey.

        Two peers that write in the same millisecond use the same sequence; the order of the bytes then decides, so that
        all holders and readers agree whatever arrived first.
        """
        if self.sequence != other.sequence:
            return self.sequence > other.sequence
        return self._all_bytes() > other._all_bytes()

    def signed_bytes(self) -> bytes:
        """Return the signed content in its canonical encoding: a msgpack array, floats in 8 bytes."""
        times = (float(self.issued_at), float(self.ttl_s))
        return msgspec.msgpack.encode((self.key, self.subkey, self.value, self.sequence, *times))

    def signed_by(self, identity: Identity) -> Record:
        """Return an owned and signed copy."""
        signature = identity.sign(SIGNATURE_DOMAIN, self.signed_bytes())
        return msgspec.structs.replace(self, owner=identity.peer_id, signature=signature)

    def fingerprint(self) -> bytes:
        """Return the SHA-256 of the whole record, over an encoding that separates all fields."""
        return hashlib.sha256(msgspec.msgpack.encode((self.signed_bytes(), self.owner, self.signature))).digest()

    def _all_bytes(self) -> bytes:
        return self.signed_bytes() + self.owner.encode() + self.signature


class AgedRecord(msgspec.Struct, frozen=True, gc=False):
    """A record as sent, with the seconds since it was issued as its holders measured them."""

    record: Record
    age_s: float


def topic_of(key: str) -> str:
    """Return the part of a key before its first ``.``: the run of the records."""
    return key.partition(".")[0]


def encode_value(value: Any) -> bytes:
    """Encode a value for storage.

    Raises:
        ConfigError: msgpack cannot encode it, or it is nested too deeply.
    """
    try:
        raw = msgspec.msgpack.encode(value)
        decode_value(raw)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"cannot store a {type(value).__name__}: {error}; store None, bool, int, float, str, bytes, or lists and "
            "dicts of them"
        ) from error
    return raw


def decode_value(raw: bytes) -> Any:
    """Decode a value; safe for bytes from strangers.

    Raises:
        ValueError: they are not msgpack, or nested too deeply.
    """
    try:
        value = msgspec.msgpack.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
        raise ValueError(f"not msgpack: {error}") from error
    if _is_deeper_than(value, MAX_DEPTH):
        raise ValueError(f"more than {MAX_DEPTH} lists and dicts within each other")
    return value


def names_peer(subkey: str) -> bool:
    """Whether a subkey is a peer id, so that only that peer may write the record."""
    try:
        public_key_of(PeerId(subkey))
    except ConfigError:
        return False
    return True


def fault_of(record: Record, config: DhtConfig) -> Reason | None:
    """Check everything about a record that does not depend on the time, in the order: size, encoding, signature.

    The result is cached, since each holder sends the same record.

    Returns:
        Why it is invalid, or None.
    """
    return examined(record, config)[1]


def examined(record: Record, config: DhtConfig) -> tuple[Record, Reason | None]:
    """Like :func:`fault_of`, but also return the first equal instance of a small record.

    A caller that keeps this instance shares it within the process, and its copies are freed.
    """
    if len(record.value) > config.max_value_bytes:
        return record, Reason.TOO_LARGE
    if not math.isfinite(record.issued_at) or not 0 < record.ttl_s <= config.max_ttl_s:
        return record, Reason.MALFORMED
    is_small = len(record.value) <= COMPARED_BYTES
    known_by = record if is_small else record.fingerprint()
    verdict = _verdicts.get(known_by)
    if verdict is None:
        verdict = _verdicts[known_by] = (record if is_small else None, _own_fault_of(record))
        if len(_verdicts) > REMEMBERED_VERDICTS:
            _verdicts.popitem(last=False)
    return verdict[0] or record, verdict[1]


_verdicts: OrderedDict[Record | bytes, tuple[Record | None, Reason | None]] = OrderedDict()
"""Results of the last checks, by record, or by SHA-256 if it is large. Access is atomic: threads may share them."""


def _own_fault_of(record: Record) -> Reason | None:
    try:
        decode_value(record.value)
    except ValueError:
        return Reason.MALFORMED
    if not names_peer(record.subkey):
        return Reason.WRONG_OWNER if record.owner or record.signature else None
    if record.owner != record.subkey:
        return Reason.WRONG_OWNER
    try:
        verify(PeerId(record.owner), SIGNATURE_DOMAIN, record.signed_bytes(), record.signature)
    except BadSignature:
        return Reason.BAD_SIGNATURE
    return None


def digest_of_records(records: Iterable[Record]) -> bytes:
    """Return a digest that shows whether two holders have the same records of one key, in any order.

    It is the sum of their SHA-256 hashes, so that a holder of thousands need not hash them all when one changes. An
    owner could, at great expense, sign records with equal sums; this would hide only those records from readers.
    """
    return sum_of(record.fingerprint() for record in records)


def sum_of(fingerprints: Iterable[bytes]) -> bytes:
    """Combine the fingerprints of records into the digest that :func:`digest_of_records` returns."""
    return digest_of_sum(sum(map(number_of, fingerprints)))


def number_of(fingerprint: bytes) -> int:
    """Return a fingerprint as a number, to be added up."""
    return int.from_bytes(fingerprint, "big")


def digest_of_sum(total: int) -> bytes:
    """Return the digest for a sum of the numbers of fingerprints."""
    return (total % (1 << 256)).to_bytes(32, "big")


def remaining_s(aged: AgedRecord, wall_now: float, config: DhtConfig) -> float | Reason:
    """Return the remaining lifetime of a record by its age, or why it is invalid.

    An owned record also expires when its signed lifetime is over by this node's wall clock, whatever its age.
    """
    record = aged.record
    age_s = aged.age_s
    if math.isnan(age_s):
        return Reason.MALFORMED
    remaining = record.ttl_s - age_s if age_s > 0 else record.ttl_s
    if record.owner:
        if record.issued_at > wall_now + config.max_clock_skew_s:
            return Reason.FROM_THE_FUTURE
        remaining_by_clock = record.issued_at + record.ttl_s + config.max_clock_skew_s - wall_now
        if remaining_by_clock < remaining:
            remaining = remaining_by_clock
    return remaining if remaining > 0 else Reason.EXPIRED


def _is_deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [child for container in level for child in _children(container)]
        if not level:
            return False
    return True


def _children(value: Any) -> list[Any]:
    """Return the items of a list, tuple (which may be a key) or dict."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, (list, tuple)) else []
