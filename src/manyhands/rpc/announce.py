"""Which addresses to tell others, and which of theirs to believe."""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterable, Sequence

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError
from manyhands.base.identity import PeerId

MAX_ANNOUNCED = 8

# documentation addresses (RFC 5737, RFC 3849): "connecting" a UDP socket sends nothing, it only looks up the route
_PROBES = {"ip4": (socket.AF_INET, "192.0.2.1"), "ip6": (socket.AF_INET6, "2001:db8::1")}


def dialable_addresses(bound: Sequence[Address]) -> list[Address]:
    """Where others can dial a peer that listens on ``bound``.

    "All interfaces" becomes the address of the interface that leads outside and the loopback address, so that peers on
    the same machine and on other machines both find it.
    """
    announced: list[Address] = []
    for address in bound:
        hosts = _hosts_of_this_machine(address.protocol) if address.is_unspecified else [address.host]
        announced += [Address.of(host, address.port) for host in hosts]
    return list(dict.fromkeys(announced))


def own_hosts(bound: Sequence[Address]) -> set[str]:
    """The IP addresses of a peer that listens on ``bound``; in client mode, that of the way to the internet.

    Every machine has a loopback address: it counts if the peer listens there alone.
    """
    hosts = {address.host for address in dialable_addresses(bound or [Address("ip4", "0.0.0.0", 1)])}
    return {host for host in hosts if not Address.of(host, 1).is_loopback} or (hosts if bound else set())


def check_announced(addresses: Sequence[Address]) -> None:
    """What others shall dial must be a place that they can dial.

    Raises:
        ConfigError: an address is none.
    """
    for address in addresses:
        if address.is_unspecified or address.port == 0:
            what = "port 0 is no port" if address.port == 0 else f"{address.host} is no host"
            raise ConfigError(
                f"announce={str(address)!r}: {what} that others could dial; give the address that leads to this peer "
                "from outside, such as /ip4/203.0.113.7/tcp/31337 or /dns4/x.tcp.ngrok.io/tcp/12345"
            )


def seen_from_outside(peer_id: PeerId, announced: Sequence[str], remote_host: str) -> list[Address]:
    """The addresses of a peer, from what it announced and the host that its connection came from.

    A peer behind a router does not know its public address; whoever it dials sees it. One that announces a public
    address or a name knows better than this peer. Loopback addresses of a peer that came from another machine are
    dropped. What cannot be read is skipped: a newer version may announce more.
    """
    return list(_seen_from_outside(peer_id, tuple(announced[:MAX_ANNOUNCED]), remote_host))


@functools.lru_cache(maxsize=1024)  # a peer announces the same on each of its connections
def _seen_from_outside(peer_id: PeerId, announced: Sequence[str], remote_host: str) -> Iterable[Address]:
    addresses: list[Address] = []
    for text in announced:
        try:
            addresses.append(Address.parse(text).with_peer(peer_id))
        except ConfigError:
            continue
    if remote_host:
        is_guess_wanted = not any(address.is_public for address in addresses)
        observed = [Address.of(remote_host, address.port, peer_id) for address in addresses if "ip" in address.protocol]
        if not Address.of(remote_host, 1).is_loopback:
            addresses = [address for address in addresses if not address.is_loopback]
        addresses = (observed[:1] if is_guess_wanted else []) + addresses
    return dict.fromkeys(addresses)


def _hosts_of_this_machine(protocol: str) -> list[str]:
    family, probe = _PROBES[protocol]
    loopback = "127.0.0.1" if protocol == "ip4" else "::1"
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((probe, 9))
        except OSError:  # no route outside: only this machine can dial
            return [loopback]
        host: str = sock.getsockname()[0]
    return list(dict.fromkeys([host, loopback]))
