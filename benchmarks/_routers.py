"""An internet on this machine: hosts with public addresses, behind firewalls, and behind routers. Needs Linux and root.

Each host is a network namespace with one TUN device. One process forwards the packets between them, and is all
firewalls and routers at once: the kernel needs neither netfilter nor its programs. It carries TCP over IPv4 and IPv6
without delay. What no rule lets through is dropped without an answer.

The addresses are of the public kind, since peers treat private ones differently. No packet leaves this machine.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from _star import NAMESPACES, forwarded, ip, open_tun, remove

LONGEST_PACKET = 2048
TCP = 6
PREFIX = "mhr"
PUBLIC_NETWORK = "30.0.0."
PUBLIC_NETWORK_6 = "2400:30::"

Flow = tuple[int, bytes, int]
"""Port of the host, address and port of the other end."""


@dataclass(frozen=True)
class Host:
    """How one host is connected.

    Attributes:
        has_firewall: it lets in what answers its own connections only.
        has_router: it has a private address. Its connections come from the router's address, and from the same port.
        is_symmetric: the router uses another port, chosen at random, for each connection.
        has_second_router: the router is behind another one of the same kind, which forwards no port.
        only_to: the firewall lets connections out to this port only.
        lets_in: other hosts, by number, that the firewall lets in.
        forwarded_port: which the router leads to the same port of the host.
        has_ip6: it has a global IPv6 address too. With a firewall or router, IPv6 passes a firewall that lets in what
            answers its own connections only.
    """

    has_firewall: bool = False
    has_router: bool = False
    is_symmetric: bool = False
    has_second_router: bool = False
    only_to: int = 0
    lets_in: tuple[int, ...] = ()
    forwarded_port: int = 0
    has_ip6: bool = False


def public_ip(number: int) -> str:
    """The address of a host on the internet: its own, or that of its router."""
    return f"{PUBLIC_NETWORK}{number + 1}"


def own_ip(number: int, host: Host) -> str:
    """The address that a host sees itself."""
    return f"192.168.{number}.2" if host.has_router else public_ip(number)


def own_ip6(number: int) -> str:
    """The IPv6 address of a host, if it has one."""
    return f"{PUBLIC_NETWORK_6}{number + 1:x}"


@contextlib.contextmanager
def internet(hosts: Sequence[Host]) -> Iterator[list[str]]:
    """Start it; yields the names of the hosts' namespaces."""
    remove_abandoned()
    names = [f"{PREFIX}{os.getpid()}-{number}" for number in range(len(hosts))]
    with forwarded(names, _forward, list(hosts)):
        yield names


@contextlib.contextmanager
def bridged(num: int) -> Iterator[list[str]]:
    """Start open hosts only, which the kernel connects: as fast as it can. Yields the names of their namespaces."""
    remove_abandoned()
    names = [f"{PREFIX}{os.getpid()}-{number}" for number in range(num)]
    bridge = f"{PREFIX}{os.getpid()}-bridge"
    try:
        ip("netns", "add", bridge)
        ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", bridge, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            end = f"host{number}"
            ip("-n", bridge, "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", bridge, "link", "set", end, "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{public_ip(number)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "route", "add", "default", "dev", "eth0")
        yield names
    finally:
        for name in (*names, bridge):
            remove(name)


def remove_abandoned() -> None:
    """Remove the namespaces of benchmarks that were killed."""
    for path in NAMESPACES.glob(f"{PREFIX}*-*"):
        pid = path.name.removeprefix(PREFIX).split("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            remove(path.name)


def gates_of(number: int, host: Host, rng: random.Random) -> list[Gate]:
    """What stands between a host and the internet, from the host outwards."""
    public, own = public_ip(number), own_ip(number, host)
    if not host.has_second_router:
        return [Gate(host, public, own, rng)]
    between = f"100.64.{number}.2"
    return [Gate(host, between, own, rng), Gate(replace(host, forwarded_port=0), public, between, rng)]


class Gate:
    """A router, a firewall or nothing."""

    def __init__(self, host: Host, public: str, own: str, rng: random.Random) -> None:
        self._host = host
        self._public, self._own = _packed(public), _packed(own)
        self._let_in = {_packed(public_ip(other)) for other in host.lets_in}
        self._outer_ports: dict[Flow, int] = {}
        self._inner_ports: dict[Flow, int] = {}
        self._rng = rng

    def let_out(self, packet: bytearray) -> bool:
        """Change a packet of the host as the router does; returns whether it goes on."""
        source, other, port, other_port = _ends(packet)
        if source != self._own:
            return False
        flow = (port, other, other_port)
        outer = self._outer_ports.get(flow)
        if outer is None:
            if self._host.only_to not in (0, other_port):
                return False
            outer = self._rng.randrange(1024, 65536) if self._is_renumbered(port) else port
            self._outer_ports[flow] = outer
            self._inner_ports[outer, other, other_port] = port
        _write(packet, 12, self._public, 20, outer)
        return True

    def let_in(self, packet: bytearray) -> bool:
        """The same for a packet to the host."""
        other, _, other_port, port = _ends(packet)
        inner = self._inner_ports.get((port, other, other_port))
        if inner is None:
            if (self._host.has_firewall or self._host.has_router) and not (
                other in self._let_in or port == self._host.forwarded_port
            ):
                return False
            inner = port
        _write(packet, 16, self._own, 22, inner)
        return True

    def _is_renumbered(self, port: int) -> bool:
        return self._host.is_symmetric and port != self._host.forwarded_port


class Gate6:
    """A firewall for IPv6, or nothing."""

    def __init__(self, host: Host, own: str) -> None:
        self._is_closed = host.has_firewall or host.has_router
        self._own = socket.inet_pton(socket.AF_INET6, own)
        self._only_to = host.only_to
        self._flows: set[Flow] = set()

    def let_out(self, packet: bytearray) -> bool:
        """Whether a packet of the host goes on."""
        port, other_port = struct.unpack_from("!HH", packet, 40)
        flow = (port, bytes(packet[24:40]), other_port)
        if packet[8:24] != self._own or (flow not in self._flows and self._only_to not in (0, other_port)):
            return False
        self._flows.add(flow)
        return True

    def let_in(self, packet: bytearray) -> bool:
        """Whether a packet to the host goes on."""
        other_port, port = struct.unpack_from("!HH", packet, 40)
        return not self._is_closed or (port, bytes(packet[8:24]), other_port) in self._flows


def _packed(address: str) -> bytes:
    return bytes(int(part) for part in address.split("."))


def _ends(packet: bytearray) -> tuple[bytes, bytes, int, int]:
    source_port, port = struct.unpack_from("!HH", packet, 20)
    return bytes(packet[12:16]), bytes(packet[16:20]), source_port, port


def _write(packet: bytearray, address_at: int, address: bytes, port_at: int, port: int) -> None:
    """Set an address and a port, and correct both checksums."""
    before = struct.unpack_from("!2H", packet, address_at) + struct.unpack_from("!H", packet, port_at)
    after = (*struct.unpack("!2H", address), port)
    if before == after:
        return
    packet[address_at : address_at + 4] = address
    struct.pack_into("!H", packet, port_at, port)
    _correct(packet, 10, before[:2], after[:2])
    _correct(packet, 36, before, after)


def _correct(packet: bytearray, at: int, before: Sequence[int], after: Sequence[int]) -> None:
    """Change a checksum as the words under it have changed (RFC 1624)."""
    (checksum,) = struct.unpack_from("!H", packet, at)
    total = (checksum ^ 0xFFFF) + sum(word ^ 0xFFFF for word in before) + sum(after)
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into("!H", packet, at, total ^ 0xFFFF)


def _is_tcp(packet: bytearray) -> bool:
    """Whether it is TCP over IPv4, in one piece and without options of IP, as Linux sends it."""
    return len(packet) >= 40 and packet[0] == 0x45 and packet[9] == TCP


def _is_tcp6(packet: bytearray) -> bool:
    """Whether it is TCP over IPv6, without extension headers."""
    return len(packet) >= 60 and packet[0] >> 4 == 6 and packet[6] == TCP


def _forward(pipe: Connection, names: list[str], hosts: list[Host]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    devices = [
        open_tun(number, name, own_ip(number, host), own_ip6(number) if host.has_ip6 else "")
        for number, (name, host) in enumerate(zip(names, hosts, strict=True))
    ]
    rng = random.Random(0)
    gates = [gates_of(number, host, rng) for number, host in enumerate(hosts)]
    of_ip = {_packed(public_ip(number)): number for number in range(len(hosts))}
    gates6 = {number: Gate6(host, own_ip6(number)) for number, host in enumerate(hosts) if host.has_ip6}
    of_ip6 = {socket.inet_pton(socket.AF_INET6, own_ip6(number)): number for number in gates6}
    sender_of = {device: number for number, device in enumerate(devices)}
    poll = select.poll()
    for descriptor in (*devices, pipe.fileno()):
        poll.register(descriptor, select.POLLIN)
    pipe.send("ready")
    while True:
        for descriptor, _ in poll.poll():
            if descriptor not in sender_of:
                return  # the parent is gone
            for _ in range(64):
                try:
                    packet = bytearray(os.read(descriptor, LONGEST_PACKET))
                except BlockingIOError:
                    break
                sender = sender_of[descriptor]
                receiver = None
                if _is_tcp6(packet) and sender in gates6 and gates6[sender].let_out(packet):
                    receiver = of_ip6.get(bytes(packet[24:40]))
                    is_let_in = receiver is not None and gates6[receiver].let_in(packet)
                elif _is_tcp(packet) and all(gate.let_out(packet) for gate in gates[sender]):
                    receiver = of_ip.get(bytes(packet[16:20]))
                    is_let_in = receiver is not None and all(gate.let_in(packet) for gate in reversed(gates[receiver]))
                if receiver is not None and is_let_in:
                    with contextlib.suppress(BlockingIOError):
                        os.write(devices[receiver], packet)
