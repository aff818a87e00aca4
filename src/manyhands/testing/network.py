"""A simulated network behind the transport interface: delays, bandwidths, partitions, resets, half-open links.

What is modelled, for each direction between two hosts: latency, jitter, loss (as the delay of a retransmission, since
TCP hides it otherwise), a partition (what was sent is kept and arrives after it, as TCP retransmits), and half-open
streams (nothing arrives any more, and nobody is told). Bandwidth belongs to a host, up and down, and is shared fairly
by its streams. All chance comes from one generator.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError, DialFailed, DialReason, PeerLost
from manyhands.base.identity import Identity, PeerId
from manyhands.runtime.tasks import TaskOwner
from manyhands.testing.host import Host
from manyhands.testing.trace import Trace
from manyhands.testing.virtual_loop import VirtualLoop
from manyhands.transport.api import MAX_UNREAD_BYTES, OnStream
from manyhands.transport.buffer import ReceiveBuffer
from manyhands.transport.runs import runs_of

BACKLOG_BYTES = 256 * 1024
HANDSHAKE_TRIPS = 3
"""One-way trips from the first packet of TCP to the end of the TLS 1.3 handshake."""

RETRANSMISSION_S = 0.2


@dataclass
class Link:
    """One direction between two hosts.

    Attributes:
        latency_s: one way.
        jitter_s: up to so much more, uniformly.
        loss: probability that a chunk is lost and sent again.
        is_blocked: nothing arrives until it is opened.
    """

    latency_s: float = 0.0005
    jitter_s: float = 0.0
    loss: float = 0.0
    is_blocked: bool = False
    held: list[Callable[[], None]] = field(default_factory=list)


class Pipe:
    """A bandwidth that streams take turns on: each has one chunk in it at a time."""

    def __init__(self) -> None:
        self.bytes_per_s = float("inf")
        self._free_at = 0.0

    def transmit(self, now: float, num_bytes: int) -> float:
        """When ``num_bytes`` that are ready ``now`` have passed."""
        self._free_at = max(self._free_at, now) + num_bytes / self.bytes_per_s
        return self._free_at


class SimNetwork:
    """All hosts and what is between them."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, trace: Trace) -> None:
        self.hosts: dict[str, Host] = {}
        self.listeners: dict[tuple[str, int], SimListener] = {}
        self.streams: dict[SimStream, None] = {}
        self.default_link = Link()
        self._loop = loop
        self._rng = rng
        self._trace = trace
        self._links: dict[tuple[str, str], Link] = {}
        self._up: dict[str, Pipe] = {}
        self._down: dict[str, Pipe] = {}
        self._ports = itertools.count(1024)
        self._numbers = itertools.count(1)

    def add_host(self, name: str) -> Host:
        """A new machine; names are unique."""
        if name in self.hosts:
            raise ConfigError(f"there is a host {name!r} already; choose another name")
        number = len(self.hosts) + 1
        host = self.hosts[name] = Host(self._loop, name, f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
        self._up[name], self._down[name] = Pipe(), Pipe()
        return host

    def link(self, source: str, destination: str) -> Link:
        """The direction from one host to another."""
        key = (source, destination)
        if key not in self._links:
            default = self.default_link
            self._links[key] = Link(default.latency_s, default.jitter_s, default.loss)
        return self._links[key]

    def set_bandwidth(self, name: str, *, up_mbit_s: float, down_mbit_s: float) -> None:
        """Limit what a host sends and receives."""
        self._up[name].bytes_per_s, self._down[name].bytes_per_s = up_mbit_s * 125_000, down_mbit_s * 125_000

    def block(self, source: str, destination: str) -> None:
        """Nothing that one host sends reaches the other until :meth:`unblock`."""
        self.link(source, destination).is_blocked = True

    def unblock(self, source: str, destination: str) -> None:
        """What was held back arrives, as TCP sends it again."""
        link = self.link(source, destination)
        link.is_blocked = False
        held, link.held = link.held, []
        for deliver in held:
            self._loop.call_later(link.latency_s, self._arrive, link, deliver)

    def reset(self, one: str, other: str) -> None:
        """Reset all connections between two hosts."""
        for stream in self._between(one, other):
            stream.abort()

    def half_open(self, one: str, other: str) -> None:
        """All connections between two hosts go silent, and neither end is told; new ones work."""
        for stream in self._between(one, other):
            stream.is_silent = stream.other.is_silent = True

    def died(self, host: Host) -> None:
        """The machine of a killed process closes its connections and ports."""
        for key in [key for key, listener in self.listeners.items() if listener.host is host]:
            del self.listeners[key]
        for stream in [stream for stream in self.streams if stream.host is host]:
            stream.abort()

    def free_port(self) -> int:
        return next(self._ports)

    def now(self) -> float:
        return self._loop.time()

    def next_number(self) -> int:
        return next(self._numbers)

    def note(self, what: str) -> None:
        """Something to remember in the trace."""
        self._trace.add(self._loop.time(), what)

    def departure(self, host: Host, num_bytes: int) -> float:
        """When a host's next ``num_bytes`` have left it."""
        return self._up[host.name].transmit(self._loop.time(), num_bytes)

    def send(self, source: Host, destination: Host, left_at: float, num_bytes: int, deliver: Callable[[], None],
             not_before: float = 0.0) -> float:  # fmt: skip
        """Take something across; returns when it arrives if nothing stands in its way."""
        link = self.link(source.name, destination.name)
        delay_s = link.latency_s
        if link.jitter_s:
            delay_s += self._rng.uniform(0, link.jitter_s)
        while link.loss and self._rng.random() < link.loss:
            delay_s += RETRANSMISSION_S
        arrival = self._down[destination.name].transmit(max(left_at + delay_s, not_before), num_bytes)
        self._loop.call_at(arrival, self._arrive, link, deliver)
        return arrival

    def _arrive(self, link: Link, deliver: Callable[[], None]) -> None:
        if link.is_blocked or link.held:
            link.held.append(deliver)
        else:
            deliver()

    def _between(self, one: str, other: str) -> list[SimStream]:
        ends = {one, other}
        return [stream for stream in self.streams if {stream.host.name, stream.other.host.name} == ends]


class SimStream:
    """One end of a stream between two hosts."""

    def __init__(self, network: SimNetwork, host: Host, owner: PeerId, remote: PeerId, number: int) -> None:
        self.remote = remote
        self.remote_host = ""
        self.bytes_sent = 0
        self.bytes_received = 0
        self.is_silent = False
        self.host = host
        self.other: SimStream = self
        self.number = number
        self._network = network
        self._room = asyncio.Event()
        self._room.set()
        self._buffer = ReceiveBuffer(BACKLOG_BYTES, self._made_room)
        self._sending = asyncio.Lock()
        self._closed = asyncio.Event()
        self._in_flight: deque[Callable[[], None]] = deque()
        self._in_order_after = 0.0
        self._left_at = 0.0
        self.last_received = network.now()
        network.streams[self] = None

    def pair_with(self, other: SimStream) -> None:
        """Connect two ends."""
        self.other, other.other = other, self
        self.remote_host, other.remote_host = other.host.ip, self.host.ip

    async def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        async with self._sending:
            for number, run in enumerate(runs_of(buffers)):
                await self._room_for(number)
                if self._closed.is_set():
                    raise PeerLost(self.remote, "connection closed")
                for chunk in run:
                    self._send_chunk(bytes(chunk))

    async def send_message(self, message: bytes) -> None:
        await self._room_for(0)
        self.send_now(message)

    def send_now(self, message: bytes) -> None:
        if self._closed.is_set():
            raise PeerLost(self.remote, "connection closed")
        self._send_chunk(message)
        if self.bytes_sent - self.other.bytes_received > MAX_UNREAD_BYTES:
            self.abort()
            raise PeerLost(self.remote, "it does not read what it is sent")

    async def receive(self) -> bytes:
        return await self._buffer.take()

    async def _room_for(self, number: int) -> None:
        """Wait until what was sent before has left this host, and the other end has room."""
        try:
            if (left_s := self._left_at - self._network.now()) > 0:
                await asyncio.sleep(left_s)
            await self._room.wait()
        except asyncio.CancelledError:
            if number > 0:  # in the middle of a message: nobody could tell where the next one begins
                self.abort()
            raise

    def _send_chunk(self, chunk: bytes) -> None:
        self.bytes_sent += len(chunk)
        self._left_at = self._network.departure(self.host, len(chunk))
        self._transfer(self._left_at, len(chunk), lambda: self.other.arrived(chunk))

    def _transfer(self, left_at: float, num_bytes: int, deliver: Callable[[], None]) -> None:
        """Deliver in the receiving process, after all that this end sent before."""
        self._in_flight.append(deliver)  # each arrival delivers the oldest: two may come at the same instant
        self._in_order_after = self._network.send(
            self.host, self.other.host, left_at, num_bytes, self._deliver_next, self._in_order_after
        )

    def _deliver_next(self) -> None:
        deliver = self._in_flight.popleft()
        if not self.is_silent:
            asyncio.get_event_loop().call_soon(deliver, context=self.other.host.context)

    def arrived(self, chunk: bytes) -> None:
        """Bytes come in."""
        if self._closed.is_set():
            return
        self._network.note(f"{self.other.host.name}>{self.host.name} #{self.number} {len(chunk)} {zlib.crc32(chunk)}")
        self.bytes_received += len(chunk)
        self.last_received = self._network.now()
        self._buffer.feed(memoryview(chunk))
        if self._buffer.is_full:
            self.other._room.clear()  # noqa: SLF001 (the other end of the same stream)

    def _made_room(self) -> None:
        self.other._room.set()  # noqa: SLF001

    async def receive_into(self, view: memoryview) -> None:
        try:
            await self._buffer.fill(view)
        except asyncio.CancelledError:
            self.abort()
            raise

    async def close(self, timeout_s: float = 1.0) -> None:
        self.abort()

    async def wait_closed(self) -> None:
        await self._closed.wait()

    def abort(self) -> None:
        if not self._closed.is_set():
            self._end("the stream was closed here")
            if self.other is not self:
                self._transfer(asyncio.get_event_loop().time(), 0, lambda: self.other.ended())

    def ended(self) -> None:
        """The other end closed the stream."""
        if not self._closed.is_set():
            self._network.note(f"{self.other.host.name}>{self.host.name} #{self.number} closed")
            self._end("connection closed")

    def _end(self, reason: str) -> None:
        self._closed.set()
        self._room.set()
        self._network.streams.pop(self, None)
        self._buffer.end(PeerLost(self.remote, reason))


class SimListener:
    """An open port of a host."""

    def __init__(
        self, network: SimNetwork, host: Host, identity: Identity, address: Address, on_stream: OnStream
    ) -> None:
        self.host = host
        self.identity = identity
        self.addresses = [address]
        self._network = network
        self._on_stream = on_stream
        self._tasks = TaskOwner("listener")

    def accept(self, stream: SimStream) -> None:
        """Serve a new stream; runs in this host's process."""
        self._tasks.spawn(self._serve(stream), name=f"stream from {stream.remote}")

    async def _serve(self, stream: SimStream) -> None:
        try:
            await self._on_stream(stream)
        except PeerLost:
            pass  # whoever uses the stream has been told
        finally:
            stream.abort()

    async def close(self) -> None:
        address = self.addresses[0]
        self._network.listeners.pop((address.host, address.port), None)
        await self._tasks.close()


class SimTransport:
    """Dials and listens on a host of a :class:`SimNetwork` as one identity."""

    def __init__(self, network: SimNetwork, host: Host, identity: Identity) -> None:
        self.identity = identity
        self._network = network
        self._host = host

    def close(self) -> None:
        pass

    async def listen(self, address: Address, on_stream: OnStream) -> SimListener:
        port = address.port or self._network.free_port()
        key = (self._host.ip, port)
        if key in self._network.listeners:
            raise ConfigError(f"cannot listen on {address}: port {port} is taken; choose another, or 0 for a free one")
        listener = SimListener(self._network, self._host, self.identity, Address.of(*key), on_stream)
        self._network.listeners[key] = listener
        return listener

    async def dial(self, address: Address, timeout_s: float) -> SimStream:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[SimStream | DialFailed] = loop.create_future()
        target = next((host for host in self._network.hosts.values() if host.ip == address.host), None)
        if target is None:
            raise DialFailed(str(address), DialReason.UNREACHABLE)
        link = self._network.link(self._host.name, target.name)
        self._network.send(
            self._host, target, loop.time() + (HANDSHAKE_TRIPS - 2) * link.latency_s, 0,
            lambda: self._knock(address, target, answered),
        )  # fmt: skip
        await asyncio.wait([answered], timeout=timeout_s)
        if not answered.done():
            answered.cancel()
            raise DialFailed(str(address), DialReason.TIMED_OUT, f"waited {timeout_s:.3g} s")
        outcome = answered.result()
        if isinstance(outcome, DialFailed):
            raise outcome
        return outcome

    def _knock(self, address: Address, target: Host, answered: asyncio.Future[SimStream | DialFailed]) -> None:
        """The dial has reached the machine; a process that is frozen does not answer it."""
        loop = asyncio.get_event_loop()
        if target.is_alive and (address.host, address.port) in self._network.listeners:
            loop.call_soon(self._accept, address, target, answered, context=target.context)
        else:
            self._answer(target, answered, lambda: DialFailed(str(address), DialReason.REFUSED))

    def _accept(self, address: Address, target: Host, answered: asyncio.Future[SimStream | DialFailed]) -> None:
        listener = self._network.listeners.get((address.host, address.port))
        if listener is None:
            self._answer(target, answered, lambda: DialFailed(str(address), DialReason.REFUSED))
            return
        remote = listener.identity.peer_id
        if remote == self.identity.peer_id:
            self._answer(target, answered, lambda: DialFailed(str(address), DialReason.ITSELF))
        elif address.peer_id not in (None, remote):
            failure = DialFailed(str(address), DialReason.WRONG_IDENTITY, f"found {remote}")
            self._answer(target, answered, lambda: failure)
        else:
            self._connect(listener, target, answered)

    def _connect(self, listener: SimListener, target: Host, answered: asyncio.Future[SimStream | DialFailed]) -> None:
        number = self._network.next_number()
        here = SimStream(self._network, self._host, self.identity.peer_id, listener.identity.peer_id, number)
        there = SimStream(self._network, target, listener.identity.peer_id, self.identity.peer_id, number)
        here.pair_with(there)
        self._network.note(f"{self._host.name}>{target.name} #{number} opened")
        listener.accept(there)
        self._answer(target, answered, lambda: here)

    def _answer(
        self,
        target: Host,
        answered: asyncio.Future[SimStream | DialFailed],
        outcome: Callable[[], SimStream | DialFailed],
    ) -> None:
        def deliver() -> None:
            result = outcome()
            if not answered.done():
                answered.set_result(result)
            elif isinstance(result, SimStream):  # nobody waits for it any more
                result.abort()

        def run() -> None:
            asyncio.get_event_loop().call_soon(deliver, context=self._host.context)

        self._network.send(target, self._host, asyncio.get_event_loop().time(), 0, run)
