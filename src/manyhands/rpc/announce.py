"""Chooses the addresses to announce, and interprets those that other peers announce."""

from __future__ import annotations

import functools
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import psutil

from manyhands.base.address import MAX_ADDRESSES, Address, AddressTexts
from manyhands.base.errors import ConfigError, DialFailed
from manyhands.base.identity import PeerId
from manyhands.rpc.method import Method
from manyhands.transport import tcp

LOOKUP_TIMEOUT_S = 10.0


class Announcement(msgspec.Struct, frozen=True):
    """Tells a connected peer the caller's new addresses, as the hello of a connection does."""

    addresses: AddressTexts


class AnnounceResponse(msgspec.Struct, frozen=True):
    """Confirms that the addresses have replaced the old ones."""


ANNOUNCE = Method("rpc.announce", Announcement, AnnounceResponse)

_NAMES = ("dns", "dns4", "dns6")
_EVERYWHERE = [Address("ip4", "0.0.0.0", 1), Address("ip6", "::", 1)]
INTERFACES = Path("/sys/class/net")
"""Where Linux lists the network interfaces."""


def dialable_addresses(bound: Sequence[Address]) -> list[Address]:
    """Return the addresses at which others can dial a peer that listens on ``bound``, the best first.

    "All interfaces" becomes the address of the interface with the default route, those of the other interfaces, and the
    loopback address, so that peers in all networks of this machine and on the machine itself can dial. Of IPv6 this is
    one global address for each interface. Local IPv6 addresses lead nowhere that IPv4 does not, and are for machines
    that have nothing else.
    """
    found = _all_addresses(bound)
    return [address for address in found if address in bound or not _is_superfluous(address, found)]


def _is_superfluous(address: Address, found: Sequence[Address]) -> bool:
    """Whether an address is a local one of IPv6, and another one of this machine leads as far."""
    if address.protocol != "ip6" or address.is_public:
        return False
    others = [other for other in found if other.is_loopback == address.is_loopback]
    return any(other.protocol == "ip4" or other.is_public for other in others)


def _all_addresses(bound: Sequence[Address]) -> list[Address]:
    ranked: list[tuple[bool, int, Address]] = []
    for address in bound:
        hosts = hosts_of_this_machine(address.protocol) if address.is_unspecified else [address.host]
        found = [Address.of(host, address.port) for host in hosts]
        ranked += [(one.is_loopback, rank, one) for rank, one in enumerate(found)]
    return list(dict.fromkeys(one for *_, one in sorted(ranked, key=lambda entry: entry[:2])))


def own_hosts(bound: Sequence[Address]) -> set[str]:
    """Return the IP addresses of a peer that listens on ``bound``; in client mode, those of this machine.

    A loopback address, which every machine has, is included only if the peer listens on nothing else.
    """
    hosts = {address.host for address in _all_addresses(bound or _EVERYWHERE)}
    others = {host for host in hosts if not Address.of(host, 1).is_loopback}
    if others or not bound:
        return others
    return hosts


def check_announced(addresses: Sequence[Address]) -> None:
    """Check that others can dial the addresses to announce.

    Raises:
        ConfigError: an address cannot be dialled.
    """
    for address in addresses:
        if address.is_unspecified or address.port == 0:
            what = "port 0" if address.port == 0 else address.host
            raise ConfigError(
                f"announce={str(address)!r}: other peers cannot dial {what}; give the address that leads to this peer "
                "from outside, such as /ip4/203.0.113.7/tcp/31337 or /dns4/x.tcp.ngrok.io/tcp/12345"
            )


async def check_resolved(addresses: Sequence[Address]) -> None:
    """Check that the names among the addresses to announce resolve on this machine.

    Raises:
        ConfigError: one does not.
    """
    for address in addresses:
        if "ip" in address.protocol:
            continue
        try:
            await tcp.look_up(address, LOOKUP_TIMEOUT_S)
        except DialFailed as failure:
            detail = f" ({failure.detail})" if failure.detail else ""
            raise ConfigError(
                f"announce={address.host_port!r}: the name does not resolve here{detail}, so others could not dial "
                "this peer; check how it is spelt, or announce the IP address"
            ) from failure


def seen_from_outside(peer_id: PeerId, announced: Sequence[str], remote_host: str) -> list[Address]:
    """Return the addresses of a peer, from what it announced and the host that its connection came from.

    A peer behind a router does not know its public address, but the peers that it dials see it. If it announces a
    public address of the same family, or a name, that is used instead. Loopback addresses of a peer on another machine
    are dropped. Unreadable addresses are skipped, as a newer version may announce other kinds.
    """
    return list(_seen_from_outside(peer_id, tuple(announced[:MAX_ADDRESSES]), remote_host))


@functools.lru_cache(maxsize=1024)  # a peer announces the same addresses on each of its connections
def _seen_from_outside(peer_id: PeerId, announced: Sequence[str], remote_host: str) -> Iterable[Address]:
    addresses: list[Address] = []
    for text in announced:
        try:
            addresses.append(Address.parse(text).with_peer(peer_id))
        except ConfigError:
            continue
    if remote_host:
        seen_at = Address.of(remote_host, 1)
        is_guess_wanted = not has_public(addresses, like=seen_at)
        ports = [address.port for address in addresses if address.protocol == seen_at.protocol]
        observed = [Address.of(remote_host, port, peer_id) for port in ports]
        if not seen_at.is_loopback:
            addresses = [address for address in addresses if not address.is_loopback]
        addresses = (observed[:1] if is_guess_wanted else []) + addresses
    return dict.fromkeys(addresses)


def has_public(addresses: Iterable[Address], like: Address) -> bool:
    """Whether there is a public address of the same family as another one, or a name among these addresses."""
    return any(address.is_public and address.protocol in (like.protocol, *_NAMES) for address in addresses)


def hosts_of_this_machine(protocol: str) -> list[str]:
    """Return the IP addresses of this machine, that of the default route first and a loopback address last.

    Args:
        protocol: ``ip4`` or ``ip6``.
    """
    family = socket.AF_INET if protocol == "ip4" else socket.AF_INET6
    loopback = "127.0.0.1" if protocol == "ip4" else "::1"
    source = tcp.source_host(family, lasts=True)
    hosts = [source] if source and not _is_of_one_link(source) else []
    others = [of_one[0] for of_one in _hosts_by_interface(family) if not set(of_one) & set(hosts)]
    return [*hosts, *others, loopback]


def _hosts_by_interface(family: socket.AddressFamily) -> list[list[str]]:
    """Return the addresses of each interface that leads to other machines.

    A bridge is left out: it usually connects containers, and each machine with Docker has the same address there.
    """
    try:
        listed = psutil.net_if_addrs()
        stats = psutil.net_if_stats()
    except OSError:  # not allowed here
        return []
    found = []
    for name, addresses in listed.items():
        hosts = [one.address for one in addresses if one.family == family]
        hosts = [host for host in hosts if not _is_of_one_link(host)]
        is_bridge = (INTERFACES / name / "bridge").exists()
        if hosts and not is_bridge and name in stats and stats[name].isup:
            found.append(hosts)
    return found


def _is_of_one_link(host: str) -> bool:
    ip = ipaddress.ip_address(host)
    return ip.is_loopback or ip.is_link_local
