"""All connections of one peer: the calls that it makes and those that it serves."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from manyhands.base.address import MAX_ADDRESSES, Address
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ConfigError, PeerError, PeerLost, ProtocolViolation, Refused, Timeout, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.rate import Buckets
from manyhands.rpc.address_book import AddressBook, AddressSource
from manyhands.rpc.announce import (
    ANNOUNCE,
    Announcement,
    AnnounceResponse,
    check_announced,
    check_resolved,
    dialable_addresses,
    own_hosts,
    seen_from_outside,
)
from manyhands.rpc.backoff import Backoff
from manyhands.rpc.bulk import BulkAcceptor, BulkStreams
from manyhands.rpc.config import RpcConfig
from manyhands.rpc.connection import ControlConnection
from manyhands.rpc.dial_rules import HeardDials
from manyhands.rpc.dialled_back_streams import DIAL_BACK, DIAL_BULK, DialBackStreams
from manyhands.rpc.dialling import Dialler, Opened
from manyhands.rpc.frames import CONTROL, Hello, Reject, Welcome, receive_frame, send_frame
from manyhands.rpc.gate_protocol import Gate
from manyhands.rpc.method import Method, RequestT, ResponseT
from manyhands.rpc.openers import Openers
from manyhands.rpc.outside import OutsideView
from manyhands.rpc.pool import ConnectionPool
from manyhands.rpc.punched_streams import PUNCH, PunchedStreams
from manyhands.rpc.relayed_streams import RELAY, RELAYED, RelayedStreams
from manyhands.rpc.serving import MAX_CALLS_PER_S, Guard, Served
from manyhands.rpc.streams import OpenStreams
from manyhands.rpc.striping import BYTES_OF_ONE
from manyhands.rpc.uplink import Uplink
from manyhands.rpc.ways import DIRECT, PUNCHED, Way
from manyhands.runtime.tasks import TaskOwner
from manyhands.transport.api import ControlStream, Listener, Stream, Transport, is_control
from manyhands.version import __version__

logger = logging.getLogger(__name__)

AGENT = f"manyhands/{__version__}"

LOOK_PERIOD_S = 10.0
"""Seconds between two checks of this machine's addresses."""

REACHED_S = 600.0
"""Seconds after a dial for which a peer counts as reached although it is not connected."""


class Endpoint:
    """Listens, dials, makes calls and serves them for one peer.

    Args:
        transport: opens the connections, with the identity of this peer.
        client_mode: dial out only, announce no address.
        rng: for the jitter of repeated dials, and for stream ids.

    Attributes:
        on_connected, on_lost: called with a peer when its first control connection opens, and when its last one is
            lost; closing an idle connection is not a loss.
        on_announced: called when this peer has announced other addresses.
        on_other_network: called when the addresses of this machine have changed, if it would announce these.
        on_moved: called with a connected peer that has announced other addresses.
        counters: errors, by kind.
        outside: how other peers see this one's connections.
        uplink: paces uploads to distant peers.
        gates: by run id, for runs whose members must be known; see :mod:`manyhands.access`.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        client_mode: bool = False,
        config: RpcConfig | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.identity = transport.identity
        self.peer_id = transport.identity.peer_id
        self.client_mode = client_mode
        self.addresses: list[Address] = []
        self._chosen: Sequence[Address] = ()  # by the user; empty for those of this machine
        self._with_local = True
        self.on_announced: list[Callable[[], None]] = []
        self.on_other_network: list[Callable[[], None]] = []
        self.on_moved: list[Callable[[PeerId], None]] = []
        self.counters: Counter[str] = Counter()
        self.gates: dict[str, Gate] = {}
        self._transport = transport
        self._config = config or RpcConfig()
        self._rng = rng or random.Random()
        self._handlers: dict[str, Served] = {}
        self._listeners: list[Listener] = []
        self._pool = ConnectionPool(self.peer_id, self._config)
        self.on_connected = self._pool.on_connected
        self.on_lost = self._pool.on_lost
        self._dialling: dict[PeerId, asyncio.Task[ControlConnection | Unavailable | PeerError]] = {}
        self._book = AddressBook(self._config.max_known_addresses)
        self._named: set[PeerId] = set()  # reached at addresses that the user gave
        self._replaced: WeakSet[ControlConnection] = WeakSet()
        self._reached: OrderedDict[PeerId, tuple[str, float]] = OrderedDict()  # IP address, and loop time of the dial
        self._backoff = Backoff(self._rng)
        self._call_rate = Buckets(MAX_CALLS_PER_S)
        self._streams = OpenStreams()
        self._rules = HeardDials()
        self._dialler = Dialler(transport, self._streams, self._rules)
        self._bulk = BulkStreams(self._streams, self._config, self._rng)
        self._tasks = TaskOwner("endpoint")
        self._dial_back = DialBackStreams(
            self._dialler, self._tasks, self.counters, lambda *asked: self._openers.back(*asked), self._hello,
            self._serve_stream, self._rng,
        )  # fmt: skip
        self._relayed = RelayedStreams(
            transport, self._dialler, self._streams, self._tasks, self.counters, self._config, self._open_near,
            self._serve_stream, self._is_near, self._is_relayed_for,
            lambda relay: relay in self._named and self._pool.relays_bulk(relay),
        )  # fmt: skip
        self.outside = OutsideView(transport.public_ip6)
        self._punched = PunchedStreams(
            transport, self._dialler, self._streams, self._tasks, self.counters, self.outside, self._rules.own_hosts,
            self._pool.of, self._serve_stream,
        )  # fmt: skip
        self._openers = Openers(
            self._pool, self._book, self._dialler, self._dial_back, self._relayed, self._punched,
            lambda: self.client_mode,
        )  # fmt: skip
        self.handle(PUNCH, self._punched.on_punch)
        self.handle(DIAL_BULK, self._dial_back.on_dial)
        self.handle(ANNOUNCE, self._on_announced)
        self.uplink = Uplink(self._tasks)

    # set-up and end

    async def listen(
        self, addresses: Sequence[Address], announce: Sequence[Address] = (), *, last_port: int = 0
    ) -> None:
        """Accept connections, and announce addresses that others can dial.

        Args:
            addresses: where to listen; port 0 takes a free one.
            announce: addresses to announce instead of those of this machine (behind a tunnel, say).
            last_port: for the first address, in place of port 0; logs a warning if it is taken.
        Raises:
            ConfigError: a port is taken, a host is not of this machine, or an announced address cannot be dialled or
                its name does not resolve.
        """
        check_announced(announce)
        await check_resolved(announce)
        if addresses and last_port:
            try:
                wanted = replace(addresses[0], port=last_port)
                self._listeners.append(await self._transport.listen(wanted, self._accepted))
                addresses = addresses[1:]
            except ConfigError:
                logger.warning(
                    "Port %d of the last start is taken: this peer listens on another port, and tickets with the old "
                    "one are void; make a new ticket with: manyhands ticket ADDRESS", last_port,
                )  # fmt: skip
        for address in addresses:
            self._listeners.append(await self._transport.listen(address, self._accepted))
        if bound := self.bound_addresses:
            self._rules.own_hosts |= own_hosts(bound)
        self.announce(announce)
        if any(address.is_unspecified for address in bound):
            self._tasks.spawn(self._watch_hosts(bound), name="watching the addresses of this machine")

    async def _watch_hosts(self, bound: Sequence[Address]) -> None:
        """Announce the addresses of this machine anew when they have changed: it may have joined another network."""
        local = self._local()
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            before = self.addresses
            self._rules.own_hosts |= own_hosts(bound)
            self.announce(self._chosen, with_local=self._with_local)
            local_before, local = local, self._local()
            if local != local_before:
                for callback in list(self.on_other_network):
                    callback()
            now = [str(address) for address in self.addresses if not address.is_loopback]
            if now and self.addresses != before:
                logger.info(
                    "The addresses of this machine have changed; others join with: --initial-peers %s", " ".join(now)
                )

    @property
    def bound_addresses(self) -> list[Address]:
        """The addresses that this peer listens on, with the ports that it got; empty in client mode."""
        return [address for listener in self._listeners for address in listener.addresses]

    def announce(self, addresses: Sequence[Address] = (), *, with_local: bool = False) -> None:
        """Announce other addresses from now on; connected peers are told at once, the others by them.

        Args:
            addresses: where others can dial this peer; by default, those of this machine.
            with_local: announce those of this machine beside them.
        Raises:
            ConfigError: one of them cannot be dialled.
        """
        check_announced(addresses)
        self._chosen = addresses
        self._with_local = with_local or not addresses
        announced = [] if self.client_mode else self.candidates
        if announced == self.addresses:
            return
        self.addresses = announced
        for connection in self._pool.all():
            self._tasks.spawn(self._tell_addresses(connection), name=f"announcing addresses to {connection.remote}")
        for callback in list(self.on_announced):
            callback()

    @property
    def candidates(self) -> list[Address]:
        """The addresses that this peer announces unless it is in client mode."""
        return [address.with_peer(self.peer_id) for address in [*self._chosen, *self._local()][:MAX_ADDRESSES]]

    def _local(self) -> list[Address]:
        """Those of them that are of this machine."""
        return dialable_addresses(self.bound_addresses) if self._with_local else []

    def set_client_mode(self, *, is_on: bool) -> None:
        """Enter or leave client mode; connected peers are told at once."""
        if is_on == self.client_mode:
            return
        self.client_mode = is_on
        self.announce(self._chosen, with_local=self._with_local)

    async def _tell_addresses(self, connection: ControlConnection) -> None:
        announcement = Announcement([str(address) for address in self.addresses])
        try:
            await connection.call(ANNOUNCE, announcement, self._config.dial_timeout_s)
        except (Unavailable, PeerError) as error:  # lost, or of a version that learns them when it connects again
            logger.debug("peer %s was not told the new addresses: %s", connection.remote, error)

    def _on_announced(self, remote: PeerId, request: Announcement) -> AnnounceResponse:
        way = self.way_to(remote)
        host = "" if way is not None and way.relay is not None else self.host_of(remote)  # not that of a relay
        addresses = seen_from_outside(remote, request.addresses, host)
        self._book.failed(remote)  # the addresses that worked before may lead elsewhere now
        self._book.announced(remote, addresses, host)
        self._backoff.forget(remote)
        self._pool.moved(remote, is_client=not request.addresses)
        self._punched.moved(remote)
        for callback in list(self.on_moved):
            callback(remote)
        return AnnounceResponse()

    async def close(self) -> None:
        """Tell all connected peers, and close all connections; takes a second or two at most."""
        await self._dialler.close()
        if connections := self._pool.all():
            await asyncio.wait([self._tasks.spawn(c.goodbye("shutting down"), name="goodbye") for c in connections])
        self._streams.abort_all()
        for listener in self._listeners:
            await listener.close()
        await self._tasks.close()
        await self._pool.close()
        self._transport.close()

    def handle(
        self,
        method: Method[RequestT, ResponseT],
        handler: Callable[[PeerId, RequestT], Awaitable[ResponseT] | ResponseT],
        guard: Guard | None = None,
    ) -> None:
        """Serve ``method``: ``handler(remote, request)`` returns the response, or raises ``Refused``.

        A plain function is called at once, without a task or deadline; it must not block.

        Args:
            guard: ``guard(remote)`` is called before a request is decoded, and raises ``Refused`` to refuse it.
        """
        if method.name in self._handlers:
            raise ConfigError(
                f"method {method.name} is served already; close the object that serves it, or give the new one another "
                "peer"
            )
        self._handlers[method.name] = Served(method, handler, not inspect.iscoroutinefunction(handler), guard)

    def unhandle(self, method: Method[Any, Any]) -> None:
        """Stop serving ``method``."""
        self._handlers.pop(method.name, None)

    def accept_bulk(self, kind: str, acceptor: BulkAcceptor, guard: Guard | None = None) -> None:
        """Accept bulk streams of one kind.

        Args:
            guard: as for :meth:`handle`; a stream that it refuses is not welcomed.
        Raises:
            ConfigError: this kind has an acceptor.
        """
        if kind in self._bulk.acceptors:
            raise ConfigError(
                f"streams of kind {kind!r} are accepted already; close the object that accepts them, or give the new "
                "one another peer"
            )
        self._bulk.acceptors[kind] = acceptor
        if guard is not None:
            self._bulk.guards[kind] = guard

    def refuse_bulk(self, kind: str) -> None:
        """Stop accepting bulk streams of this kind."""
        self._bulk.acceptors.pop(kind, None)
        self._bulk.guards.pop(kind, None)

    # what is known of other peers

    def learn(
        self, peer_id: PeerId, addresses: Sequence[Address], source: AddressSource = AddressSource.HEARSAY
    ) -> None:
        """Add addresses of a peer."""
        if peer_id != self.peer_id and self._book.learn(peer_id, addresses, source):
            self._backoff.forget(peer_id)

    def addresses_to_tell(self, peer_id: PeerId) -> list[Address]:
        """Return the addresses of a peer to pass on: those that it announced, whatever worked for this peer."""
        return self._book.addresses_to_tell(peer_id)

    def addresses_of(self, peer_id: PeerId) -> list[Address]:
        """Return the known addresses of a peer, the best first."""
        return self._book.addresses_of(peer_id)

    def reached_at(self, peer_id: PeerId) -> list[Address]:
        """Return the addresses at which this peer has reached another one, the latest first."""
        return self._book.reached_at(peer_id)

    @property
    def num_connected_peers(self) -> int:
        """Peers with an open control connection, including those in client mode."""
        return len({connection.remote for connection in self._pool.all() if connection.is_open})

    def is_connected(self, peer_id: PeerId) -> bool:
        """Whether a control connection to the peer is open."""
        return self._pool.is_connected(peer_id)

    def obstacle_to(self, peer_id: PeerId) -> str:
        """Why the last attempt to connect to a relayed peer without the relay failed, in words; empty if unknown."""
        return self._punched.obstacle_to(peer_id)

    def is_client(self, peer_id: PeerId) -> bool:
        """Whether the peer is connected and cannot be dialled."""
        return self._pool.is_client(peer_id)

    @property
    def was_reached(self) -> bool:
        """Whether any peer has dialled this one; if not, it may be behind a firewall."""
        return self.was_reached_since(-math.inf)

    def was_reached_since(self, time_s: float) -> bool:
        """Whether any peer has dialled this one after a loop time."""
        return self._pool.reached_at > time_s

    def has_reached(self, peer_id: PeerId) -> bool:
        """Whether this peer has dialled another one, and the last dial succeeded."""
        return self._book.is_reached(peer_id)

    def reached_host(self, peer_id: PeerId) -> str:
        """Return the IP address at which this peer dialled another one with success; empty if it is long ago.

        It counts for :data:`REACHED_S`, and as long as the other peer is connected.
        """
        host, at = self._reached.get(peer_id, ("", -math.inf))
        is_recent = asyncio.get_running_loop().time() - at < REACHED_S
        return host if is_recent or self.is_connected(peer_id) else ""

    def host_of(self, peer_id: PeerId) -> str:
        """Return the IP address of a connected peer, or of the peer that relays for it; empty if not connected."""
        return self._pool.host_of(peer_id)

    def rtt_s(self, peer_id: PeerId) -> float:
        """Return the shortest round trip to a connected peer, in seconds; infinite if unknown."""
        return self._pool.rtt_s(peer_id)

    def way_to(self, peer_id: PeerId) -> Way | None:
        """Return how the connection to a peer leads to it; None if there is none."""
        connection = self._pool.of(peer_id)
        return connection.way if connection is not None else None

    def ways(self) -> dict[PeerId, Way]:
        """Return how the connection to each connected peer leads to it."""
        return {peer_id: way for peer_id in self._pool.peers() if (way := self.way_to(peer_id)) is not None}

    def carries_bulk(self, peer_id: PeerId) -> bool:
        """Whether bulk streams to a connected peer can be opened: directly, or through a relay that forwards them."""
        connection = self._pool.of(peer_id)
        if connection is None or connection.way.relay is None:
            return connection is not None
        return self._pool.relays_bulk(connection.way.relay)

    def held(self, peer_id: PeerId) -> AbstractContextManager[None]:
        """Keep the control connection to a peer open inside the block, even without calls, for its heartbeats."""
        return self._pool.held(peer_id)

    @property
    def num_streams(self) -> int:
        """Open streams, control and bulk, dialled and accepted."""
        return len(self._streams)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent over all streams so far, control and bulk, before encryption."""
        return self._streams.bytes_sent

    # calls

    async def connect(self, address: Address, timeout_s: float | None = None) -> PeerId:
        """Open a control connection to an address that the user gave; without a peer id, whichever answers is trusted.

        Raises:
            DialFailed: with the reason.
            Refused: the peer refused the connection.
            Unavailable: this peer was closed meanwhile.
        """
        if address.peer_id is not None and self.is_connected(address.peer_id):
            self.learn(address.peer_id, [address], AddressSource.ANNOUNCED)
            self._named.add(address.peer_id)
            return address.peer_id
        hello = self._hello(CONTROL)
        opened = await self._dialler.open([address], hello, timeout_s or self._config.dial_timeout_s)
        self._note_own_host(opened.stream.remote_host)
        self._named.add(opened.stream.remote)
        was_connected = self.is_connected(opened.stream.remote)
        connection = self._opened(opened)
        if address.peer_id is None and not was_connected:
            logger.info("%s is peer %s (trusted on first use)", address, connection.remote)
        return connection.remote

    async def probe(self, address: Address, timeout_s: float, sayer: str = "") -> None:
        """Check which peer is at an address that others named, over a connection closed at once, without a hello.

        Args:
            sayer: the IP address of the peer that announces the address as its own; empty for hearsay.
        Raises:
            DialFailed: with the reason.
            Unavailable: this peer was closed.
        """
        await self._dialler.probe([address], timeout_s, {address: sayer})

    async def reach(self, peer_id: PeerId, timeout_s: float) -> None:
        """Check that a peer can be dialled, even if it is connected, in the way of :meth:`probe`.

        Raises:
            Unavailable: none of its addresses answers.
            TooEarly: it was not dialled, because the last dial failed a moment ago.
        """
        self._book.check_known(peer_id)
        now = asyncio.get_running_loop().time()
        self._backoff.check(peer_id, now)
        try:
            address, host = await self._dialler.probe(
                self._book.addresses_of(peer_id), timeout_s, self._book.heard(peer_id)
            )
        except Unavailable as error:
            self._dial_failed(peer_id, error)
            raise
        self._backoff.forget(peer_id)
        self._note_reached(peer_id, address, host)

    async def call_on(self, peer_id: PeerId, timeout_s: float) -> None:
        """Open a control connection to a peer unless there is one; a peer in client mode can then dial back streams.

        Raises:
            Unavailable, PeerError: it could not be opened.
        """
        await self._connection(peer_id, timeout_s)

    async def call(
        self, peer_id: PeerId, method: Method[RequestT, ResponseT], request: RequestT, timeout_s: float = 5.0
    ) -> ResponseT:
        """Call a method of a peer, dialling it if there is no connection.

        Raises:
            Unavailable: it cannot be reached, was lost, or did not answer in time.
            Refused: it refused the call.
            ProtocolViolation: its answer cannot be read.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        connection = await self._connection(peer_id, timeout_s)
        return await connection.call(method, request, max(deadline - loop.time(), 0.01))

    async def open_bulk(
        self, peer_id: PeerId, kind: str, header: bytes, timeout_s: float = 5.0, *, size_bytes: int = 0
    ) -> Stream:
        """Open a separate stream for bulk data, over several connections if the round trip is long.

        A connected peer that is in client mode, or that announced addresses at which it is not reached, is asked to
        dial back; see :mod:`manyhands.rpc.dialled_back_streams`.

        Args:
            size_bytes: about how much will be sent in either direction; small sizes use one connection.
        Raises:
            Unavailable: the peer cannot be dialled.
            Refused: it refuses this stream.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        may_need_relay = self.client_mode and bool(self._pool.relays())
        if may_need_relay or size_bytes >= 2 * BYTES_OF_ONE:
            await self._connection(peer_id, timeout_s)  # finds the way, and measures the round trip
        open_one = self._openers.bulk(peer_id, deadline - loop.time())
        hello = self._hello(kind, header)
        return await self._bulk.open(open_one, hello, rtt_s=self.rtt_s(peer_id), size_bytes=size_bytes)

    def _is_relayed_for(self, peer_id: PeerId) -> bool:
        """Whether this peer relays for another one: for all, or if it is in runs with charters for those they know."""
        for gate in self.gates.values():
            try:
                gate.check(peer_id, for_observers=True)
            except Refused:
                continue
            return True
        return not self.gates

    def _is_near(self, peer_id: PeerId) -> bool:
        """Whether a peer is connected without a relay, or the last dial of it succeeded."""
        connection = self._pool.of(peer_id)
        return connection.way.relay is None if connection is not None else self._book.is_reached(peer_id)

    async def _open_near(self, peer_id: PeerId, hello: Hello, timeout_s: float) -> Opened:
        """Open a bulk connection to a peer that is connected without a relay, or that can be dialled."""
        return await self._openers.bulk(peer_id, timeout_s)(hello)

    def release(self, stream: Stream) -> None:
        """Abort a stream that :meth:`open_bulk` opened, and count its bytes."""
        self._bulk.release(stream)

    def fell_short(self, stream: Stream) -> None:
        """Note that a stream that :meth:`open_bulk` opened ends without all its data.

        If the other peer is still connected, relays of the stream are asked after others from now on, and connections
        through them are replaced: they may hang as well, and would be lost only after the heartbeat timeout.
        """
        if not self.is_connected(stream.remote):
            return
        for relay in self._bulk.relays_of(stream):
            self._relayed.failed(relay)
            for connection in self._pool.all():
                if connection.way.relay == relay and connection.is_open and connection not in self._replaced:
                    self._replaced.add(connection)
                    self._tasks.spawn(self._replace(connection), name=f"another relay to {connection.remote}")

    async def _replace(self, connection: ControlConnection) -> None:
        """Connect to the same peer through another relay, if there is one; the pool then closes the old connection."""
        relays = [relay for relay in self._pool.relays() if relay not in (connection.way.relay, connection.remote)]
        hello = self._hello(CONTROL)
        with suppress(Unavailable, PeerError):
            self._opened(await self._relayed.open(relays, connection.remote, hello, self._config.dial_timeout_s))

    async def _connection(self, peer_id: PeerId, timeout_s: float) -> ControlConnection:
        """Return an open connection, dialled if needed; calls on it must begin before the loop runs other tasks."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (connection := self._pool.of(peer_id)) is None:
            dialled = await self._dial_shared(peer_id, timeout_s)
            timeout_s = deadline - loop.time()
            if dialled.lost is not None and not dialled.is_retired:
                raise PeerLost(peer_id, dialled.lost.reason)
            # else it may have been closed since, as the other end dialled too
        return connection

    async def _dial_shared(self, peer_id: PeerId, timeout_s: float) -> ControlConnection:
        if peer_id == self.peer_id:
            raise Unavailable("this peer cannot call itself")
        self._dialler.check_open()
        if peer_id not in self._dialling:  # concurrent callers share one dial
            self._begin_dial(peer_id)
        dial = self._dialling[peer_id]
        await asyncio.wait([dial], timeout=timeout_s)
        if not dial.done():
            raise Timeout(f"connecting to peer {peer_id}", timeout_s)
        self._dialler.check_open()
        outcome = dial.result()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _begin_dial(self, peer_id: PeerId) -> None:
        self._backoff.check(peer_id, asyncio.get_running_loop().time())
        task = self._tasks.spawn(self._dial_control(peer_id), name=f"dial {peer_id}")
        self._dialling[peer_id] = task
        task.add_done_callback(lambda _: self._dialling.pop(peer_id))

    async def _dial_control(self, peer_id: PeerId) -> ControlConnection | Unavailable | PeerError:
        """Return a connection, or the failure as a value, since all callers may have given up."""
        try:
            opening = self._openers.open_control(peer_id, self._hello(CONTROL), self._config.dial_timeout_s)
            return self._opened(await opening)
        except (Unavailable, PeerError) as error:
            self._dial_failed(peer_id, error)
            return error

    def _dial_failed(self, peer_id: PeerId, error: Exception) -> None:
        self._backoff.failed(peer_id, asyncio.get_running_loop().time(), str(error))
        self._book.failed(peer_id)

    def _hello(self, purpose: str, header: bytes = b"") -> Hello:
        return Hello(purpose, AGENT, [str(address) for address in self.addresses], header)

    def _opened(self, opened: Opened) -> ControlConnection:
        assert is_control(opened.stream), "the purpose in the hello is control"
        connection = self._new_connection(opened.stream, opened.welcome.addresses, is_dialled=True, way=opened.way)
        connection.rtt_s = opened.rtt_s
        connection.relays = opened.welcome.relays
        is_first = not self._rules.own_hosts  # in client mode, and no peer named by the user was reached
        if is_first and opened.way.relay is None:
            self._note_own_host(opened.stream.remote_host)
        if opened.address is not None:
            self._note_reached(connection.remote, opened.address, opened.stream.remote_host)
        if opened.way == DIRECT and opened.welcome.seen_host and (ends := opened.stream.ends) is not None:
            seen = opened.welcome.seen_host, opened.welcome.seen_port
            if self.outside.note(connection.remote, seen, ends.here):
                self._punched.moved()
        run = self._run if opened.way.relay is None else self._run_relayed
        self._tasks.spawn(run(connection, opened.stream), name=f"connection to {connection.remote}")
        return connection

    async def _run_relayed(self, connection: ControlConnection, stream: ControlStream) -> None:
        """Run a connection through a relay, and replace it by one without a relay if that is possible."""
        name = f"a way to {connection.remote} without a relay"
        async with self._tasks.beside(self._leave_relay(connection), name=name):
            await self._run(connection, stream)

    async def _leave_relay(self, connection: ControlConnection) -> None:
        remote = connection.remote
        dial = functools.partial(self._openers.dial, remote)
        opened = await self._punched.open_some_time(connection, lambda: self._hello(CONTROL), dial)
        self._opened(opened)
        how = "both have dialled at the same time" if opened.way == PUNCHED else "it could be dialled"
        logger.info("Peer %s is connected without a relay now: %s", remote, how)

    def _note_reached(self, peer_id: PeerId, address: Address, host: str) -> None:
        self.learn(peer_id, [address], AddressSource.WORKED)
        self._reached[peer_id] = host, asyncio.get_running_loop().time()
        self._reached.move_to_end(peer_id)
        if len(self._reached) > self._config.max_known_addresses:
            # those that are connected last: many new identities do not have this peer forget the trainers of its run
            gone = (one for one in self._reached if not self.is_connected(one))
            del self._reached[next(gone, next(iter(self._reached)))]

    def _note_own_host(self, remote_host: str) -> None:
        """Note that this peer has reached another one by itself, and so is in the network of that one."""
        self._rules.own_hosts |= own_hosts([]) | ({remote_host} if remote_host else set())

    # accepted streams

    async def _accepted(self, stream: Stream) -> None:
        self._streams.add(stream)
        self._pool.reached()
        await self._serve_stream(stream)

    async def _serve_stream(self, stream: Stream, way: Way = DIRECT) -> None:
        """Serve a stream for the purpose in its hello."""
        try:
            async with time_limit(self._config.hello_timeout_s, "waiting for a hello"):
                hello = await receive_frame(stream)
            if not isinstance(hello, Hello):
                raise ProtocolViolation(stream.remote, f"began with a {type(hello).__name__} frame")
            await self._welcome(stream, hello, way)
        except PeerError as error:
            self.counters["protocol_violations"] += 1
            logger.warning("%s; its stream is dropped", error)
        except Unavailable as error:
            logger.debug("stream from %s: %s", stream.remote, error)
        finally:
            self._streams.release(stream)

    async def _welcome(self, stream: Stream, hello: Hello, way: Way) -> None:
        relays = self._config.relay_mbit_s is not None
        welcome = Welcome(AGENT, [str(address) for address in self.addresses], relays=relays)
        if is_control(stream) and way == DIRECT and (ends := stream.ends) is not None:
            welcome.seen_host, welcome.seen_port = ends.there
        if is_control(stream) and hello.purpose == CONTROL:
            if self._pool.has_room():
                connection = self._new_connection(stream, hello.addresses, is_dialled=False, way=way)
                await self._run(connection, stream, welcome)
            else:
                self.counters["refused_full"] += 1
                await self._reject(stream, "full", f"this peer has {len(self._pool)} connections already")
        elif stream.is_bulk and hello.purpose == DIAL_BACK:
            try:
                await self._dial_back.arrived(stream, hello, welcome)
            except Refused as refusal:
                await self._reject(stream, refusal.code, refusal.message)
        elif stream.is_bulk and hello.purpose == RELAY and way.relay is None:
            try:
                await self._relayed.asked(stream, hello, welcome)
            except Refused as refusal:
                await self._reject(stream, refusal.code, refusal.message)
        elif stream.is_bulk and hello.purpose == RELAYED and way.relay is None:
            await self._relayed.arrived(stream, welcome)
        elif stream.is_bulk and (acceptor := self._bulk.acceptors.get(hello.purpose)) is not None:
            try:
                self._bulk.check(stream.remote, hello.purpose)
            except Refused as refusal:
                await self._reject(stream, refusal.code, refusal.message)
                return
            await send_frame(stream, welcome)
            await self._bulk.serve(stream, hello, acceptor)
        else:
            await self._reject(stream, "unknown_purpose", f"no streams of kind {hello.purpose[:80]!r} here")

    async def _reject(self, stream: Stream, code: str, message: str) -> None:
        async with time_limit(self._config.hello_timeout_s, "refusing a stream"):
            await send_frame(stream, Reject(code, message))
            await stream.close()

    # connections

    def _new_connection(
        self, stream: ControlStream, addresses: list[str], *, is_dialled: bool, way: Way
    ) -> ControlConnection:
        """Register a connection for calls; :meth:`_run` must follow."""
        host = stream.remote_host if way.relay is None else ""  # of the relay
        seen = seen_from_outside(stream.remote, addresses, host)
        self._book.announced(stream.remote, seen, host)
        self._backoff.connected(stream.remote, asyncio.get_running_loop().time())
        connection = ControlConnection(
            stream,
            not addresses,
            self._handlers,
            self._config,
            self.counters,
            self._call_rate,
            is_dialled=is_dialled,
            way=way,
        )
        connection.on_drain = functools.partial(self._drained, stream.remote)
        self._pool.enter(connection)
        return connection

    def _drained(self, peer_id: PeerId) -> None:
        """Dial a peer again after it has retired a connection whose heartbeats this end needs."""
        if self._pool.is_held(peer_id) and not self.is_connected(peer_id) and peer_id not in self._dialling:
            with suppress(Unavailable, RuntimeError):  # nothing left to do but to wait for the loss
                self._begin_dial(peer_id)

    async def _run(self, connection: ControlConnection, stream: ControlStream, welcome: Welcome | None = None) -> None:
        try:
            if welcome is not None:
                await send_frame(stream, welcome)
            lost = await connection.run()
            logger.debug("%s", lost)
        finally:
            self._streams.release(stream)
            connection.end(PeerLost(connection.remote, "the connection was closed here"))
            was_closed = connection.is_retired or connection.has_said_goodbye
            if connection.way.relay is not None and not was_closed:
                self._relayed.failed(connection.way.relay)
            self._pool.remove(connection)
            if not self.is_connected(connection.remote) and self.outside.forget(connection.remote):
                self._punched.moved()
            await connection.close()
