"""Records: what the DHT keeps, who may write it, and for how long it counts.

A record lives under a key and a subkey. If the subkey is a peer id, the record is *owned*: it counts only with that
peer's signature. Any other subkey, also the empty one, may be written by everybody. A record whose value is None is a
*tombstone*: it hides older ones until its own time is over.

Time: peers' wall clocks may differ by ``max_clock_skew_s`` and nothing may be lost through that. So a record travels
with its *age*, the seconds since it was issued as its holders' monotonic clocks counted them, and expires when the age
reaches ``ttl_s``. Only the signed ``issued_at`` is compared with the wall clock, with the skew allowed for, so that an
old record cannot be played back as a new one.
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
MAX_DEPTH = 32  # lists and dicts within each other; a stranger's value must not exhaust a reader's stack
OVERHEAD_BYTES = 256  # of one record in memory and in a message: field names, numbers, owner, signature
REMEMBERED_VERDICTS = 8192  # verdicts on records: 10 megabytes at most
COMPARED_BYTES = 512  # comparing small records costs less than hashing them
TOMBSTONE = msgspec.msgpack.encode(None)


class Reason(enum.Enum):
    """What became of a record that was offered, and why; the value is its code on the wire."""

    ACCEPTED = "accepted"
    UNCHANGED = "unchanged"  # the same record was here already
    STALE = "stale"  # a later one was here already
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
    OTHER_SCHEMA = "other_schema"  # not what those who use this key have declared

    @property
    def is_stored(self) -> bool:
        """Whether the holder has the record now."""
        return self in (Reason.ACCEPTED, Reason.UNCHANGED)


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One value, as it is signed, stored and sent.

    Attributes:
        key: what is looked up.
        subkey: whose value it is; a peer id makes the record owned.
        value: msgpack.
        sequence: of two records with the same key and subkey the higher one counts.
        issued_at: wall clock of the issuer, seconds since 1970.
        ttl_s: lifetime in seconds, from ``issued_at`` on.
        owner: equal to the subkey if that is a peer id, else empty.
        signature: the owner's, 64 bytes; empty if there is no owner.
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
        """Its size in the accounts of the storage."""
        key, subkey = self.key, self.subkey
        num_bytes = len(key) if key.isascii() else len(key.encode())
        num_bytes += len(subkey) if subkey.isascii() else len(subkey.encode())
        return num_bytes + len(self.value) + OVERHEAD_BYTES

    def supersedes(self, other: Record) -> bool:
        """Whether this record counts rather than ``other``, which has the same key and subkey.

        Two records with one sequence exist when two peers wrote at the same millisecond; then the order of their
        bytes decides, so that all holders and readers agree whatever arrived first.
        """
        if self.sequence != other.sequence:
            return self.sequence > other.sequence
        return self._all_bytes() > other._all_bytes()

    def signed_bytes(self) -> bytes:
        """The canonical encoding of all that the owner vouches for: a msgpack array, floats in 8 bytes."""
        times = (float(self.issued_at), float(self.ttl_s))
        return msgspec.msgpack.encode((self.key, self.subkey, self.value, self.sequence, *times))

    def signed_by(self, identity: Identity) -> Record:
        """A copy, owned and signed."""
        signature = identity.sign(SIGNATURE_DOMAIN, self.signed_bytes())
        return msgspec.structs.replace(self, owner=identity.peer_id, signature=signature)

    def fingerprint(self) -> bytes:
        """SHA-256 of the whole record; each text and number in it has its own place, so no two records share one."""
        return hashlib.sha256(msgspec.msgpack.encode((self.signed_bytes(), self.owner, self.signature))).digest()

    def _all_bytes(self) -> bytes:
        return self.signed_bytes() + self.owner.encode() + self.signature


class AgedRecord(msgspec.Struct, frozen=True, gc=False):
    """A record on its way, with the seconds since it was issued, as its holders counted them."""

    record: Record
    age_s: float


def encode_value(value: Any) -> bytes:
    """Encode what a caller stores.

    Raises:
        ConfigError: msgpack has no form for it, or it is nested too deeply.
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
    """Decode a value; bytes from a stranger are welcome.

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
    """Whether a subkey is a peer id, so that only that peer may write it."""
    try:
        public_key_of(PeerId(subkey))
    except ConfigError:
        return False
    return True


def fault_of(record: Record, config: DhtConfig) -> Reason | None:
    """Check all of a record that does not depend on the time, in the order: size, decoding, signature.

    What depends on the record alone is checked once: the same one comes from each of its holders.

    Returns:
        Why it must not be used, or None.
    """
    return examined(record, config)[1]


def examined(record: Record, config: DhtConfig) -> tuple[Record, Reason | None]:
    """As :func:`fault_of`; also the record as it was seen first, if it is small.

    Whoever keeps that one shares it with all others of this process, and each copy of it is let go at once.
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
"""On the records seen last, by SHA-256 if they are large; each access is atomic, so threads may share it."""


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


def digest_of(records: Iterable[Record]) -> bytes:
    """Tells whether two holders have the same under one key, whatever the order.

    It is the sum of the SHA-256 of each, so that a holder of thousands need not hash them all when one changes. With
    much patience somebody could sign records whose sums are equal; that would hide those from readers, and no others.
    """
    return sum_of(record.fingerprint() for record in records)


def sum_of(fingerprints: Iterable[bytes]) -> bytes:
    """:func:`digest_of` the records with these fingerprints."""
    total: int = sum(int.from_bytes(fingerprint, "big") for fingerprint in fingerprints)
    return (total % (1 << 256)).to_bytes(32, "big")


def remaining_s(aged: AgedRecord, wall_now: float, config: DhtConfig) -> float | Reason:
    """For how many more seconds a record counts, by its age; or why it does not.

    An owned one also ends when its signed lifetime is over by our wall clock, whatever its age is said to be.
    """
    record, age_s = aged.record, aged.age_s
    if age_s != age_s:  # not a number
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
    """What a list, a tuple (as a key, say) or a dict contains."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, (list, tuple)) else []
