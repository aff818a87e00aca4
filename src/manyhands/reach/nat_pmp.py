"""A client of NAT-PMP (RFC 6886), by which a router maps a port to this machine. Many routers without UPnP speak it."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from manyhands.base.address import public_host
from manyhands.base.errors import Unavailable

SERVER_PORT = 5351
WAITS_S = (0.25, 0.5, 1.0)
"""Seconds to wait for an answer after each of three requests. RFC 6886, section 3.1, goes on for a minute."""

LIFETIME_S = 7200
"""Lifetime of a mapping in seconds, as the RFC recommends."""

ADDRESS = 0  # the request for the public address
MAP_TCP = 2  # the request for a mapping of a TCP port
ANSWER = 128  # is added to the number of the request in its answer

REASONS = {
    1: "it has another version of NAT-PMP", 2: "NAT-PMP is turned off", 3: "it has no address itself",
    4: "it has no room for more mappings", 5: "it does not know this request",
}  # fmt: skip
ROUTES = Path("/proc/net/route")
IS_GATEWAY = 2
"""A flag of a route (``RTF_GATEWAY``)."""


class NatPmpRouter:
    """A router with NAT-PMP.

    Args:
        gateway: returns its IPv4 address, empty if there is none; for each mapping, as the machine may have moved.
        port: the port that this machine listens on; the router chooses the one outside.
        server_port: the port of the router for NAT-PMP.

    Attributes:
        lifetime_s: of the mapping, as the router says.
    """

    def __init__(self, gateway: Callable[[], str], port: int, server_port: int = SERVER_PORT) -> None:
        self.lifetime_s: float = LIFETIME_S
        self._gateway = gateway
        self._server_port = server_port
        self._router = ""  # the one that has the mapping
        self._own_port = port
        self._mapped_port = port

    def map(self) -> tuple[str, int]:
        """Ask for the mapping, or renew it; return the public IP address, and the port there.

        Raises:
            Unavailable: the router does not answer, refuses, or has no public address.
        """
        router = self._gateway()
        if not router:
            raise Unavailable("this machine has no default route")
        host = public_host(socket.inet_ntoa(self._ask(router, ADDRESS, b"", 4)))
        if not host:
            raise Unavailable(f"the router {router} has no public address: it is behind another router")
        self._mapped_port, self.lifetime_s = self._map(router, self._mapped_port, LIFETIME_S)
        self._router = router
        return host, self._mapped_port

    def unmap(self) -> None:
        """Delete the mapping; takes at most about 2 s.

        Raises:
            Unavailable: the router does not answer.
        """
        self._map(self._router, 0, 0)

    def _map(self, router: str, port: int, lifetime_s: int) -> tuple[int, int]:
        """Ask for a mapping; return the port that the router maps, and for how many seconds."""
        answer = self._ask(router, MAP_TCP, struct.pack("!HHHI", 0, self._own_port, port, lifetime_s), 8)
        _, mapped, seconds = struct.unpack("!HHI", answer)
        return mapped, seconds

    def _ask(self, router: str, operation: int, arguments: bytes, num_bytes: int) -> bytes:
        """Send a request until an answer comes; return its last ``num_bytes`` bytes."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            for wait_s in WAITS_S:
                asking.settimeout(wait_s)
                try:
                    asking.connect((router, self._server_port))  # so that only the router can answer
                    asking.send(bytes([0, operation]) + arguments)
                    answer = asking.recv(64)
                except TimeoutError:
                    continue
                except OSError as error:
                    raise Unavailable(f"the router {router} does not speak NAT-PMP: {error}") from error
                if len(answer) < 4 or answer[1] != ANSWER + operation:
                    continue
                if result := int.from_bytes(answer[2:4], "big"):
                    reason = REASONS.get(result, f"code {result}")
                    raise Unavailable(f"the router {router} refuses: {reason}")
                if len(answer) == 8 + num_bytes:
                    return answer[8:]
        raise Unavailable(f"the router {router} does not answer NAT-PMP")


def default_gateway() -> str:
    """Return the IPv4 address of the default route's router; empty if there is none, or the system has no ``/proc``."""
    try:
        routes = [line.split() for line in ROUTES.read_text().splitlines()[1:]]
    except OSError:
        return ""
    for _, destination, gateway, flags, *_ in routes:
        if int(destination, 16) == 0 and int(flags, 16) & IS_GATEWAY:
            return socket.inet_ntoa(int(gateway, 16).to_bytes(4, sys.byteorder))
    return ""
