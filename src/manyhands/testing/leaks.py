"""Finds leaks of a program: tasks, streams, open ports, and received bytes that are never read."""

from __future__ import annotations

from manyhands.testing.host import Host
from manyhands.testing.network import SimNetwork
from manyhands.testing.numbered import where
from manyhands.testing.virtual_loop import VirtualLoop

UNREAD_FOR_S = 60.0
"""Bytes that stay unread for this long in an open stream are reported."""


def left_by(host: Host, loop: VirtualLoop, network: SimNetwork) -> list[str]:
    """Leaks of a host's process that has ended, each with a description."""
    left = [f"task {task.get_name()!r} at {where(task)}" for task in loop.tasks_of(host.life)]
    for stream in network.streams:
        if stream.host is host and stream.is_handed_over:
            unread = f", {stream.num_unread} bytes unread" if stream.num_unread else ""
            left.append(f"{stream} is open{unread}")
    left += [
        f"port {listener.addresses[0].port} is open" for listener in network.listeners.values() if listener.host is host
    ]
    return left


def unread_in(network: SimNetwork) -> list[str]:
    """Streams of running hosts whose bytes have stayed unread for a minute."""
    now = network.loop.now
    return [
        f"{stream}: {stream.num_unread} unread bytes, the last of them received {now - stream.last_received:.0f} s ago"
        for stream in network.streams
        if stream.num_unread and stream.life.is_running and now - stream.last_received >= UNREAD_FOR_S
    ]
