"""Finds an address at which others can dial a first peer: there is nobody yet who could tell it.

Sources, in this order; all are asked at once, and each has ``SOURCE_TIMEOUT_S``:

1. The metadata service of a cloud: a virtual machine has a private address, and a public one leads to it.
2. The router, by UPnP or NAT-PMP: it also maps the port to this machine, which it would not do by itself.
3. An address service on the internet, which sees where this machine's requests come from. Whether the port is open
   there is not known.
"""

from __future__ import annotations

import http.client
import importlib.util
import ipaddress
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manyhands.reach.nat_pmp import PortMapping, default_gateway

logger = logging.getLogger(__name__)

SOURCE_TIMEOUT_S = 2.0
METADATA = "http://169.254.169.254"
SERVICES = ("https://api.ipify.org", "https://checkip.amazonaws.com")
MAX_ANSWER = 256
LEASE_S = 0  # many routers take permanent mappings only; it is deleted when the peer ends
MAPPING_NAME = "manyhands"


@dataclass(frozen=True)
class PublicAddress:
    """A public address, and where it comes from.

    Attributes:
        host: an IP address.
        port: at which others dial this peer.
        how: in words, for the log.
        is_open: whether the port is known to lead here.
        release: undoes what was done at the router; may take a second.
    """

    host: str
    port: int
    how: str
    is_open: bool = True
    release: Callable[[], None] = lambda: None


def infer(
    port: int,
    *,
    maps_port: bool = True,
    asks_service: bool = True,
    metadata: str = METADATA,
    services: Sequence[str] = SERVICES,
    multicast_interface: str = "",
    gateway: str | None = None,
) -> PublicAddress | None:
    """The best public address that a source knows, within about ``SOURCE_TIMEOUT_S``; None if none does.

    Args:
        port: that this peer listens on.
        maps_port: ask the router to map it.
        asks_service: ask services on the internet.
        metadata, services: their addresses.
        multicast_interface: IP address of the interface on which the router is searched for; by default, any.
        gateway: IP address of the router for NAT-PMP, empty for none; by default, that of the default route.
    """
    sources: list[Callable[[], PublicAddress | None]] = [lambda: _from_cloud(port, metadata)]
    if maps_port:
        sources.append(
            lambda: _from_router(port, multicast_interface, default_gateway() if gateway is None else gateway)
        )
    if asks_service:
        sources.append(lambda: _from_service(port, services))
    waiting = [_begun(source) for source in sources]
    found = [one() for one in waiting]  # they run side by side, so this takes as long as the slowest
    known = [one for one in found if one is not None]
    for unused in known[1:]:
        unused.release()
    return known[0] if known else None


def _begun(source: Callable[[], PublicAddress | None]) -> Callable[[], PublicAddress | None]:
    """Run a source on a thread of its own; returns the function that waits for its answer."""
    answers: list[PublicAddress | None] = []
    is_over = threading.Event()

    def run() -> None:
        try:
            answers.append(source())
        except Exception as error:  # noqa: BLE001 (routers and proxies answer in many ways)
            logger.debug("a source of this peer's public address failed: %s", error)
        if is_over.is_set() and answers and answers[0] is not None:
            answers[0].release()  # too late

    thread = threading.Thread(target=run, daemon=True, name="public address")
    thread.start()

    def wait() -> PublicAddress | None:
        thread.join(2 * SOURCE_TIMEOUT_S)  # each step of a source is bounded by itself
        is_over.set()
        return answers[0] if answers else None

    return wait


def _from_cloud(port: int, metadata: str) -> PublicAddress | None:
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

    waiting = [_begun(lambda cloud=cloud, get=get: ask(cloud, get)) for cloud, get in clouds.items()]  # type: ignore[misc]
    return next((found for one in waiting if (found := one()) is not None), None)


def _aws_headers(metadata: str) -> dict[str, str]:
    token = _get(f"{metadata}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    return {"X-aws-ec2-metadata-token": token}


def _from_router(port: int, interface: str, gateway: str) -> PublicAddress | None:
    if importlib.util.find_spec("miniupnpc") is None:
        logger.debug("the router is not asked by UPnP: pip install 'manyhands[upnp]'")
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
        logger.warning("The router maps port %d to another machine, %s; --listen another port", port, taken[0])
        return None
    router.addportmapping(port, "TCP", router.lanaddr, port, MAPPING_NAME, "", LEASE_S)

    def release() -> None:
        try:
            router.deleteportmapping(port, "TCP")
        except Exception as error:  # noqa: BLE001 (the router may be gone)
            logger.debug("the mapping of port %d was not deleted: %s", port, error)

    return PublicAddress(host, port, "the router, which maps the port to this machine (UPnP)", release=release)


def _by_nat_pmp(port: int, gateway: str) -> PublicAddress | None:
    if not gateway:
        return None
    mapping = PortMapping(gateway, port)
    if not (host := _public(mapping.host)):
        mapping.release()
        return None
    how = "the router, which maps the port to this machine (NAT-PMP)"
    return PublicAddress(host, mapping.port, how, release=mapping.release)


def _from_service(port: int, services: Sequence[str]) -> PublicAddress | None:
    for service in services:
        try:
            host = _public(_get(service, proxies=True))
        except (OSError, http.client.HTTPException, ValueError) as error:
            logger.debug("%s does not say this machine's address: %s", service, error)
            continue
        if host:
            return PublicAddress(host, port, f"the address service {service}", is_open=False)
    return None


def _get(url: str, headers: dict[str, str] | None = None, *, method: str = "GET", proxies: bool = False) -> str:
    request = urllib.request.Request(url, headers=headers or {}, method=method)
    opener = urllib.request.build_opener(*([] if proxies else [urllib.request.ProxyHandler({})]))
    with opener.open(request, timeout=SOURCE_TIMEOUT_S) as response:
        return str(response.read(MAX_ANSWER).decode("ascii", "replace")).strip()


def _public(text: str) -> str:
    """The IP address in a source's answer, if it is a public one; else nothing."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return ""
    return str(address) if address.is_global else ""
