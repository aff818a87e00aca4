"""Whom a peer dials because another asked for it: rules that keep strangers from scanning networks through it."""

from __future__ import annotations

import enum
import ipaddress
import math
from dataclasses import dataclass

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


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


def _wait_s(paid_until: float, rate: Rate, now: float) -> float:
    return paid_until - (rate.burst - 1) * rate.period_s - now
