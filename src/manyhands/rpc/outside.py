"""What other peers see of this one's connections: its public IP address, and whether its router keeps its ports."""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from typing import Literal, NamedTuple

from manyhands.base.identity import PeerId

Router = Literal["unknown", "none", "port-preserving", "symmetric"]

MAX_VIEWS = 8
"""Peers whose views are kept, the latest ones."""


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


class OutsideView:
    """The connections that this peer has dialled, as most of the peers at their other ends see them.

    A router that is *port-preserving* sends a connection on with the port that this machine chose, so another peer can
    be told beforehand where this one will come from. A *symmetric* one takes another port each time. A peer behind a
    tunnel sees the end of the tunnel, and one that lies says what it likes, so the majority counts.
    """

    def __init__(self) -> None:
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
        before = self.hosts, self.router
        self._views[seer] = View(seen[0], is_own, seen[1] == local[1])
        self._views.move_to_end(seer)
        if len(self._views) > MAX_VIEWS:
            self._views.popitem(last=False)
        return (self.hosts, self.router) != before

    @property
    def hosts(self) -> list[str]:
        """The IP addresses at which others see this peer: of each family the one that most of them see."""
        hosts: list[str] = []
        for is_ip6 in (True, False):
            seen = Counter(view.host for view in self._views.values() if (":" in view.host) is is_ip6)
            hosts += [host for host, _ in seen.most_common(1)]
        return hosts

    @property
    def router(self) -> Router:
        """What is known of the router between this machine and the others."""
        if not self._views:
            return "unknown"
        outside = [view for view in self._views.values() if not view.is_own]
        if 2 * len(outside) < len(self._views):
            return "none"
        num_kept = sum(view.is_port_kept for view in outside)
        return "port-preserving" if 2 * num_kept > len(outside) else "symmetric"

    @property
    def is_known(self) -> bool:
        """Whether this peer knows beforehand where its connections come from."""
        return self.router in ("none", "port-preserving")
