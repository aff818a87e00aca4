"""Keeps a port of the router mapped to this machine, by UPnP or NAT-PMP.

A router that restarts forgets its mappings, and often has another public address then: many homes get a new one each
night. So the router is asked for the mapping again each minute, and a new address is told.
"""

from __future__ import annotations

import importlib.util
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any, Protocol

from manyhands.base.address import public_host
from manyhands.base.errors import Unavailable

logger = logging.getLogger(__name__)

RENEW_S = 60.0
"""Seconds between two requests for a mapping; half of its lifetime if that is less."""

LEASE_S = 3600
"""Lifetime of a mapping by UPnP. Some routers take only permanent mappings."""

DISCOVERY_S = 1.0
SSDP = ("239.255.255.250", 1900)
"""The multicast address at which routers with UPnP are searched for."""

PERMANENT = 0
MAPPING_NAME = "manyhands"

OnMoved = Callable[[str, int], None]
"""Called with the router's public IP address and the port there, when one of them has changed."""


class MappingRouter(Protocol):
    """A router that maps one port to this machine; called by one thread at a time.

    Attributes:
        lifetime_s: of the mapping, in seconds; infinite for a permanent one.
    """

    lifetime_s: float

    def map(self) -> tuple[str, int]:
        """Ask for the mapping, or renew it; return the public IP address, and the port there.

        Raises:
            Exception: the router does not answer or refuses, or its own address is private.
        """
        ...

    def unmap(self) -> None:
        """Delete the mapping.

        Raises:
            Exception: the router does not answer or refuses.
        """
        ...


class PortMapping:
    """A port of a router that leads to this machine until it is released, as long as this process lives.

    Args:
        router: is asked at once.
        on_moved: called on a thread of its own.

    Attributes:
        host, port: the router's public IP address, and the port there.
    Raises:
        Exception: what ``router.map`` raises.
    """

    def __init__(self, router: MappingRouter, on_moved: OnMoved = lambda host, port: None) -> None:
        self._router = router
        self._on_moved = on_moved
        self._is_over = threading.Event()
        self._turn = threading.Lock()
        self.host, self.port = router.map()
        threading.Thread(target=self._keep, daemon=True, name="port mapping").start()

    def release(self) -> None:
        """Delete the mapping; takes a few seconds at most."""
        self._is_over.set()
        try:
            with self._turn:
                self._router.unmap()
        except Exception as error:  # noqa: BLE001 (routers answer in many ways, and this one may be gone)
            logger.debug("the mapping of port %d was not deleted: %s", self.port, error)

    def _keep(self) -> None:
        has_failed = False
        while not self._is_over.wait(min(RENEW_S, self._router.lifetime_s / 2)):
            try:
                with self._turn:
                    if self._is_over.is_set():
                        return
                    host, port = self._router.map()
            except Exception as error:  # noqa: BLE001 (it may restart just now)
                if not has_failed:
                    logger.warning(
                        "The router did not renew the mapping of port %d: %s. Without it, others cannot dial this "
                        "peer; asking again each minute",
                        self.port,
                        error,
                    )
                has_failed = True
                continue
            has_failed = False
            if (host, port) != (self.host, self.port):
                self.host, self.port = host, port
                self._on_moved(host, port)


class UpnpRouter:
    """A router with UPnP.

    Args:
        port: the port that this machine listens on; it is mapped to the same port.
        interface: IP address of the interface on which the router is searched for; by default the usual one.
    """

    def __init__(self, port: int, interface: str = "") -> None:
        self.lifetime_s: float = LEASE_S
        self._port = port
        self._interface = interface
        self._found: Any = None

    def is_there(self) -> bool:
        """Whether a router answers; takes a second."""
        if not speaks_upnp() or not _has_multicast_route(self._interface):
            return False
        import miniupnpc

        interfaces = {"multicastif": self._interface} if self._interface else {}
        router = miniupnpc.UPnP(discoverdelay=round(1000 * DISCOVERY_S), **interfaces)
        if not router.discover():
            return False
        router.selectigd()
        self._found = router
        return True

    def taken_by(self) -> str:
        """The IP address of another machine to which the port is mapped; empty if there is none."""
        mapped_to = self._mapped_to()
        return "" if mapped_to == self._found.lanaddr else mapped_to

    def map(self) -> tuple[str, int]:
        if self._found is None and not self.is_there():
            raise Unavailable("no router answers UPnP")
        try:
            return self._mapped()
        except Exception:
            self._found = None  # after its restart it may answer elsewhere
            raise

    def unmap(self) -> None:
        if self._found is not None:
            self._found.deleteportmapping(self._port, "TCP")

    def _mapped(self) -> tuple[str, int]:
        host = public_host(self._found.externalipaddress())
        if not host:
            raise Unavailable("the router has no public address: it is offline, or behind another router")
        if self.lifetime_s == LEASE_S:
            try:
                self._add(LEASE_S)
            except Exception:  # noqa: BLE001 (error 725: this router takes permanent mappings only)
                self._add(PERMANENT)
                self.lifetime_s = float("inf")
        elif self._mapped_to() != self._found.lanaddr:
            self._add(PERMANENT)
        return host, self._port

    def _add(self, lease_s: int) -> None:
        own_host = self._found.lanaddr
        self._found.addportmapping(self._port, "TCP", own_host, self._port, MAPPING_NAME, "", lease_s)

    def _mapped_to(self) -> str:
        entry = self._found.getspecificportmapping(self._port, "TCP")
        return "" if entry is None else str(entry[0])


def speaks_upnp() -> bool:
    """Whether the package of the extra ``upnp`` is installed."""
    return importlib.util.find_spec("miniupnpc") is not None


def _has_multicast_route(interface: str) -> bool:
    """Whether routers can be searched for; without a route the library of UPnP prints an error for each try."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            if interface:
                asking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(interface))
            asking.connect(SSDP)  # sends nothing
        except OSError:
            return False
    return True
