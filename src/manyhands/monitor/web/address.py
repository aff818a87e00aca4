"""The address of the page: parsed and taken before anything else is started."""

from __future__ import annotations

import importlib.util
import ipaddress
import socket

from manyhands.base.errors import ConfigError, MissingExtra

DEFAULT_ADDRESS = "127.0.0.1:8080"
BACKLOG = 1024


def bind(text: str = DEFAULT_ADDRESS) -> socket.socket:
    """Bind the address of the page. Requests wait until :class:`manyhands.monitor.web.PageServer` has the socket.

    Args:
        text: ``HOST:PORT``, ``[HOST]:PORT`` for IPv6, or ``PORT`` for this machine alone; port 0 takes a free one.
    Returns:
        A TCP socket that is bound; the caller closes it, or hands it to the server.
    Raises:
        MissingExtra: the packages of ``manyhands[web]`` are not installed.
        ConfigError: it is no address, or another program has the port.
    """
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn", "prometheus_client")):
        raise MissingExtra("--web", "web")
    host, port = _parsed(text)
    try:
        (family, _, _, _, place), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a name with an empty or too long label is a UnicodeError
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"--web {text}: {host!r} is not a host of this machine: {why}") from error
    taken = socket.socket(family, socket.SOCK_STREAM)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        taken.bind(place)
        taken.listen(BACKLOG)
    except OSError as error:
        taken.close()
        other = f"127.0.0.1:{8081 if port == 8080 else 8080}"
        raise ConfigError(
            f"--web {text}: {error.strerror or error}; name another address, for example --web {other}"
        ) from error
    return taken


def _parsed(text: str) -> tuple[str, int]:
    host, separator, port = text.strip().rpartition(":")
    if not separator:
        host = "127.0.0.1"
    elif host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""  # IPv6 without brackets: the port may be a part of the address
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ConfigError(f"--web {text!r} is not HOST:PORT; write for example --web {DEFAULT_ADDRESS}")
    return host, int(port)


def url_of(bound: socket.socket) -> str:
    """The address to type into a browser on this machine."""
    host, port = bound.getsockname()[:2]
    place = ipaddress.ip_address(host)
    if place.is_unspecified:
        place = ipaddress.ip_address("127.0.0.1" if place.version == 4 else "::1")
    return f"http://[{place}]:{port}" if place.version == 6 else f"http://{place}:{port}"


def is_loopback(bound: socket.socket) -> bool:
    """Whether only this machine can connect."""
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback
