"""Finds an address at which others can dial a first peer, which has no other peers to ask.

Sources, in this order; all are asked at once, and have ``SOURCE_TIMEOUT_S`` in all:

1. The metadata service of a cloud: a virtual machine has a private address, and a public one leads to it.
2. The router, by UPnP or NAT-PMP: it is also asked to map the port to this machine.
3. An address service on the internet, which sees where this machine's requests come from. Whether the port is open
   there is not known.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial
from typing import Any

from manyhands.reach.nat_pmp import PortMapping, default_gateway

logger = logging.getLogger(__name__)

SOURCE_TIMEOUT_S = 2.0
METADATA = "http://169.254.169.254"
SERVICES = ("https://api.ipify.org", "https://checkip.amazonaws.com")
SSDP = ("239.255.255.250", 1900)
"""The multicast address at which routers with UPnP are searched for."""

MAX_ANSWER = 256
"""Bytes of an answer that are read."""

LEASE_S = 3600
"""Lifetime of a mapping by UPnP; it is renewed after half of it. Some routers take only permanent mappings."""

PERMANENT = 0
MAPPING_NAME = "manyhands"


@dataclass(frozen=True)
class PublicAddress:
    """A public address, and where it comes from.

    Attributes:
        host: an IP address.
        port: the port at which others dial this peer.
        how: the source in words, for the log.
        is_open: whether the port is known to lead here.
        release: deletes the mapping of the port at the router, if there is one; may take a second.
    """

    host: str
    port: int
    how: str
    is_open: bool = True
    release: Callable[[], None] = lambda: None


AddressLookup = Callable[[], PublicAddress | None]


def infer(
    port: int,
    *,
    maps_port: bool = True,
    metadata: str = METADATA,
    services: Sequence[str] = SERVICES,
    multicast_interface: str = "",
    gateway: str | None = None,
) -> PublicAddress | None:
    """Return the best public address that a source knows, within ``SOURCE_TIMEOUT_S``; None if none does.

    Args:
        port: the port that this peer listens on.
        maps_port: ask the router to map it.
        metadata, services: addresses of the clouds' metadata service, and of services on the internet.
        multicast_interface: IP address of the interface on which the router is searched for; by default, any.
        gateway: IP address of the router for NAT-PMP, empty for none; by default, that of the default route.
    """
    sources = _clouds(port, metadata)
    if maps_port:
        sources.append(
            lambda: mapped_by_router(port, multicast_interface, default_gateway() if gateway is None else gateway)
        )
    sources += [partial(_from_service, port, service) for service in services]
    deadline = time.monotonic() + SOURCE_TIMEOUT_S
    waiting = [begun(source, deadline) for source in sources]
    found = [one() for one in waiting]
    known = [one for one in found if one is not None]
    for unused in known[1:]:
        unused.release()
    return known[0] if known else None


def begun(source: AddressLookup, deadline: float) -> AddressLookup:
    """Run a source on a thread of its own; return the function that waits for its answer, until the deadline."""
    answer = Future[PublicAddress | None]()

    def run() -> None:
        found = None
        try:
            found = source()
        except Exception as error:  # noqa: BLE001 (routers and proxies answer in many ways)
            logger.debug("a source of this peer's public address failed: %s", error)
        try:
            answer.set_result(found)
        except InvalidStateError:  # too late
            if found is not None:
                found.release()

    def wait() -> PublicAddress | None:
        try:
            return answer.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeout:
            return None if answer.cancel() else answer.result()

    threading.Thread(target=run, daemon=True, name="public address").start()
    return wait


def _clouds(port: int, metadata: str) -> list[AddressLookup]:
    clouds = {
        "AWS": lambda: _get(f"{metadata}/latest/meta-data/public-ipv4", _aws_headers(metadata)),
        "Google Cloud": lambda: _get(
            f"{metadata}/computeMetadata/v1/instance/network-interfaces/0/access-configs/0/external-ip",
            {"Metadata-Flavor": "Google"},
        ),
        "Azure": lambda: _get(
            f"{metadata}/metadata/instance/network/interface/0/ipv4/ipAddress/0/publicIpAddress"
            "?api-version=2021-02-01&format=text",
            {"Metadata": "true"},
        ),
        "DigitalOcean": lambda: _get(f"{metadata}/metadata/v1/interfaces/public/0/ipv4/address"),
    }  # fmt: skip

    def ask(cloud: str, get: Callable[[], str]) -> PublicAddress | None:
        host = _public(get())
        return PublicAddress(host, port, f"the metadata service of {cloud}") if host else None

    return [partial(ask, cloud, get) for cloud, get in clouds.items()]


def _aws_headers(metadata: str) -> dict[str, str]:
    token = _get(f"{metadata}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    return {"X-aws-ec2-metadata-token": token}


def mapped_by_router(port: int, interface: str = "", gateway: str = "") -> PublicAddress | None:
    """Ask the router to map a port to this machine, by UPnP or NAT-PMP; return the address outside.

    The mapping is renewed until it is released. Takes a few seconds.

    Args:
        interface: IP address of the interface on which routers are searched for; by default the usual one.
        gateway: IPv4 address of the router; empty if unknown.
    Returns:
        None if no router answers, it is behind another router, or the port is mapped to another machine.
    """
    if not speaks_upnp() or not _has_multicast_route(interface):
        return _by_nat_pmp(port, gateway)
    import miniupnpc

    interfaces = {"multicastif": interface} if interface else {}
    router = miniupnpc.UPnP(discoverdelay=round(1000 * SOURCE_TIMEOUT_S / 2), **interfaces)
    if not router.discover():
        return _by_nat_pmp(port, gateway)
    router.selectigd()
    host = _public(router.externalipaddress())
    if not host:  # it is behind another router
        return None
    taken = router.getspecificportmapping(port, "TCP")
    if taken is not None and taken[0] != router.lanaddr:
        logger.warning(
            "The router maps port %d to another machine, %s, not to this peer; choose another port with --listen",
            port,
            taken[0],
        )
        return None
    mapping = _UpnpMapping(router, port)
    return PublicAddress(host, port, "the router, which maps the port to this machine (UPnP)", release=mapping.release)


class _UpnpMapping:
    """A port of a router with UPnP that leads to this machine, renewed until it is released."""

    def __init__(self, router: Any, port: int) -> None:
        self._router = router
        self._port = port
        self._is_over = threading.Event()
        self._turn = threading.Lock()  # the library is not thread-safe
        try:
            self._map(LEASE_S)
        except Exception:  # noqa: BLE001 (error 725: this router takes permanent mappings only)
            self._map(PERMANENT)
        else:
            threading.Thread(target=self._renew, daemon=True, name="port mapping").start()

    def release(self) -> None:
        """Delete the mapping."""
        self._is_over.set()
        try:
            with self._turn:
                self._router.deleteportmapping(self._port, "TCP")
        except Exception as error:  # noqa: BLE001 (the router may be gone)
            logger.debug("the mapping of port %d was not deleted: %s", self._port, error)

    def _renew(self) -> None:
        while not self._is_over.wait(LEASE_S / 2):
            try:
                self._map(LEASE_S)
            except Exception as error:  # noqa: BLE001 (it may restart just now)
                logger.warning("The router did not renew the mapping of port %d: %s; trying again", self._port, error)

    def _map(self, lease_s: int) -> None:
        with self._turn:
            if not self._is_over.is_set():
                own_host = self._router.lanaddr
                self._router.addportmapping(self._port, "TCP", own_host, self._port, MAPPING_NAME, "", lease_s)


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


def speaks_upnp() -> bool:
    """Whether the package of the extra ``upnp`` is installed."""
    return importlib.util.find_spec("miniupnpc") is not None


def _by_nat_pmp(port: int, gateway: str) -> PublicAddress | None:
    if not gateway:
        return None
    mapping = PortMapping(gateway, port)
    if not (host := _public(mapping.host)):
        mapping.release()
        return None
    how = "the router, which maps the port to this machine (NAT-PMP)"
    return PublicAddress(host, mapping.port, how, release=mapping.release)


def _from_service(port: int, service: str) -> PublicAddress | None:
    host = _public(_get(service, proxies=True))
    return PublicAddress(host, port, f"the address service {service}", is_open=False) if host else None


def _get(url: str, headers: dict[str, str] | None = None, *, method: str = "GET", proxies: bool = False) -> str:
    request = urllib.request.Request(url, headers=headers or {}, method=method)
    opener = urllib.request.build_opener(*([] if proxies else [urllib.request.ProxyHandler({})]))
    with opener.open(request, timeout=SOURCE_TIMEOUT_S) as response:
        return str(response.read(MAX_ANSWER).decode("ascii", "replace")).strip()


def _public(text: str) -> str:
    """Return the IP address in a source's answer, if it is a public one; else an empty text."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return ""
    return str(address) if address.is_global else ""
