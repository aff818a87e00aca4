"""What a peer dials because others name it: rules that keep strangers from scanning networks through it. Pure."""

from __future__ import annotations

import enum
import ipaddress
import math
from collections.abc import Collection
from dataclasses import dataclass

from manyhands.transport.admission import source_of

FIRST_USER_PORT = 1024
"""Below it are a machine's services, such as SSH; peers listen there on the internet only."""

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


_BLOCKS = [
    ipaddress.ip_network(text)
    for text in ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "::1/128", "fc00::/7")
]
"""Networks without addresses of the internet (RFC 1122, 1918, 6598, 4291, 4193)."""


class _Realm(enum.IntEnum):
    MACHINE = 0
    PRIVATE = 1
    INTERNET = 2


def may_dial(target: str, caller: str) -> bool:
    """Whether to dial one IP address for a caller that is seen at another.

    Its own address always; else nothing that is nearer to this peer than the caller is: nobody on the internet has this
    peer dial into its local network, and nobody on that network has it dial this machine itself. Never what is no
    ordinary host, such as link-local addresses, where clouds serve their secrets.
    """
    target_ip, caller_ip = _ip_of(target), _ip_of(caller)
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
    """Whether to dial an IP address and port that a record, or another peer, names.

    On the internet always. In a local network, or on this machine, only if this peer is there itself, or if the peer is
    there that names its own address; and never a service of the system.

    Args:
        own_hosts: where this peer is: IP addresses of its own, and those at which it has found the peers that its user
            named; if none is known, all local networks count.
        sayer: the IP address of the peer that says so of itself; empty if it is only heard of.
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
    """What a local address is in; of other addresses, the neighbourhood."""
    blocks = (block for block in _BLOCKS if ip in block)
    return next(blocks, ipaddress.ip_network((ip, 24 if ip.version == 4 else 64), strict=False))


def _realm_of(ip: IpAddress) -> _Realm:
    if ip.is_loopback:
        return _Realm.MACHINE
    return _Realm.INTERNET if ip.is_global else _Realm.PRIVATE


def _ip_of(host: str) -> IpAddress:
    ip = ipaddress.ip_address(host.partition("%")[0])
    return ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip


@dataclass(frozen=True, kw_only=True)
class Rate:
    """So many at first, then one in each period.

    Attributes:
        burst: how many may come at once.
        period_s: after how many seconds there is room for one more.
    """

    burst: int
    period_s: float


class Allowance:
    """How often something may be done, for each source and in all.

    Of each it keeps one instant only: until when what was done is paid for (the generic cell rate algorithm, ITU-T
    I.371). Sources whose instant has passed are forgotten, so there are no more of them than ``in_all`` admits.
    """

    def __init__(self, per_source: Rate, in_all: Rate) -> None:
        self._per_source = per_source
        self._in_all = in_all
        self._paid_until = -math.inf
        self._paid_until_of: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._paid_until_of)

    def take(self, source: str, now: float) -> float:
        """Count one more; or count nothing, and say after how many seconds to try again.

        Args:
            now: seconds of a clock that never goes back.
        Returns:
            0.0 if it may be done, else seconds.
        """
        for other, paid_until in list(self._paid_until_of.items()):
            if paid_until <= now:
                del self._paid_until_of[other]
        of_source, of_all = max(self._paid_until_of.get(source, now), now), max(self._paid_until, now)
        wait_s = max(_wait_s(of_source, self._per_source, now), _wait_s(of_all, self._in_all, now))
        if wait_s <= 0.0:
            self._paid_until_of[source] = of_source + self._per_source.period_s
            self._paid_until = of_all + self._in_all.period_s
        return max(wait_s, 0.0)

    def give_back(self, source: str) -> None:
        """Count one less."""
        self._paid_until -= self._in_all.period_s
        if source in self._paid_until_of:
            self._paid_until_of[source] -= self._per_source.period_s


PER_HOST = Rate(burst=64, period_s=2.0)
HEARD_IN_ALL = Rate(burst=1024, period_s=0.1)
"""Dials of addresses that others name, unless the peer is found there; a host is an IP address, or of IPv6 a /64."""


class HeardDials:
    """Decides on the dials of addresses that others name, for the whole peer.

    Attributes:
        own_hosts: as for :func:`may_dial_heard`.
    """

    def __init__(self) -> None:
        self.own_hosts: set[str] = set()
        self._allowance = Allowance(PER_HOST, HEARD_IN_ALL)

    def refusal(self, host: str, port: int, sayer: str, now: float) -> str:
        """Count a dial; why it must not be, or nothing.

        Args:
            now: seconds of a clock that never goes back.
        """
        if not may_dial_heard(host, port, self.own_hosts, sayer):
            return f"{host}, port {port}, is not on the internet, nor where this peer is"
        wait_s = 0.0 if _ip_of(host).is_loopback else self._allowance.take(source_of(host), now)
        if wait_s > 0.0:
            return f"peers were looked for at {host} in vain too often; again in {wait_s:.0f} s"
        return ""

    def found(self, host: str) -> None:
        """The peer was there: this dial does not count."""
        self._allowance.give_back(source_of(host))


def _wait_s(paid_until: float, rate: Rate, now: float) -> float:
    return paid_until - (rate.burst - 1) * rate.period_s - now
