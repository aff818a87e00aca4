"""Interface of the measured systems, and how bulk data is sent and counted.

A system has a server and a client, each on the event loop of its own process. A link is one connection for bulk data
that the client opens and closes; the :class:`Plan` that opens it says what the server does with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

MIB = 1 << 20
PAYLOAD_BYTES = 8 * MIB
ECHO_BYTES = 64
TAIL_S = 0.05  # a sender continues for this long after the other end stops counting
PATIENCE_S = 10.0

Sink = Callable[[memoryview], None]


class LinkClosed(Exception):
    """The other end has closed the link, or it broke."""


class Link(Protocol):
    """One connection for bulk data; its system's ``cut`` makes pieces of the payload."""

    async def send(self, piece: Any) -> None:
        """Send one piece, and wait while the other end has no room. Raises ``LinkClosed``."""

    async def receive(self, sink: Sink) -> None:
        """Pass everything that arrives to ``sink``, until the link is closed."""

    async def close(self) -> None:
        """Flush and close; :meth:`receive` returns at both ends."""


class Plan(msgspec.Struct):
    """The purpose of a link.

    Attributes:
        kind: ``check``: the payload once in each direction; ``up``: client to server; ``both``: both at once.
        warm_up_s: seconds that are not counted, from the first byte on.
        counted_s: seconds that are counted after that.
    """

    kind: str
    warm_up_s: float = 0.0
    counted_s: float = 0.0

    @property
    def send_s(self) -> float:
        return self.warm_up_s + self.counted_s + TAIL_S


Serve = Callable[[Link, Plan], Awaitable[None]]


class Dial(Protocol):
    """One connection to make; everything that needs no network is already prepared."""

    async def open(self) -> None:
        """Connect, with the whole handshake and one response of the server."""

    async def close(self) -> None:
        """Close it."""


class Server(Protocol):
    """The side that listens."""

    def cut(self, payload: bytes) -> Sequence[Any]:
        """The payload in pieces of the best size for this system, without copies for each use."""

    async def start(self, serve: Serve) -> str:
        """Listen, and pass each link to ``serve``; returns the contact for the client."""

    async def close(self) -> None:
        """Close everything."""


class Client(Protocol):
    """The side that dials."""

    def cut(self, payload: bytes) -> Sequence[Any]:
        """As on the server."""

    async def start(self, contact: str) -> None:
        """Connect for :meth:`echo`."""

    async def open_link(self, plan: Plan) -> Link:
        """A new connection for bulk data."""

    async def echo(self) -> None:
        """Make one small call."""

    def prepare_dial(self) -> Dial:
        """A new connection, not yet opened."""

    async def close(self) -> None:
        """Close everything."""


@dataclass(frozen=True)
class Received:
    """The bytes that a link delivered in one direction.

    Attributes:
        num_bytes: in all, including the warm-up.
        mib_per_s: in the counted time.
        is_payload: whether they were exactly the payload; only in a check.
    """

    num_bytes: int
    mib_per_s: float
    is_payload: bool


class Meter:
    """Counts received bytes, or compares them with the payload.

    The rate is between the first and the last arrival in the counted time, so the size of arrivals does not matter.
    """

    def __init__(self, plan: Plan, payload: bytes) -> None:
        self._plan = plan
        self._payload = payload
        self._digest = hashlib.sha256()
        self._start = self._first = self._last = 0.0
        self._counted_bytes = 0
        self.num_bytes = 0
        self.has_all = asyncio.Event()

    def add(self, view: memoryview) -> None:
        self.num_bytes += len(view)
        if self._plan.kind == "check":
            self._digest.update(view)
            if self.num_bytes >= len(self._payload):
                self.has_all.set()
            return
        now = time.perf_counter()
        if self._start == 0.0:
            self._start = now
        since_s = now - self._start - self._plan.warm_up_s
        if not 0 <= since_s <= self._plan.counted_s:
            return
        if self._first == 0.0:
            self._first = now
        else:
            self._counted_bytes += len(view)
        self._last = now

    def received(self) -> Received:
        seconds = self._last - self._first
        rate = self._counted_bytes / MIB / seconds if seconds > 0 else 0.0
        return Received(self.num_bytes, rate, self._digest.digest() == hashlib.sha256(self._payload).digest())


def make_payload() -> bytes:
    """The payload, the same on both sides and larger than the cache of a core."""
    return random.Random(7).randbytes(PAYLOAD_BYTES)


async def _send(link: Link, piece: Any) -> None:
    """Send, and yield to other tasks: a send that finds room need not suspend."""
    await link.send(piece)
    await asyncio.sleep(0)


async def serve_link(link: Link, plan: Plan, payload: bytes, pieces: Sequence[Any]) -> Received:
    """Run the server's side of one link, until the client closes it."""
    meter = Meter(plan, payload)
    receiving = asyncio.ensure_future(link.receive(meter.add))
    try:
        if plan.kind == "check":
            for piece in pieces:
                await _send(link, piece)
        while plan.kind == "both" and not receiving.done():
            for piece in pieces:
                if not receiving.done():
                    await _send(link, piece)
        await receiving
    except LinkClosed:
        await receiving
    finally:
        receiving.cancel()
    return meter.received()


async def use_link(
    link: Link, plan: Plan, payload: bytes, pieces: Sequence[Any], alongside: Awaitable[None] | None = None
) -> Received:
    """Run the client's side: send as the plan says, and close. ``alongside`` runs at the same time."""
    meter = Meter(plan, payload)
    receiving = asyncio.ensure_future(link.receive(meter.add))
    beside = asyncio.ensure_future(alongside) if alongside is not None else None
    try:
        until = time.perf_counter() + plan.send_s
        is_over = False
        while not is_over:
            for piece in pieces:
                if plan.kind != "check" and time.perf_counter() >= until:
                    is_over = True
                    break
                await _send(link, piece)
            is_over = is_over or plan.kind == "check"
        if plan.kind == "check":
            await asyncio.wait_for(meter.has_all.wait(), PATIENCE_S)
        if beside is not None:
            await asyncio.wait_for(beside, PATIENCE_S)
        await link.close()
        await asyncio.wait_for(receiving, PATIENCE_S)
    finally:
        receiving.cancel()
        if beside is not None:
            beside.cancel()
    return meter.received()
