"""Machines on one network, each a network namespace with an address of its own. Linux, as root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

NETWORK = 11
"""Its first number: addresses that are public, so that no rule for local networks applies; nobody else sees them."""
PORT = 31000
NOBODY = "02:00:00:00:00:01"
"""The hardware address of no machine."""


def can_be_made() -> bool:
    """Whether this process may make namespaces."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return False
    with suppress(OSError):
        return subprocess.run(["ip", "netns", "list"], capture_output=True, check=False).returncode == 0
    return False


def host(number: int) -> str:
    """The address of a machine."""
    return f"{NETWORK}.{number}.1.2"


class Machines:
    """Some machines that reach each other, each in a /24 of its own, as strangers on the internet are."""

    def __init__(self, num_machines: int) -> None:
        self._prefix = f"mh{os.getpid() % 100_000}"
        self._names = [f"{self._prefix}-{number}" for number in range(num_machines)]
        self._hub = f"{self._prefix}-hub"

    def begin(self) -> None:
        _ip("netns", "add", self._hub)
        _inside(self._hub, "ip", "link", "add", "bridge", "type", "bridge")
        _inside(self._hub, "ip", "link", "set", "bridge", "up")
        for number, name in enumerate(self._names):
            port = f"p{number}"
            _ip("netns", "add", name)
            _ip("link", "add", port, "netns", self._hub, "type", "veth", "peer", "name", "eth0", "netns", name)
            _inside(self._hub, "ip", "link", "set", port, "master", "bridge", "up")
            _inside(name, "ip", "addr", "add", f"{host(number)}/8", "dev", "eth0")
            _inside(name, "ip", "link", "set", "eth0", "up")
            _inside(name, "ip", "link", "set", "lo", "up")

    def end(self) -> None:
        for name in [*self._names, self._hub]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def on(self, number: int, command: Sequence[str]) -> list[str]:
        """The command that runs another one on a machine."""
        return ["ip", "netns", "exec", self._names[number], *command]

    def add_address(self, number: int, host: str) -> None:
        """Give a machine a further address; one of another network is seen by that machine alone."""
        is_seen = host.startswith(f"{NETWORK}.")
        _inside(self._names[number], "ip", "addr", "add", f"{host}/32", "dev", "eth0" if is_seen else "lo")

    def wall_off(self, number: int, *others: int) -> None:
        """Have a firewall between a machine and some others: all packets to them are lost."""
        for other in others:
            _inside(
                self._names[number], "ip", "neigh", "replace", host(other), "lladdr", NOBODY, "dev", "eth0", "nud",
                "permanent",
            )  # fmt: skip

    def plug(self, number: int, *, is_in: bool) -> None:
        """Pull the cable of a machine, or put it back."""
        _inside(self._names[number], "ip", "link", "set", "eth0", "up" if is_in else "down")


@contextmanager
def machines(num_machines: int) -> Iterator[Machines]:
    """Machines for a while."""
    network = Machines(num_machines)
    try:
        network.begin()
        yield network
    finally:
        network.end()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _inside(name: str, *command: str) -> None:
    _ip("netns", "exec", name, *command)
