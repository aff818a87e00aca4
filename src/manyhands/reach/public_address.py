"""Finds an address at which others can dial a first peer, which has no other peers to ask.

Sources, in this order; all are asked at once, and have ``SOURCE_TIMEOUT_S`` in all:

1. The metadata service of a cloud: a virtual machine has a private address, and a public one leads to it.
2. The router, by UPnP or NAT-PMP: it is also asked to map the port to this machine.
3. An address service on the internet, which sees where this machine's requests come from. Whether the port is open
   there is not known.
"""

from __future__ import annotations

import logging
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial

from manyhands.base.address import public_host
from manyhands.base.errors import Unavailable
from manyhands.reach.nat_pmp import NatPmpRouter, default_gateway
from manyhands.reach.port_mapping import MappingRouter, OnMoved, PortMapping, UpnpRouter

logger = logging.getLogger(__name__)

SOURCE_TIMEOUT_S = 2.0
METADATA = "http://169.254.169.254"
SERVICES = ("https://api.ipify.org", "https://checkip.amazonaws.com")
MAX_ANSWER = 256
"""Bytes of an answer that are read."""


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
    gateway: Callable[[], str] = default_gateway,
    on_moved: OnMoved = lambda host, port: None,
) -> PublicAddress | None:
    """Return the best public address that a source knows, within ``SOURCE_TIMEOUT_S``; None if none does.

    Args:
        port: the port that this peer listens on.
        maps_port: ask the router to map it.
        metadata, services: addresses of the clouds' metadata service, and of services on the internet.
        multicast_interface: IP address of the interface on which the router is searched for; by default, any.
        gateway: returns the IPv4 address of the router for NAT-PMP; empty for none.
        on_moved: called when the router's mapping leads from another address.
    """
    sources = _clouds(port, metadata)
    if maps_port:
        sources.append(partial(mapped_by_router, port, multicast_interface, gateway, on_moved))
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
        host = public_host(get())
        return PublicAddress(host, port, f"the metadata service of {cloud}") if host else None

    return [partial(ask, cloud, get) for cloud, get in clouds.items()]


def _aws_headers(metadata: str) -> dict[str, str]:
    token = _get(f"{metadata}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    return {"X-aws-ec2-metadata-token": token}


def mapped_by_router(
    port: int,
    interface: str = "",
    gateway: Callable[[], str] = default_gateway,
    on_moved: OnMoved = lambda host, port: None,
) -> PublicAddress | None:
    """Ask the router to map a port to this machine, by UPnP or NAT-PMP; return the address outside.

    The mapping is kept until it is released. Takes a few seconds.

    Args:
        interface: IP address of the interface on which routers are searched for; by default the usual one.
        gateway: returns the IPv4 address of the router for NAT-PMP; empty for none.
        on_moved: called when the mapping leads from another address.
    Returns:
        None if no router answers, it is behind another router, or the port is mapped to another machine.
    """
    upnp = UpnpRouter(port, interface)
    if upnp.is_there():
        if other := upnp.taken_by():
            logger.warning(
                "The router maps port %d to another machine, %s, not to this peer; choose another port with --listen",
                port,
                other,
            )
            return None
        return _mapped(upnp, "UPnP", on_moved)
    return _mapped(NatPmpRouter(gateway, port), "NAT-PMP", on_moved)


def _mapped(router: MappingRouter, how: str, on_moved: OnMoved) -> PublicAddress | None:
    try:
        mapping = PortMapping(router, on_moved)
    except Unavailable as error:
        logger.debug("no port was mapped: %s", error)
        return None
    told = f"the router, which maps the port to this machine ({how})"
    return PublicAddress(mapping.host, mapping.port, told, release=mapping.release)


def _from_service(port: int, service: str) -> PublicAddress | None:
    host = public_host(_get(service, proxies=True))
    return PublicAddress(host, port, f"the address service {service}", is_open=False) if host else None


def _get(url: str, headers: dict[str, str] | None = None, *, method: str = "GET", proxies: bool = False) -> str:
    request = urllib.request.Request(url, headers=headers or {}, method=method)
    opener = urllib.request.build_opener(*([] if proxies else [urllib.request.ProxyHandler({})]))
    with opener.open(request, timeout=SOURCE_TIMEOUT_S) as response:
        return str(response.read(MAX_ANSWER).decode("ascii", "replace")).strip()
