"""Rules for dialling addresses that other peers name, so that strangers cannot scan networks through a peer. Pure."""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Collection

from manyhands.base.address import IpAddress, ip_of
from manyhands.base.rate import Buckets, SharedBuckets
from manyhands.transport.admission import source_of

FIRST_USER_PORT = 1024
"""Lowest port that is dialled in local networks and on this machine: lower ones belong to services such as SSH. On the
internet any port is dialled."""

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
    target_ip = ip_of(target)
    caller_ip = ip_of(caller)
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
    ip = ip_of(target)
    own_ips = [ip_of(host) for host in own_hosts]
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


HEARD_PER_S_OF_HOST, HEARD_BURST_OF_HOST = 0.5, 64
"""Failed dials a second, and at once, of addresses that others name, for each host: an IP address, or a /64 of IPv6."""

HEARD_PER_S, HEARD_BURST = 10.0, 1024
"""The same for all hosts together."""


class HeardDials:
    """Decides for one peer which of the addresses that others name are dialled.

    Args:
        own_hosts: as for :func:`may_dial_heard`; may grow.
    """

    def __init__(self, own_hosts: set[str] | None = None) -> None:
        self.own_hosts: set[str] = set() if own_hosts is None else own_hosts
        self._dials = SharedBuckets(
            Buckets(HEARD_PER_S_OF_HOST, HEARD_BURST_OF_HOST), Buckets(HEARD_PER_S, HEARD_BURST)
        )

    def refusal(self, host: str, port: int, sayer: str, now: float) -> str:
        """Count a dial; return why it is not allowed, or an empty string.

        Args:
            now: seconds of a monotonic clock.
        """
        if not may_dial_heard(host, port, self.own_hosts, sayer):
            return f"{host}, port {port}, is neither on the internet nor in a network of this peer"
        if ip_of(host).is_loopback:
            return ""
        if not self._dials.take(source_of(host), now):
            return f"too many dials to {host}, or to all that others name, have failed; it is tried again later"
        return ""

    def found(self, host: str) -> None:
        """Do not count a dial, as it found the peer."""
        if not ip_of(host).is_loopback:
            self._dials.give_back(source_of(host))
