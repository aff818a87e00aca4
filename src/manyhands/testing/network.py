"""A simulated network behind the transport interface: delays, bandwidths, partitions, resets, half-open links.

Each direction between two hosts has latency, jitter, loss (modelled as the delay of a retransmission, since TCP hides
it), partitions (sent bytes arrive afterwards, as TCP retransmits), and half-open streams (nothing arrives, and neither
end is notified). Bandwidth belongs to a host, up and down, and its streams share it fairly. All randomness comes from
one generator.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections.abc import Callable, Sequence

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError, DialFailed, DialReason, PeerLost
from manyhands.base.identity import Identity, PeerId
from manyhands.runtime.tasks import TaskOwner
from manyhands.testing.host import Host
from manyhands.testing.links import Link, Pipe
from manyhands.testing.relayed import RelayedInProcess
from manyhands.testing.stream import SimStream
from manyhands.testing.trace import Trace
from manyhands.testing.virtual_loop import VirtualLoop
from manyhands.transport.api import Ends, OnStream, Port

INSIDE_IP = "192.168.0.2"
"""The address of every host behind a router, as that host sees it."""

HANDSHAKE_TRIPS = 3
"""One-way trips from the first packet of TCP to the end of the TLS 1.3 handshake."""


class SimNetwork:
    """All hosts and the links between them.

    Attributes:
        hosts: by name.
        listeners: open ports, by address and number.
        streams: both ends of all open streams, oldest first.
        default_link: the properties of new links; set it before hosts connect.
    """

    def __init__(self, loop: VirtualLoop, rng: random.Random, trace: Trace) -> None:
        self.hosts: dict[str, Host] = {}
        self.listeners: dict[tuple[str, int], SimListener] = {}
        self.streams: dict[SimStream, None] = {}
        self.default_link = Link()
        self.loop = loop
        self.rng = rng
        self.trace = trace
        self._by_ip: dict[str, Host] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._up: dict[str, Pipe] = {}
        self._down: dict[str, Pipe] = {}
        self._ports = itertools.count(1024)
        self._outer_ports = itertools.count(40_000)
        self._attempts: dict[_Attempt, None] = {}
        self._numbers = itertools.count(1)

    def add_host(self, name: str) -> Host:
        """Add a machine; names are unique."""
        if name in self.hosts:
            raise ConfigError(f"there is a host {name!r} already; choose another name")
        number = len(self.hosts) + 1
        host = Host(self.loop, name, f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
        self.hosts[name] = self._by_ip[host.ip] = host
        self._up[name] = Pipe(self.loop)
        self._down[name] = Pipe(self.loop)
        return host

    def link(self, source: str, destination: str) -> Link:
        """The direction from one host to another."""
        key = (source, destination)
        if key not in self._links:
            default = self.default_link
            self._links[key] = Link(default.latency_s, default.jitter_s, default.loss)
        return self._links[key]

    def up(self, name: str) -> Pipe:
        """The upload bandwidth of a host."""
        return self._up[name]

    def down(self, name: str) -> Pipe:
        """The download bandwidth of a host."""
        return self._down[name]

    def set_bandwidth(self, name: str, *, up_mbit_s: float, down_mbit_s: float) -> None:
        """Limit the upload and download bandwidth of a host."""
        self._up[name].limit(up_mbit_s * 125_000)
        self._down[name].limit(down_mbit_s * 125_000)

    # faults

    def block(self, source: str, destination: str) -> None:
        """Block all traffic from one host to another, until :meth:`unblock` was called as often."""
        self.link(source, destination).num_blocks += 1

    def unblock(self, source: str, destination: str) -> None:
        """Remove a block; the held bytes arrive, as TCP sends them again."""
        link = self.link(source, destination)
        for arrive, args in link.unblock():
            self.loop.call_outside(self.loop.now + link.latency_s, arrive, *args)

    def reset(self, one: str, other: str) -> None:
        """Reset all connections between two hosts."""
        for stream in self._between(one, other):
            stream.abort()

    def half_open(self, one: str, other: str) -> None:
        """Silence all connections between two hosts, without notifying either end; new ones work."""
        for stream in self._between(one, other):
            stream.is_silent = stream.other.is_silent = True

    def reboot_router(self, name: str) -> None:
        """Have the router of a machine forget its connections: they go silent, and neither end is told."""
        for stream in [stream for stream in self.streams if stream.host is self.hosts[name]]:
            stream.is_silent = stream.other.is_silent = True

    def move(self, name: str, ip: str) -> None:
        """Give a machine another address. Its ports move there; its connections go silent, and neither end is told."""
        host = self.hosts[name]
        self.reboot_router(name)
        for key in [key for key, listener in self.listeners.items() if listener.host is host]:
            self.listeners[ip, key[1]] = self.listeners.pop(key)
        self._by_ip.pop(host.ip)
        host.ip = ip
        self._by_ip[ip] = host

    def died(self, host: Host) -> None:
        """Close the connections and ports of a killed process, as its operating system does."""
        for stream in self._gone(host):
            stream.abort()

    def vanished(self, host: Host) -> None:
        """Remove a machine that lost its power: its ports are closed, and the other ends are not notified."""
        for stream in self._gone(host):
            stream.vanish()

    def _gone(self, host: Host) -> list[SimStream]:
        for key in [key for key, listener in self.listeners.items() if listener.host is host]:
            del self.listeners[key]
        return [stream for stream in self.streams if stream.host is host]

    def _between(self, one: str, other: str) -> list[SimStream]:
        ends = {one, other}
        return [stream for stream in self.streams if {stream.host.name, stream.other.host.name} == ends]

    # used by the other classes

    def host_at(self, ip: str) -> Host | None:
        return self._by_ip.get(ip)

    def free_port(self) -> int:
        return next(self._ports)

    def connect(self, here: Host, there: Host, dialler: Identity, acceptor: Identity) -> tuple[SimStream, SimStream]:
        """Both ends of a new stream."""
        number = next(self._numbers)
        near = SimStream(self, here, there, acceptor.peer_id, number)
        far = SimStream(self, there, here, dialler.peer_id, number)
        near.pair_with(far)
        self.note(f"{here.name}>{there.name} #{number} opened")
        return near, far

    def ends_of(self, dialler: Host, acceptor: Host, port: int) -> tuple[Ends, Ends]:
        """Both ends of a connection, as the dialler sees them, and as the acceptor does."""
        chosen = next(self._outer_ports)
        seen = next(self._outer_ports) if dialler.router == "symmetric" else chosen
        own_ip = dialler.ip if dialler.router in ("none", "firewall") else INSIDE_IP
        there = acceptor.ip, port
        return Ends((own_ip, chosen), there), Ends(there, (dialler.ip, seen))

    def meet(self, attempt: _Attempt) -> None:
        """Connect two ends that dial each other's places at the same time."""
        self._attempts[attempt] = None
        for other in self._attempts:
            if attempt.fits(other) and other.fits(attempt):
                dialler, acceptor = (attempt, other) if attempt.is_dialler else (other, attempt)
                near, far = self.connect(dialler.host, acceptor.host, dialler.identity, acceptor.identity)
                near.is_bulk = far.is_bulk = dialler.is_bulk
                for one, end in ((dialler, near), (acceptor, far)):
                    del self._attempts[one]
                    arrive = functools.partial(self.loop.call_in, one.host.life, one.connected, end)
                    self.carry(dialler.host, acceptor.host, arrive, trips=HANDSHAKE_TRIPS)
                return

    def give_up(self, attempt: _Attempt) -> None:
        """Remove an attempt that was not met."""
        self._attempts.pop(attempt, None)

    def note(self, what: str) -> None:
        """Add an entry to the trace."""
        self.trace.add(self.loop.now, what)

    def carry(self, source: Host, destination: Host, arrive: Callable[[], None], trips: int = 1) -> None:
        """Deliver a packet of a handshake."""
        link = self.link(source.name, destination.name)
        delay_s = link.delay_s(self.rng) + (trips - 1) * link.latency_s

        def come() -> None:
            if link.num_blocks:
                link.hold(come)
            else:
                arrive()

        self.loop.call_outside(self.loop.now + delay_s, come)


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
        stream.is_handed_over = True
        self._tasks.spawn(self._serve(stream), name=f"stream from {stream.remote}")

    async def _serve(self, stream: SimStream) -> None:
        try:
            await self._on_stream(stream)
        except PeerLost:
            pass  # the user of the stream has been notified
        finally:
            stream.abort()

    async def close(self) -> None:
        self._network.listeners.pop((self.host.ip, self.addresses[0].port), None)
        await self._tasks.close()


class SimTransport(RelayedInProcess):
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
        bound = Address.of(address.host if address.is_unspecified else self._host.ip, port)
        listener = SimListener(self._network, self._host, self.identity, bound, on_stream)
        self._network.listeners[key] = listener
        return listener

    def take_port(self) -> SimPort:
        return SimPort(self._network.free_port())

    async def dial_from(
        self, port: Port, places: Sequence[Address], peer_id: PeerId, timeout_s: float, *, is_bulk: bool
    ) -> SimStream:
        attempt = _Attempt(self._host, self.identity, port.number, places, is_dialler=True, is_bulk=is_bulk)
        return await self._met(attempt, peer_id, timeout_s)

    async def accept_from(self, port: Port, places: Sequence[Address], peer_id: PeerId, timeout_s: float) -> SimStream:
        attempt = _Attempt(self._host, self.identity, port.number, places, is_dialler=False, is_bulk=False)
        return await self._met(attempt, peer_id, timeout_s)

    async def _met(self, attempt: _Attempt, peer_id: PeerId, timeout_s: float) -> SimStream:
        self._network.meet(attempt)
        try:
            await asyncio.wait([attempt.arrived], timeout=timeout_s)
        except asyncio.CancelledError:
            if not attempt.arrived.cancel():  # it has arrived just now
                attempt.arrived.result().abort()
            raise
        finally:
            self._network.give_up(attempt)
        if attempt.arrived.cancel():
            raise DialFailed(f"peer {peer_id}", DialReason.TIMED_OUT, f"waited {timeout_s:.3g} s")
        stream = attempt.arrived.result()
        if stream.remote != peer_id:
            stream.abort()
            raise DialFailed(f"peer {peer_id}", DialReason.WRONG_IDENTITY, f"found {stream.remote}")
        return stream

    async def dial(self, address: Address, timeout_s: float) -> SimStream:
        return await self._dial(address, timeout_s, is_bulk=False)

    async def dial_bulk(self, address: Address, timeout_s: float) -> SimStream:
        return await self._dial(address, timeout_s, is_bulk=True)

    async def _dial(self, address: Address, timeout_s: float, *, is_bulk: bool) -> SimStream:
        answered: asyncio.Future[SimStream | DialFailed] = asyncio.get_running_loop().create_future()
        target = self._network.host_at(address.host)
        if target is None:
            raise DialFailed(str(address), DialReason.UNREACHABLE)
        dial = _Dial(self._network, self._host, self.identity, target, address, answered, is_bulk)
        self._network.carry(self._host, target, dial.reached, trips=HANDSHAKE_TRIPS - 1)
        try:
            await asyncio.wait([answered], timeout=timeout_s)
        except asyncio.CancelledError:
            if not answered.cancel() and isinstance(outcome := answered.result(), SimStream):
                outcome.abort()
            raise
        if answered.cancel():
            raise DialFailed(str(address), DialReason.TIMED_OUT, f"waited {timeout_s:.3g} s")
        outcome = answered.result()
        if isinstance(outcome, DialFailed):
            raise outcome
        return outcome


class SimPort:
    """A local port for hole punching."""

    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        pass


class _Attempt:
    """One end that connects to places from which another one connects at the same time."""

    def __init__(
        self, host: Host, identity: Identity, port: int, places: Sequence[Address], *, is_dialler: bool, is_bulk: bool
    ) -> None:
        self.host = host
        self.identity = identity
        self.is_dialler = is_dialler
        self.is_bulk = is_bulk
        self.arrived: asyncio.Future[SimStream] = asyncio.get_running_loop().create_future()
        self._port = port
        self._places = {(place.host, place.port) for place in places}

    def fits(self, other: _Attempt) -> bool:
        """Whether the packets of the other end come from a place that this one has let in."""
        is_known = other.host.router != "symmetric"
        return is_known and self.is_dialler != other.is_dialler and (other.host.ip, other._port) in self._places

    def connected(self, stream: SimStream) -> None:
        if self.arrived.done():
            stream.abort()
        else:
            stream.is_handed_over = True
            self.arrived.set_result(stream)


class _Dial:
    """One dial, from the first packet to the answer."""

    def __init__(
        self,
        network: SimNetwork,
        host: Host,
        identity: Identity,
        target: Host,
        address: Address,
        answered: asyncio.Future[SimStream | DialFailed],
        is_bulk: bool,
    ) -> None:
        self._is_bulk = is_bulk
        self._network = network
        self._host = host
        self._identity = identity
        self._life = host.life
        self._target = target
        self._address = address
        self._answered = answered

    def reached(self) -> None:
        """Handle the first packet at the other machine. A frozen process does not answer it."""
        if self._target.router != "none":
            return  # what nobody there has asked for is dropped
        if self._target.is_alive and self._listener() is not None:
            self._network.loop.call_soon(self._accept, context=self._target.context)
        else:
            self._answer(DialFailed(str(self._address), DialReason.REFUSED))

    def _listener(self) -> SimListener | None:
        return self._network.listeners.get((self._address.host, self._address.port))

    def _accept(self) -> None:
        listener = self._listener()
        address = str(self._address)
        if listener is None:
            self._answer(DialFailed(address, DialReason.REFUSED))
        elif listener.identity.peer_id == self._identity.peer_id:
            self._answer(DialFailed(address, DialReason.ITSELF))
        elif self._address.peer_id not in (None, listener.identity.peer_id):
            self._answer(DialFailed(address, DialReason.WRONG_IDENTITY, f"found {listener.identity.peer_id}"))
        else:
            near, far = self._network.connect(self._host, self._target, self._identity, listener.identity)
            near.is_bulk = far.is_bulk = self._is_bulk
            near.ends, far.ends = self._network.ends_of(self._host, self._target, self._address.port)
            listener.accept(far)
            self._answer(near)

    def _answer(self, outcome: SimStream | DialFailed) -> None:
        loop = self._network.loop
        life = self._life
        self._network.carry(self._target, self._host, lambda: loop.call_in(life, self._answer_came, outcome))

    def _answer_came(self, outcome: SimStream | DialFailed) -> None:
        if isinstance(outcome, SimStream):
            outcome.is_handed_over = True
        if not self._answered.done():
            self._answered.set_result(outcome)
        elif isinstance(outcome, SimStream):  # the dial was given up
            outcome.abort()
