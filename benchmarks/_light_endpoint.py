"""A stand-in for :class:`manyhands.rpc.Endpoint` in virtual time: whole messages, without connections.

For swarms of thousands of nodes in one process. The model:

    * each pair of peers has its own latency, drawn once; a response takes as long as the request;
    * two peers that talked within the last 20 s are *linked*; other calls begin with a dial, which takes five more
      trips (TCP, TLS 1.3, hello);
    * a *killed* peer refuses dials, and the peers linked to it are notified at once; dials and calls to a peer whose
      machine *vanished* time out, and its links end after the time that heartbeats take;
    * failed dials are repeated no sooner than by a real endpoint;
    * bytes are those of the encoded frames, plus 22 for the TLS record of each.

There is no TLS or decoding, no message to a living peer is lost, and heartbeats and the bytes of handshakes are left
out: dials are counted, and ``benchmarks/simulation.py`` has heartbeats. All handlers must be plain functions, as those
of the DHT are.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from manyhands.base.address import Address
from manyhands.base.errors import DialFailed, DialReason, PeerError, PeerLost, Timeout, Unavailable
from manyhands.base.identity import Identity, PeerId
from manyhands.rpc import AddressSource, Method, RpcConfig
from manyhands.rpc.backoff import Backoff
from manyhands.rpc.frames import Request, Response, encode_frame
from manyhands.testing import VirtualLoop

TLS_RECORD_BYTES = 22  # header of 5, type of 1, tag of 16 (RFC 8446, section 5.2)
DIAL_TRIPS = 5  # SYN, SYN-ACK, ClientHello, ServerHello, hello; the request follows the welcome
RPC = RpcConfig()
watching: contextvars.ContextVar[Watch | None] = contextvars.ContextVar("watching", default=None)
_encoder = msgspec.msgpack.Encoder()
_RESPONSE_BYTES = len(encode_frame(Response(1 << 20, msgspec.Raw(b"")))) + TLS_RECORD_BYTES


class Watch:
    """Counts the calls of one operation and its tasks; set :data:`watching` to it in the task that begins it.

    Attributes:
        num_calls: calls made.
        num_hops: length of the longest chain of peers in which each named the next.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_hops = 0
        self._hops: dict[PeerId, int] = {}

    def asks(self, peer_id: PeerId) -> None:
        self.num_calls += 1
        self.num_hops = max(self.num_hops, self._hops.setdefault(peer_id, 1))

    def hears(self, peer_id: PeerId, answer: Any) -> None:
        for contact in getattr(answer, "contacts", ()):
            self._hops.setdefault(contact.peer_id, self._hops[peer_id] + 1)


class LightNetwork:
    """All peers, and counts of what they have sent.

    Args:
        min_rtt_s, max_rtt_s: bounds of the pairs' round trips, which are uniformly distributed.

    Attributes:
        endpoints: living ones, by peer id.
        num_calls: by method; num_bytes: the same, for requests and responses.
        num_failed: calls without a response.
        num_dials: dials made, including failed ones.
    """

    def __init__(self, loop: VirtualLoop, seed: int, min_rtt_s: float = 0.02, max_rtt_s: float = 0.1) -> None:
        self.loop = loop
        self.endpoints: dict[PeerId, LightEndpoint] = {}
        self.num_calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.num_failed = 0
        self.num_dials = 0
        self._seed = seed
        self._min_s, self._range_s = min_rtt_s / 2, (max_rtt_s - min_rtt_s) / 2
        self._all: list[LightEndpoint] = []
        self._by_place: dict[tuple[str, int], LightEndpoint] = {}
        self._by_id: dict[PeerId, LightEndpoint] = {}
        self._method_bytes: dict[str, int] = {}
        self._bytes_of_contact: dict[PeerId, int] = {}

    def add(self, identity: Identity, rng: random.Random) -> LightEndpoint:
        """A new peer."""
        number = len(self._all)
        host = f"{11 + (number >> 16)}.{number >> 8 & 255}.{number & 255}.2"  # each in a network of its own
        endpoint = LightEndpoint(self, number, identity, Address.of(host, 31337, identity.peer_id), rng)
        self._all.append(endpoint)
        self._by_place[host, 31337] = self._by_id[identity.peer_id] = self.endpoints[identity.peer_id] = endpoint
        return endpoint

    def end(self, endpoint: LightEndpoint, *, is_vanished: bool) -> None:
        """Remove a peer: its process was killed, or its whole machine vanished."""
        del self.endpoints[endpoint.peer_id]
        endpoint.is_alive = False
        endpoint.is_vanished = is_vanished
        for other in endpoint.linked():
            after_s = RPC.heartbeat_timeout_s if is_vanished else self.latency_s(endpoint, other)
            self.loop.call_outside(self.loop.now + after_s, other.lost, endpoint)
        endpoint.forget_all()

    def of(self, peer_id: PeerId) -> LightEndpoint:
        """A peer, dead or alive.

        Raises:
            Unavailable: there never was one.
        """
        try:
            return self._by_id[peer_id]
        except KeyError:
            raise Unavailable(f"no address is known for peer {peer_id}") from None

    def at(self, address: Address) -> LightEndpoint:
        """The endpoint, living or dead, that listens at an address."""
        return self._by_place[address.host, address.port]

    def latency_s(self, one: LightEndpoint, other: LightEndpoint) -> float:
        """One-way latency; constant for each pair."""
        low, high = one.number, other.number
        if low > high:
            low, high = high, low
        mixed = (low * 0x9E3779B1 ^ high * 0x85EBCA6B ^ self._seed * 0xC2B2AE35) & 0xFFFFFFFF
        mixed = (mixed ^ mixed >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
        return self._min_s + self._range_s * ((mixed >> 12 & 0xFFFF) / 0xFFFF)

    def count(self, name: str, body: object) -> None:
        """Count a request."""
        overhead = self._method_bytes.get(name)
        if overhead is None:
            overhead = len(encode_frame(Request(1 << 20, name, 3.0, msgspec.Raw(b"")))) + TLS_RECORD_BYTES
            self._method_bytes[name] = overhead
        self.num_calls[name] += 1
        self.num_bytes[name] += len(_encoder.encode(body)) + overhead

    def count_answer(self, name: str, body: Any) -> None:
        """Count a response."""
        num_bytes = _RESPONSE_BYTES
        if contacts := getattr(body, "contacts", None):  # most of the bytes are contacts; each is encoded once
            num_bytes += sum([self._contact_bytes(contact) for contact in contacts])
            body = msgspec.structs.replace(body, contacts=[])
        self.num_bytes[name] += len(_encoder.encode(body)) + num_bytes

    def _contact_bytes(self, contact: Any) -> int:
        num_bytes = self._bytes_of_contact.get(contact.peer_id)
        if num_bytes is None:
            num_bytes = self._bytes_of_contact[contact.peer_id] = len(_encoder.encode(contact))
        return num_bytes


class LightEndpoint:
    """The part of an endpoint that a DHT node uses; see the top of this file."""

    client_mode = False

    def __init__(
        self, network: LightNetwork, number: int, identity: Identity, address: Address, rng: random.Random
    ) -> None:
        self.number = number
        self.identity = identity
        self.peer_id = identity.peer_id
        self.addresses = [address]
        self.on_lost: list[Callable[[PeerId], None]] = []
        self.on_moved: list[Callable[[PeerId], None]] = []  # nobody moves
        self.is_alive = True
        self.is_vanished = False
        self.num_served = 0
        self._network = network
        self._loop = network.loop
        self._handlers: dict[str, Callable[[PeerId, Any], Any]] = {}
        self._used_at: dict[LightEndpoint, float] = {}  # by peer
        self._look_at = 64
        self._backoff = Backoff(rng)
        self.was_reached = False
        self._reached: set[PeerId] = set()

    # the interface that the DHT uses

    def handle(self, method: Method[Any, Any], handler: Callable[[PeerId, Any], Any]) -> None:
        self._handlers[method.name] = handler

    def host_of(self, peer_id: PeerId) -> str:
        """A separate machine for each node."""
        return peer_id

    def unhandle(self, method: Method[Any, Any]) -> None:
        self._handlers.pop(method.name, None)

    def learn(
        self, peer_id: PeerId, addresses: Sequence[Address], source: AddressSource = AddressSource.HEARSAY
    ) -> None:
        """Does nothing: the network knows all addresses."""

    def addresses_of(self, peer_id: PeerId) -> list[Address]:
        return self._network.of(peer_id).addresses

    addresses_to_tell = addresses_of

    def is_connected(self, peer_id: PeerId) -> bool:
        return self._is_linked(self._network.of(peer_id))

    carries_bulk = is_connected

    def is_client(self, peer_id: PeerId) -> bool:
        return False

    def reached_at(self, peer_id: PeerId) -> list[Address]:
        return self.addresses_of(peer_id) if self.has_reached(peer_id) else []

    def has_reached(self, peer_id: PeerId) -> bool:
        return peer_id in self._reached

    async def reach(self, peer_id: PeerId, timeout_s: float) -> None:
        await self._dial(self._network.of(peer_id), timeout_s)

    async def connect(self, address: Address, timeout_s: float | None = None) -> PeerId:
        other = self._network.at(address)
        if other is self:
            raise DialFailed(str(address), DialReason.ITSELF)
        if not self._is_linked(other):
            await self._dial(other, timeout_s or RPC.dial_timeout_s)
            if other.is_alive:
                self.link(other)
        return other.peer_id

    async def call(self, peer_id: PeerId, method: Method[Any, Any], request: Any, timeout_s: float = 5.0) -> Any:
        network, loop, watch = self._network, self._loop, watching.get()
        other = network.of(peer_id)
        deadline = loop.now + timeout_s
        if watch is not None:
            watch.asks(peer_id)
        is_dial = not self._is_linked(other)
        if is_dial:
            if not other.is_alive:
                await self._dial(other, timeout_s)  # fails
            self._backoff.check(peer_id, loop.now)
            network.num_dials += 1
        elif other.is_alive:
            self.link(other)
        answered = loop.create_future()
        network.count(method.name, request)
        arrives = loop.now + network.latency_s(self, other) * (1 + DIAL_TRIPS * is_dial)
        loop.call_outside(arrives, self._arrived, other, method.name, request, answered, deadline)
        outcome = await answered
        if isinstance(outcome, Exception):
            network.num_failed += 1
            if is_dial:
                self._reached.discard(peer_id)
            raise outcome
        if is_dial:
            self._reached.add(peer_id)
            other.was_reached = True
        if watch is not None:
            watch.hears(peer_id, outcome)
        return outcome

    # links

    def linked(self) -> list[LightEndpoint]:
        """Peers with which it talked recently."""
        return [other for other in self._used_at if self._is_linked(other)]

    def link(self, other: LightEndpoint) -> None:
        """Note that a link was used just now."""
        self._used_at[other] = other._used_at[self] = self._loop.now
        if len(self._used_at) > self._look_at:
            self._tidy()
        if len(other._used_at) > other._look_at:
            other._tidy()

    def lost(self, other: LightEndpoint) -> None:
        """Break the link to a peer."""
        if self.is_alive and self._used_at.pop(other, None) is not None:
            for callback in self.on_lost:
                callback(other.peer_id)

    def forget_all(self) -> None:
        """Drop all links."""
        self._used_at.clear()
        self._handlers.clear()

    def _is_linked(self, other: LightEndpoint) -> bool:
        used_at = self._used_at.get(other)
        return used_at is not None and (self._loop.now - used_at < RPC.idle_timeout_s or not other.is_alive)

    def _tidy(self) -> None:
        self._used_at = {other: at for other, at in self._used_at.items() if self._is_linked(other)}
        self._look_at = 2 * len(self._used_at) + 64

    # messages

    async def _dial(self, other: LightEndpoint, timeout_s: float) -> None:
        self._backoff.check(other.peer_id, self._loop.now)
        self._network.num_dials += 1
        trip_s = self._network.latency_s(self, other)
        if other.is_alive:
            await asyncio.sleep(DIAL_TRIPS * trip_s)
        if other.is_alive:
            self._reached.add(other.peer_id)
            other.was_reached = True
            return
        self._reached.discard(other.peer_id)
        await asyncio.sleep(min(timeout_s, RPC.dial_timeout_s) if other.is_vanished else 2 * trip_s)
        reason = DialReason.TIMED_OUT if other.is_vanished else DialReason.REFUSED
        self._backoff.failed(other.peer_id, self._loop.now, reason.value)
        self._network.num_failed += 1
        raise DialFailed(str(other.addresses[0]), reason)

    def _arrived(
        self, other: LightEndpoint, name: str, request: Any, answered: asyncio.Future[Any], deadline: float
    ) -> None:
        """Handle a request at the other end."""
        loop, network = self._loop, self._network
        trip_s = network.latency_s(self, other)
        if not other.is_alive:
            if other.is_vanished:
                error: Exception = Timeout(f"waiting for {name} of peer {other.peer_id}", deadline - loop.now)
                loop.call_outside(deadline, _settle, answered, error)
            else:
                error = PeerLost(other.peer_id, "the process ended")
                loop.call_outside(loop.now + trip_s, _settle, answered, error)
            return
        self.link(other)
        handler = other._handlers.get(name)
        other.num_served += 1
        answer = handler(self.peer_id, request) if handler else PeerError(other.peer_id, f"no method {name}")
        network.count_answer(name, answer if handler else None)
        loop.call_outside(loop.now + trip_s, _settle, answered, answer)


def _settle(answered: asyncio.Future[Any], outcome: Any) -> None:
    if not answered.done():
        answered.set_result(outcome)
