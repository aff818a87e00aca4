"""Limits on accepted connections, so that one host cannot take all of a listener."""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass

from manyhands.base.address import ip_of
from manyhands.base.errors import ConfigError
from manyhands.base.rate import Buckets

UNKNOWN_MAX_FILES = 1 << 20
"""Assumed limit of open files where the system has none."""


@dataclass(frozen=True, kw_only=True)
class ListenLimits:
    """Limits on accepted connections, control and bulk together.

    Attributes:
        handshake_timeout_s: for the TLS handshake of one connection.
        max_handshakes: concurrent handshakes. Above that, the oldest one that has received nothing is dropped; if all
            have received data, the listener pauses until one has ended.
        max_handshakes_per_host: concurrent handshakes from one IP address. Above that, the oldest one of this address
            that has received nothing is dropped; if all have received data, the new one is closed at once.
        max_streams: open accepted connections. Above that, the listener pauses until one has ended. At most half of the
            files that this process may open, to leave some for other uses.
        max_streams_per_host: open connections from one IP address, or one /64 of IPv6; more are closed at once, as are
            those above a quarter of the files. Many peers may share an address, behind one router.
        max_handshakes_per_s: of one IP address, or one /64, with :data:`~manyhands.base.rate.BURST_S` seconds' worth at
            once; more are closed at once. A handshake takes 0.7 ms of CPU, so one address takes at most 4% of a core.
            This machine's own peers are not limited.
    """

    handshake_timeout_s: float = 5.0
    max_handshakes: int = 512
    max_handshakes_per_host: int = 128
    max_streams: int = 4096
    max_streams_per_host: int = 256
    max_handshakes_per_s: int = 50

    def __post_init__(self) -> None:
        for name in (
            "max_handshakes",
            "max_handshakes_per_host",
            "max_handshakes_per_s",
            "max_streams",
            "max_streams_per_host",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)}: at least 1 is needed, such as {getattr(type(self), name)}"
                )


class Admission:
    """Counts the connections of one listener by host."""

    def __init__(self, limits: ListenLimits, max_files: int | None = None) -> None:
        max_files = max_files if max_files is not None else _max_files()
        self._limits = limits
        self._max_streams = min(limits.max_streams, max_files // 2)
        self._max_streams_per_host = min(limits.max_streams_per_host, max_files // 4)
        self._handshakes: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()
        self._num_streams = 0
        self._rates = Buckets(limits.max_handshakes_per_s)

    @property
    def is_full(self) -> bool:
        """Whether no more handshakes may begin."""
        num_handshakes = sum(self._handshakes.values())
        if num_handshakes >= self._limits.max_handshakes:
            return True
        return num_handshakes + self._num_streams >= self._max_streams

    def is_within_rate(self, host: str, now: float) -> bool:
        """Count a connection, unless its host begins too many handshakes a second; ``now`` is in seconds."""
        return ip_of(host).is_loopback or self._rates.take(source_of(host), now)

    def admit(self, host: str) -> bool:
        """Whether a connection from a host may begin its handshake; if so, it counts until :meth:`left`."""
        host = source_of(host)
        if self._handshakes[host] >= self._limits.max_handshakes_per_host:
            return False
        if self._handshakes[host] + self._streams[host] >= self._max_streams_per_host:
            return False
        self._handshakes[host] += 1
        return True

    def shaken_hands(self, host: str) -> None:
        """Count a connection as open after its handshake."""
        host = source_of(host)
        self._decrement(self._handshakes, host)
        self._streams[host] += 1
        self._num_streams += 1

    def left(self, host: str, *, in_handshake: bool) -> None:
        """Do not count a connection any more, as it has ended."""
        if in_handshake:
            self._decrement(self._handshakes, source_of(host))
            return
        self._decrement(self._streams, source_of(host))
        self._num_streams -= 1

    def _decrement(self, counter: Counter[str], host: str) -> None:
        counter[host] -= 1
        if counter[host] <= 0:
            del counter[host]


def source_of(host: str) -> str:
    """Return the IP address, or the IPv6 network that one customer gets (RFC 6177, section 2)."""
    address = ip_of(host)
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False))


def _max_files() -> int:
    """Return how many files, including sockets, this process may open."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return UNKNOWN_MAX_FILES
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNKNOWN_MAX_FILES if soft == resource.RLIM_INFINITY else soft
