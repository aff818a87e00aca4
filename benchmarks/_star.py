"""An emulated network on this machine: peers around a hub, each behind a slow, long, lossy line. Needs Linux and root.

Each peer is a network namespace with one TUN device. The hub, a process, forwards packets over the sender's line (with
its rate and queue), after the delay, and over the receiver's line. Packets that find a queue full are dropped, and so
is a random share of all packets.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from _hub import forward

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 1, 0x1000
MTU = 1500
CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/run/netns")
START_TIMEOUT_S = 120.0  # on a busy machine; it compiles its code


@dataclass(frozen=True)
class Line:
    """The line of each peer, in both directions.

    Attributes:
        bytes_per_s: of the first peer, the second one and so on; repeats if there are more peers.
        delay_s: from one peer to another.
        loss: share of packets.
        queue_s: packets that would wait longer are dropped.
    """

    bytes_per_s: Sequence[float]
    delay_s: float
    loss: float
    queue_s: float = 0.1


def why_not() -> str | None:
    """Why this machine cannot emulate the network; None if it can."""
    if os.name != "posix" or not Path("/dev/net/tun").exists():
        return "an emulated network needs Linux with /dev/net/tun"
    if os.geteuid() != 0:
        return "an emulated network needs root: it makes network namespaces"
    if shutil.which("ip") is None:
        return "an emulated network needs the command `ip` (package iproute2)"
    return None


def address_of(number: int) -> str:
    """The IP address of a peer."""
    return f"10.91.0.{number + 1}"


def enter(name: str) -> None:
    """Move this process into a namespace."""
    with (NAMESPACES / name).open() as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


@contextlib.contextmanager
def star(num_peers: int, line: Line) -> Iterator[list[str]]:
    """Start the network; yields the names of the peers' namespaces."""
    names = [f"mh{os.getpid()}-{number}" for number in range(num_peers)]
    with forwarded(names, _hub, line):
        yield names


@contextlib.contextmanager
def forwarded(names: list[str], forward: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Make namespaces, and start the process that forwards packets between them.

    Args:
        forward: what it runs: ``forward(pipe, names, *arguments)``. It sends ``ready`` into the pipe.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=forward, args=(theirs, names, *arguments), daemon=True)
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        process.start()
        theirs.close()
        if not ours.poll(START_TIMEOUT_S) or ours.recv() != "ready":
            raise RuntimeError("the emulated network did not start")
        yield
    finally:
        ours.close()
        if process.pid is not None:
            process.terminate()
            process.join(5.0)
        for name in names:
            remove(name)


def remove(name: str) -> None:
    """Remove a namespace, if it is there."""
    with contextlib.suppress(subprocess.CalledProcessError):
        ip("netns", "del", name)


def ip(*arguments: str) -> None:
    """Run the command `ip`."""
    subprocess.run(["ip", *arguments], check=True, timeout=10.0, capture_output=True)


def _hub(pipe: Connection, names: list[str], line: Line) -> None:
    lines = [open_tun(number, name, address_of(number)) for number, name in enumerate(names)]
    forward.compile("void(int64[::1], float64[::1], float64, float64, float64)")
    pipe.send("ready")
    bytes_per_s = np.resize(np.array(line.bytes_per_s, np.float64), len(names))
    forward(np.array(lines), bytes_per_s, line.delay_s, line.loss, line.queue_s)


def open_tun(number: int, name: str, address: str, address_6: str = "") -> int:
    """Make the TUN device of a namespace, with an IPv4 and perhaps an IPv6 address; returns its descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    device = f"mh{os.getpid()}{number}"[:15]
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
    ip("link", "set", device, "netns", name)
    ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
    ip("-n", name, "link", "set", device, "up", "mtu", str(MTU))
    ip("-n", name, "route", "add", "default", "dev", device)
    if address_6:
        ip("-n", name, "-6", "addr", "add", f"{address_6}/64", "dev", device)
        ip("-n", name, "-6", "route", "add", "default", "dev", device)
    return fd
