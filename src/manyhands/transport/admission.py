"""Who may connect: limits that keep one host from taking all of a listener."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from manyhands.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ListenLimits:
    """Limits on accepted connections, control and bulk together.

    Attributes:
        handshake_timeout_s: for the TLS handshake of one connection.
        max_handshakes: that are under way at once; above it nothing is accepted until one has ended.
        max_handshakes_per_host: that come from one IP address; more are closed at once.
        max_streams_per_host: open connections from one IP address; more are closed at once. Many peers may share an
            address, behind one router.
    """

    handshake_timeout_s: float = 5.0
    max_handshakes: int = 128
    max_handshakes_per_host: int = 64
    max_streams_per_host: int = 1024

    def __post_init__(self) -> None:
        for name in ("max_handshakes", "max_handshakes_per_host", "max_streams_per_host"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: at least 1 is needed")


class Admission:
    """Counts the connections of one listener by host."""

    def __init__(self, limits: ListenLimits) -> None:
        self._limits = limits
        self._handshakes: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()

    @property
    def is_full(self) -> bool:
        """Whether no more handshakes may begin."""
        return self._handshakes.total() >= self._limits.max_handshakes

    def admit(self, host: str) -> bool:
        """Whether a connection from a host may begin its handshake; if so, it counts until :meth:`left`."""
        if self._handshakes[host] >= self._limits.max_handshakes_per_host:
            return False
        if self._handshakes[host] + self._streams[host] >= self._limits.max_streams_per_host:
            return False
        self._handshakes[host] += 1
        return True

    def shaken_hands(self, host: str) -> None:
        """The handshake of one connection has succeeded."""
        self._decrement(self._handshakes, host)
        self._streams[host] += 1

    def left(self, host: str, *, in_handshake: bool) -> None:
        """One connection has ended."""
        self._decrement(self._handshakes if in_handshake else self._streams, host)

    def _decrement(self, counter: Counter[str], host: str) -> None:
        counter[host] -= 1
        if counter[host] <= 0:
            del counter[host]
