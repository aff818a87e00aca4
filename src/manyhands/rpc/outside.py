"""What other peers see of this one's connections: its public IP address, and whether its router keeps its ports."""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Literal, NamedTuple

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError
from manyhands.base.identity import PeerId

Router = Literal["unknown", "none", "port-preserving", "symmetric"]
Family = Literal["ip4", "ip6"]

MAX_VIEWS = 8
"""Peers whose views are kept: the last ones."""


def _is_public(host: str) -> bool:
    try:
        return Address.of(host, 1).is_public
    except ConfigError:  # a link-local address with the name of its interface
        return False


class View(NamedTuple):
    """What one peer sees of a connection.

    Attributes:
        host: IP address from which it comes.
        is_own: whether that is an address of this machine.
        is_port_kept: whether it comes from the port that this machine chose.
    """

    host: str
    is_own: bool
    is_port_kept: bool

    @property
    def family(self) -> Family:
        return "ip6" if ":" in self.host else "ip4"


class OutsideView:
    """The connections that this peer has dialled, as most of the peers at their other ends see them.

    A router that is *port-preserving* sends a connection on with the port that this machine chose, so another peer can
    be told beforehand where this one will come from. A *symmetric* one takes another port each time. A peer behind a
    tunnel sees the end of the tunnel, and one that lies says what it likes, so the majority counts.

    IPv4 and IPv6 have routers of different kinds: with IPv6 there is usually only a firewall. So a global IPv6 address
    of this machine counts as where its connections come from, even if no peer that it has dialled has IPv6.

    Args:
        public_ip6: returns that address; empty if there is none.
    """

    def __init__(self, public_ip6: Callable[[], str] = lambda: "") -> None:
        self.public_ip6 = public_ip6
        self._views: OrderedDict[PeerId, View] = OrderedDict()

    def note(self, seer: PeerId, seen: tuple[str, int], local: tuple[str, int]) -> bool:
        """Note where another peer has seen a connection, and where it began here; return whether that is news.

        Ignored is what cannot come from elsewhere: a text that is no IP address, or a loopback or special address that
        this machine does not have.
        """
        try:
            ip = ipaddress.ip_address(seen[0])
        except ValueError:
            return False
        is_own = seen[0] == local[0]
        is_special = ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip.is_reserved
        if is_special and not is_own:
            return False
        before = self._summary()
        self._views[seer] = View(seen[0], is_own, seen[1] == local[1])
        self._views.move_to_end(seer)
        if len(self._views) > MAX_VIEWS:
            self._views.popitem(last=False)
        return self._summary() != before

    def forget(self, seer: PeerId) -> bool:
        """Forget what a peer has seen that is no longer connected; return whether that is news.

        This peer may have another address now. The last view is kept, as better than none.
        """
        before = self._summary()
        if len(self._views) > 1:
            self._views.pop(seer, None)
        return self._summary() != before

    def _summary(self) -> tuple[list[str], Router, Router]:
        return self.hosts, self._router_of("ip4"), self._router_of("ip6")

    @property
    def hosts(self) -> list[str]:
        """The IP addresses at which others see this peer: of each family the one that most of them see, IPv6 first."""
        return [*self._seen_with("ip6"), *self._seen_with("ip4")]

    def _seen_with(self, family: Family) -> list[str]:
        seen = Counter(view.host for view in reversed(self._views.values()) if view.family == family)
        # of addresses that as many see, the public one counts (neighbours see one inside), then the one seen last
        return sorted(seen, key=lambda host: (-seen[host], not _is_public(host)))[:1]

    @property
    def router(self) -> Router:
        """What is known of the router between this machine and the others: of that for IPv4, if any sees it there."""
        of_ip4 = self._router_of("ip4")
        return of_ip4 if of_ip4 != "unknown" else self._router_of("ip6")

    def _router_of(self, family: Family) -> Router:
        views = [view for view in self._views.values() if view.family == family]
        if not views:
            return "unknown"
        outside = [view for view in views if not view.is_own]
        if 2 * len(outside) < len(views):
            return "none"
        num_kept = sum(view.is_port_kept for view in outside)
        return "port-preserving" if 2 * num_kept > len(outside) else "symmetric"

    @property
    def known_hosts(self) -> list[str]:
        """The IP addresses from which connections come with the port that this peer chose, IPv6 first."""
        hosts: list[str] = []
        if self._router_of("ip6") != "symmetric":
            hosts += [host for host in (self.public_ip6(), *self._seen_with("ip6")) if host]
        if self._router_of("ip4") in ("none", "port-preserving"):
            hosts += self._seen_with("ip4")
        return list(dict.fromkeys(hosts))

    @property
    def is_known(self) -> bool:
        """Whether this peer knows beforehand where its connections come from, with IPv4 or IPv6."""
        return bool(self.known_hosts)
