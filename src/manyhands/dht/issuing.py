"""Making records: sequence numbers that only rise, and signatures where a record is owned."""

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

    A sequence number is the wall clock in milliseconds, or one more than the last if the clock stands or jumps back.
    If a holder shows a later record, its number can be exceeded: so a peer whose clock was set back before it
    restarted still replaces its own records, and a peer whose clock is behind those of others.
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
        """A new record; signed if ``subkey`` is this peer's id.

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
            # not for open records: anybody could set their sequence to the end
            self._last_sequence = record.sequence
            record = record.signed_by(self._identity)
        schema = self._schemas.get(key)
        if schema is not None and schema.fault_of(record) is not None:
            raise ConfigError(
                f"the value, its lifetime or its subkey is not as was declared for {key!r}: {schema.described()}"
            )
        return record

    def sequence_to_exceed(self, record: Record, shown: Iterable[Record]) -> int | None:
        """The sequence number above which ``record`` must be issued again.

        Args:
            record: issued just now, but stale for some holder.
            shown: the later records that the holders say they have.
        Returns:
            None if none of these counts: they are forged, or were issued by this very object since.
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
        raw, max_bytes = encode_value(value), self._config.max_value_bytes
        if len(raw) > max_bytes:
            raise ConfigError(f"the value has {len(raw)} bytes; at most {max_bytes} fit into a record of the DHT")
        return raw


def check_key(key: str) -> None:
    """Make sure that ``key`` can be one.

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
