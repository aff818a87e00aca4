"""Addresses of peers, as multiaddrs: ``/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…``.

``HOST:PORT`` and ``[IPV6]:PORT`` are accepted too, as in older tutorials; such an address has no peer id and is trusted
on first use. Only the part of the multiaddr grammar that can be dialled is supported: one host, TCP, and an optional
peer id. Listen addresses have further short forms (:meth:`Address.parse_listen`).
Source: multiformats/multiaddr.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from manyhands.base.errors import ConfigError
from manyhands.base.identity import PeerId, public_key_of

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_ADDRESSES = 8
"""Addresses of one peer that are kept, and sent to others."""
MAX_ADDRESS_LENGTH = 400
"""Characters of an address in a message: a host name of 253, a port and a peer id fit."""
AddressText = Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_LENGTH)]
AddressTexts = Annotated[list[AddressText], msgspec.Meta(max_length=MAX_ADDRESSES)]

_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")
_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,15}")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)")
_EXAMPLE = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW… or HOST:PORT"
_LISTEN_EXAMPLE = "/ip4/0.0.0.0/tcp/31337, 0.0.0.0:31337 or 31337"


@dataclass(frozen=True)
class Address:
    """A host and port where a peer listens, and the peer id expected there.

    Attributes:
        protocol: ``ip4``, ``ip6``, ``dns4``, ``dns6`` or ``dns``.
        host: IP address or host name.
        port: TCP port; 0 means "any free port" and is for listening only.
        peer_id: the peer that must answer, or None to trust the first that answers.
    """

    protocol: str
    host: str
    port: int
    peer_id: PeerId | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read a multiaddr or ``HOST:PORT``.

        Raises:
            ConfigError: it is neither, or names a transport other than TCP.
        """
        _check_is_address(text, _EXAMPLE)
        if text.startswith("/"):
            return _parse_multiaddr(text)
        host, _, port = text.rpartition(":")
        if host in ("", "*") and port.isdigit():
            raise ConfigError(f"address {text!r} has no host; to be dialled it needs one, such as 203.0.113.7:{port}")
        return _parse_host_port(text, _EXAMPLE)

    @classmethod
    def parse_listen(cls, text: str) -> Address:
        """Read a listen address: as :meth:`parse`, but the port ``*`` is any free one, and the host is optional.

        ``31337``, ``:31337`` and ``*:31337`` mean all interfaces, like ``[::]:31337``: with IPv4 and IPv6.

        Raises:
            ConfigError: as :meth:`parse`.
        """
        _check_is_address(text, _LISTEN_EXAMPLE)
        if text.startswith("/"):
            if text.endswith("/tcp/*"):
                text = text.removesuffix("*") + "0"
            return _parse_multiaddr(text)
        host, separator, port = text.rpartition(":")
        if host in ("", "*") and (separator or port.isdigit()):
            return cls.of("::", 0 if port == "*" else _checked_port(text, port))
        if host and port == "*":
            text = f"{host}:0"
        return _parse_host_port(text, _LISTEN_EXAMPLE)

    @classmethod
    def of(cls, host: str, port: int, peer_id: PeerId | None = None) -> Address:
        """Return the address of a host given as an IP address or a name.

        Raises:
            ConfigError: ``host`` is neither.
        """
        try:
            ip = ipaddress.ip_address(host)
            _check_zone(ip)
        except ValueError:
            return cls(_checked_name(host, host, "dns"), host, port, peer_id)
        return cls(f"ip{ip.version}", str(ip), port, peer_id)

    def __str__(self) -> str:
        text = f"/{self.protocol}/{self.host}/tcp/{self.port}"
        return f"{text}/p2p/{self.peer_id}" if self.peer_id else text

    def with_peer(self, peer_id: PeerId) -> Address:
        """Return this address with another expected peer."""
        return self if self.peer_id == peer_id else Address(self.protocol, self.host, self.port, peer_id)

    @property
    def host_port(self) -> str:
        """``HOST:PORT``, with an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_unspecified(self) -> bool:
        """Whether the host means "all interfaces" (``0.0.0.0`` or ``::``)."""
        return self.protocol.startswith("ip") and ipaddress.ip_address(self.host).is_unspecified

    @property
    def is_public(self) -> bool:
        """Whether any machine on the internet may dial it: a name, or an IP address that is not private or local."""
        return not self.protocol.startswith("ip") or _is_global(self.host)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can dial it."""
        return self.protocol.startswith("ip") and ipaddress.ip_address(self.host).is_loopback


def ip_of(host: str) -> IpAddress:
    """The IP address in a text, without its zone; one of IPv4 that is written as IPv6 in its own form.

    Raises:
        ValueError: it is none, such as a name.
    """
    ip = ipaddress.ip_address(host.partition("%")[0])
    return getattr(ip, "ipv4_mapped", None) or ip


@functools.lru_cache(maxsize=4096)
def _is_global(host: str) -> bool:
    """``ip_address(host).is_global``, which takes 30 µs, and is asked of all peers each time that their votes count."""
    return ipaddress.ip_address(host).is_global


def public_host(text: str) -> str:
    """Return the IP address in a text if it is a public one, else an empty text."""
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return ""
    return str(ip) if ip.is_global else ""


def parse_addresses(texts: Sequence[str | Address]) -> list[Address]:
    """Read several addresses; an :class:`Address` is returned unchanged.

    Raises:
        ConfigError: one is invalid, or the argument is a single address instead of a list.
    """
    _check_is_list(texts)
    return [text if isinstance(text, Address) else Address.parse(text) for text in texts]


def parse_listen_addresses(texts: Sequence[str | Address]) -> list[Address]:
    """Like :func:`parse_addresses`, for listen addresses; ``0.0.0.0`` is dropped beside ``::``, which includes it."""
    _check_is_list(texts)
    addresses = [text if isinstance(text, Address) else Address.parse_listen(text) for text in texts]
    of_both_families = {a.port for a in addresses if a.is_unspecified and a.protocol == "ip6"}
    is_covered = [a.is_unspecified and a.protocol == "ip4" and a.port in of_both_families for a in addresses]
    return [address for address, covered in zip(addresses, is_covered, strict=True) if not covered]


def host_ports(texts: Sequence[str | Address]) -> list[str]:
    """Return addresses as ``HOST:PORT``, to be shown as part of a command; those of IPv6 only if there are no others.

    The brackets of IPv6 need quotes in some shells, or else the whole command fails.
    """
    addresses = parse_addresses(texts)
    plain = [address.host_port for address in addresses if ":" not in address.host]
    return plain or [shlex.quote(address.host_port) for address in addresses]


def _check_is_list(texts: Sequence[str | Address]) -> None:
    if isinstance(texts, (str, Address, int)):
        raise ConfigError(f"{str(texts)!r} is one address where a list of them is needed; write [{str(texts)!r}]")
    if not isinstance(texts, Iterable):
        raise ConfigError(f"{texts!r} is not a list of addresses; give a list, or leave the argument out")


def _check_is_address(text: str, example: str) -> None:
    if not isinstance(text, str):
        raise ConfigError(f"address {text!r} is of type {type(text).__name__}; it must be a text, like {example}")
    if not text.strip():
        raise ConfigError(f"an address is empty: a variable of the shell is probably unset; write it like {example}")
    if url := _URL.match(text):
        host, _, port = url[2].rpartition("@")[2].rpartition(":")
        place = f"{host}:{port}" if host and port.isdigit() else "HOST:PORT"
        raise ConfigError(f"{text!r} is a URL, not an address; write it without {url[1]}://, like {place}")


def _parse_multiaddr(text: str) -> Address:
    parts = text.rstrip("/").split("/")[1:]
    if len(parts) not in (4, 6) or parts[2] != "tcp" or (len(parts) == 6 and parts[4] != "p2p"):
        raise ConfigError(f"cannot read address {text!r}; write it like {_EXAMPLE}")
    protocol = parts[0]
    host = parts[1]
    port = _checked_port(text, parts[3])
    if protocol in ("ip4", "ip6"):
        try:
            ip = ipaddress.IPv4Address(host) if protocol == "ip4" else ipaddress.IPv6Address(host)
            _check_zone(ip)
        except ValueError:
            raise ConfigError(f"in address {text!r}, {host!r} is not an IPv{protocol[2]} address") from None
        host = str(ip)
    elif protocol in ("dns4", "dns6", "dns"):
        _checked_name(text, host, protocol)
    else:
        raise ConfigError(f"address {text!r} begins with /{protocol}; /ip4, /ip6, /dns, /dns4 and /dns6 are understood")
    peer_id = None
    if len(parts) == 6:
        peer_id = PeerId(parts[5])
        public_key_of(peer_id)
    return Address(protocol, host, port, peer_id)


def _parse_host_port(text: str, example: str) -> Address:
    host, separator, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host and any(char.isspace() or char == "," for char in host):
        raise ConfigError(f"{text!r} contains several addresses; give a list with one text for each")
    elif ":" in host:
        raise ConfigError(f"cannot read address {text!r}; write an IPv6 address in brackets: [::1]:31337")
    if not separator or not host:
        raise ConfigError(f"cannot read address {text!r}; write it like {example}")
    return Address.of(host, _checked_port(text, port))


def _check_zone(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    """Raise ``ValueError`` if the zone of an address cannot be the name or number of an interface (RFC 4007)."""
    zone = ip.scope_id if isinstance(ip, ipaddress.IPv6Address) else None
    if zone is not None and not _ZONE.fullmatch(zone):
        raise ValueError(f"there is no interface {zone!r}")


def _checked_port(text: str, port: str) -> int:
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise ConfigError(f"in address {text!r}, {port!r} is not a port; a port is a number from 1 to 65535")
    return int(port)


def _checked_name(text: str, host: str, protocol: str) -> str:
    if "." in host and host.replace(".", "").isdigit():  # the system would read 127.1 as 127.0.0.1
        raise ConfigError(f"in address {text!r}, {host!r} is not an IPv4 address; write it like {_EXAMPLE}")
    if len(host) > 253 or not _NAME.fullmatch(host):
        raise ConfigError(f"in address {text!r}, {host!r} is not a host name; write it like {_EXAMPLE}")
    return protocol
