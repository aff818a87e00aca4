"""Creates records: assigns rising sequence numbers, and signs the records that this peer owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from manyhands.base.errors import ConfigError
from manyhands.base.identity import Identity
from manyhands.dht.config import DhtConfig
from manyhands.dht.records import (
    MAX_KEY_LENGTH,
    MAX_SEQUENCE,
    MAX_SUBKEY_LENGTH,
    Record,
    encode_value,
    fault_of,
    names_peer,
)
from manyhands.dht.schema import Schema


class Issuer:
    """Issues the records of one peer.

    A sequence number is the wall clock in milliseconds, or one more than the last if the clock stands still or jumps
    back. If a holder returns a later record, the new number exceeds it: a peer whose clock was set back before a
    restart, or is behind the clocks of others, can still replace records.
    """

    def __init__(
        self,
        identity: Identity,
        config: DhtConfig,
        wall_clock: Callable[[], float],
        schemas: Mapping[str, Schema] | None = None,
    ) -> None:
        self._identity = identity
        self._schemas = schemas if schemas is not None else {}
        self._config = config
        self._wall_clock = wall_clock
        self._last_sequence = 0

    def issue(self, key: str, subkey: str, value: Any, ttl_s: float, above: int = 0) -> Record:
        """Create a record; it is signed if ``subkey`` is this peer's id.

        Args:
            above: a sequence number to exceed.
        Raises:
            ConfigError: an argument breaks its rule.
        """
        self._check(key, subkey, ttl_s)
        wall_now = float(self._wall_clock())
        self._last_sequence = max(self._last_sequence + 1, int(wall_now * 1000))
        record = Record(
            key=key,
            subkey=subkey,
            value=self._encoded(value),
            sequence=max(self._last_sequence, above + 1),
            issued_at=wall_now,
            ttl_s=float(ttl_s),
        )
        if subkey == self._identity.peer_id:
            # not for unsigned records: anybody could raise their sequence number to the maximum
            self._last_sequence = record.sequence
            record = record.signed_by(self._identity)
        schema = self._schemas.get(key)
        if schema is not None and schema.fault_of(record) is not None:
            raise ConfigError(
                f"the value, its lifetime or its subkey does not match the schema declared for {key!r}: "
                f"{schema.described()}"
            )
        return record

    def sequence_to_exceed(self, record: Record, shown: Iterable[Record]) -> int | None:
        """Return the sequence number above which ``record`` must be issued again.

        Args:
            record: issued just now, but stale at some holder.
            shown: the later records that holders returned.
        Returns:
            None if no later record is valid, or if this object has issued them since.
        """
        return max((later.sequence for later in shown if self._is_obstacle(later, record)), default=None)

    def _is_obstacle(self, later: Record, record: Record) -> bool:
        return (
            (later.key, later.subkey) == (record.key, record.subkey)
            and later.supersedes(record)
            and later.sequence < MAX_SEQUENCE
            and not (record.owner and later.sequence <= self._last_sequence)
            and fault_of(later, self._config) is None
        )

    def _check(self, key: str, subkey: str, ttl_s: float) -> None:
        check_key(key)
        _check_text("subkey", subkey, MAX_SUBKEY_LENGTH)
        if names_peer(subkey) and subkey != self._identity.peer_id:
            raise ConfigError(f"subkey {subkey} is another peer's id; only that peer may write it")
        if not isinstance(ttl_s, (int, float)) or not 0 < ttl_s <= self._config.max_ttl_s:
            raise ConfigError(
                f"ttl_s is {ttl_s!r}; it must be above 0 and at most {self._config.max_ttl_s}, such as 60"
            )

    def _encoded(self, value: Any) -> bytes:
        raw = encode_value(value)
        max_bytes = self._config.max_value_bytes
        if len(raw) > max_bytes:
            raise ConfigError(f"the value has {len(raw)} bytes; at most {max_bytes} fit into a record of the DHT")
        return raw


def check_key(key: str) -> None:
    """Check that ``key`` is a valid key.

    Raises:
        ConfigError: it is empty, too long, or not text.
    """
    if key == "":
        raise ConfigError("the key is empty; a text of 1 to 256 characters is needed, such as my-run.progress")
    _check_text("key", key, MAX_KEY_LENGTH)


def _check_text(what: str, text: str, max_length: int) -> None:
    if not isinstance(text, str):
        raise ConfigError(f"{what} {text!r} is a {type(text).__name__}; it must be a str, such as 'my-run.progress'")
    if len(text) > max_length:
        raise ConfigError(f"{what} {text[:16]!r}… has {len(text)} characters; at most {max_length} fit")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} {text!r} is not text: {error}") from error
