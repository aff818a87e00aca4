"""Rules for dialling addresses that other peers name, so that strangers cannot scan networks through a peer. Pure."""

from __future__ import annotations

import enum
import ipaddress
import math
from collections.abc import Collection
from dataclasses import dataclass

from manyhands.transport.admission import source_of

FIRST_USER_PORT = 1024
"""Lowest port that is dialled in local networks and on this machine: lower ones belong to services such as SSH. On the
internet any port is dialled."""

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


_BLOCKS = [
    ipaddress.ip_network(text)
    for text in ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "::1/128", "fc00::/7")
]
"""Private and loopback networks (RFC 1122, 1918, 6598, 4291, 4193)."""


class _Realm(enum.IntEnum):
    MACHINE = 0
    PRIVATE = 1
    INTERNET = 2


def may_dial(target: str, caller: str) -> bool:
    """Whether to dial an IP address for a caller that is seen at another address.

    The caller's own address is always allowed. Any other must not be nearer to this peer than the caller: a caller on
    the internet cannot make this peer dial into its local network, and a caller on that network cannot make it dial
    this machine. Link-local and other special addresses, where clouds serve credentials, are never allowed.
    """
    target_ip = _ip_of(target)
    caller_ip = _ip_of(caller)
    if target_ip.is_multicast or target_ip.is_unspecified:
        return False
    if target_ip == caller_ip:
        return True
    if target_ip.is_loopback:
        return caller_ip.is_loopback
    if target_ip.is_link_local or target_ip.is_reserved:
        return False
    return _realm_of(target_ip) >= _realm_of(caller_ip)


def may_dial_heard(target: str, port: int, own_hosts: Collection[str], sayer: str = "") -> bool:
    """Whether to dial an IP address and port that a record or another peer names.

    Public addresses are allowed. An address of a local network or of this machine is allowed only if this peer, or the
    peer that announced it, is there too; ports of system services are never allowed there.

    Args:
        own_hosts: IP addresses of this peer, and those at which it reached the peers that its user named; if empty, all
            local networks are allowed.
        sayer: the IP address of the peer that announces the address as its own; empty for hearsay.
    """
    ip = _ip_of(target)
    own_ips = [_ip_of(host) for host in own_hosts]
    if ip.is_multicast or ip.is_unspecified or ip.is_link_local or (ip.is_reserved and not ip.is_loopback):
        return False
    if ip.is_global and ip not in own_ips:
        return True
    if port < FIRST_USER_PORT:
        return False
    if sayer and may_dial(target, sayer):
        return True
    return not own_ips or any(_network_of(ip) == _network_of(own) for own in own_ips)


def _network_of(ip: IpAddress) -> object:
    """Return the private network that a local address is in; for other addresses, the neighbourhood."""
    blocks = (block for block in _BLOCKS if ip in block)
    return next(blocks, ipaddress.ip_network((ip, 24 if ip.version == 4 else 64), strict=False))


def _realm_of(ip: IpAddress) -> _Realm:
    if ip.is_loopback:
        return _Realm.MACHINE
    return _Realm.INTERNET if ip.is_global else _Realm.PRIVATE


def _ip_of(host: str) -> IpAddress:
    ip = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    return ip


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A rate of events: a burst, then one event in each period.

    Attributes:
        burst: events that are allowed at once.
        period_s: seconds until one more is allowed.
    """

    burst: int
    period_s: float


class Allowance:
    """Limits how often something may be done, per source and in total.

    It stores one instant per source: the time until which past events are paid for (the generic cell rate algorithm,
    ITU-T I.371). Sources whose instant has passed are dropped, so ``in_all`` limits their number.
    """

    def __init__(self, per_source: Rate, in_all: Rate) -> None:
        self._per_source = per_source
        self._in_all = in_all
        self._paid_until = -math.inf
        self._paid_until_of: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._paid_until_of)

    def take(self, source: str, now: float) -> float:
        """Count one event, or return how long to wait and count nothing.

        Args:
            now: seconds of a monotonic clock.
        Returns:
            0.0 if it is allowed, else seconds.
        """
        for other, paid_until in list(self._paid_until_of.items()):
            if paid_until <= now:
                del self._paid_until_of[other]
        of_source = max(self._paid_until_of.get(source, now), now)
        of_all = max(self._paid_until, now)
        wait_s = max(_wait_s(of_source, self._per_source, now), _wait_s(of_all, self._in_all, now))
        if wait_s <= 0.0:
            self._paid_until_of[source] = of_source + self._per_source.period_s
            self._paid_until = of_all + self._in_all.period_s
        return max(wait_s, 0.0)

    def give_back(self, source: str) -> None:
        """Undo :meth:`take` for one event."""
        self._paid_until -= self._in_all.period_s
        if source in self._paid_until_of:
            self._paid_until_of[source] -= self._per_source.period_s


PER_HOST = Rate(burst=64, period_s=2.0)
"""Failed dials of addresses that others name, per host: an IP address, or a /64 of IPv6."""

HEARD_IN_ALL = Rate(burst=1024, period_s=0.1)
"""Failed dials of addresses that others name, for all hosts together."""


class HeardDials:
    """Decides for one peer which of the addresses that others name are dialled.

    Args:
        own_hosts: as for :func:`may_dial_heard`; may grow.
    """

    def __init__(self, own_hosts: set[str] | None = None) -> None:
        self.own_hosts: set[str] = set() if own_hosts is None else own_hosts
        self._allowance = Allowance(PER_HOST, HEARD_IN_ALL)

    def refusal(self, host: str, port: int, sayer: str, now: float) -> str:
        """Count a dial; return why it is not allowed, or an empty string.

        Args:
            now: seconds of a monotonic clock.
        """
        if not may_dial_heard(host, port, self.own_hosts, sayer):
            return f"{host}, port {port}, is neither on the internet nor in a network of this peer"
        wait_s = 0.0 if _ip_of(host).is_loopback else self._allowance.take(source_of(host), now)
        if wait_s > 0.0:
            return f"too many failed dials to {host}; next attempt in {wait_s:.0f} s"
        return ""

    def found(self, host: str) -> None:
        """Do not count a dial, as it found the peer."""
        self._allowance.give_back(source_of(host))


def _wait_s(paid_until: float, rate: Rate, now: float) -> float:
    return paid_until - (rate.burst - 1) * rate.period_s - now
