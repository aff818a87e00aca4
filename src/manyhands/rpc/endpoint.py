"""All connections of one peer: who can be called, and what it serves."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from manyhands.base.address import Address
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ConfigError, PeerError, ProtocolViolation, Timeout, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc.announce import dialable_addresses, seen_from_outside
from manyhands.rpc.config import RpcConfig
from manyhands.rpc.connection import ControlConnection, Handler
from manyhands.rpc.dialling import Dialler
from manyhands.rpc.frames import CONTROL, Hello, Reject, Welcome, receive_frame, send_frame
from manyhands.rpc.method import Method, Request, Response
from manyhands.rpc.streams import OpenStreams
from manyhands.runtime.tasks import TaskOwner
from manyhands.transport.api import Listener, Stream, Transport
from manyhands.version import __version__

logger = logging.getLogger(__name__)

AGENT = f"manyhands/{__version__}"
MAX_ADDRESSES_PER_PEER = 8

BulkAcceptor = Callable[[PeerId, bytes, Stream], Awaitable[None]]
"""Called with (remote, header, stream) for each bulk stream; the stream is aborted when it returns."""


class Endpoint:
    """One peer as the others see it: it listens, dials, calls and is called.

    Args:
        transport: how to reach others, and as whom.
        client_mode: dial out only, announce no address.
    """

    def __init__(self, transport: Transport, *, client_mode: bool = False, config: RpcConfig | None = None) -> None:
        self.identity = transport.identity
        self.peer_id = transport.identity.peer_id
        self.client_mode = client_mode
        self.addresses: list[Address] = []
        self.on_connected: list[Callable[[PeerId], None]] = []
        self.on_lost: list[Callable[[PeerId], None]] = []
        self.counters: Counter[str] = Counter()
        self._transport = transport
        self._config = config or RpcConfig()
        self._handlers: dict[str, tuple[Method[Any, Any], Handler]] = {}
        self._acceptors: dict[str, BulkAcceptor] = {}
        self._listeners: list[Listener] = []
        self._connections: dict[PeerId, list[ControlConnection]] = {}
        self._dialling: dict[PeerId, asyncio.Task[ControlConnection | Unavailable | PeerError]] = {}
        self._known: OrderedDict[PeerId, list[Address]] = OrderedDict()
        self._streams = OpenStreams()
        self._dialler = Dialler(transport, self._streams)
        self._tasks = TaskOwner("endpoint")

    # set-up and end

    async def listen(self, addresses: Sequence[Address], announce: Sequence[Address] = ()) -> None:
        """Accept connections, and announce where others can dial.

        Args:
            addresses: where to listen; port 0 takes a free one.
            announce: what to tell others instead of what this machine finds out by itself (behind a tunnel, say).
        Raises:
            ConfigError: a port is taken or a host is not of this machine.
        """
        for address in addresses:
            self._listeners.append(await self._transport.listen(address, self._accepted))
        bound = [address for listener in self._listeners for address in listener.addresses]
        chosen = list(announce) or dialable_addresses(bound)
        self.addresses = [address.with_peer(self.peer_id) for address in chosen]

    async def close(self) -> None:
        """Say goodbye to everybody and close all connections; takes a second or two at most."""
        await self._dialler.close()
        connections = [connection for group in self._connections.values() for connection in group]
        if connections:
            await asyncio.wait([self._tasks.spawn(c.goodbye("it is closing"), name="goodbye") for c in connections])
        self._streams.abort_all()
        for listener in self._listeners:
            await listener.close()
        await self._tasks.close()

    def handle(
        self, method: Method[Request, Response], handler: Callable[[PeerId, Request], Awaitable[Response]]
    ) -> None:
        """Serve ``method``: ``handler(remote, request)`` returns the response, or raises ``Refused``."""
        if method.name in self._handlers:
            raise ConfigError(f"method {method.name} is served already; a peer holds one part of each kind")
        self._handlers[method.name] = (method, handler)

    def unhandle(self, method: Method[Any, Any]) -> None:
        """Serve ``method`` no longer."""
        self._handlers.pop(method.name, None)

    def accept_bulk(self, kind: str, acceptor: BulkAcceptor) -> None:
        """Take bulk streams of one kind."""
        self._acceptors[kind] = acceptor

    def refuse_bulk(self, kind: str) -> None:
        """Take bulk streams of this kind no longer."""
        self._acceptors.pop(kind, None)

    # what is known of others

    def learn(self, peer_id: PeerId, addresses: Sequence[Address]) -> None:
        """Remember where a peer can be dialled."""
        if peer_id == self.peer_id or not addresses:
            return
        known = [address.with_peer(peer_id) for address in addresses]
        known += [address for address in self._known.get(peer_id, []) if address not in known]
        self._known[peer_id] = known[:MAX_ADDRESSES_PER_PEER]
        self._known.move_to_end(peer_id)
        while len(self._known) > self._config.max_known_addresses:
            self._known.popitem(last=False)

    def addresses_of(self, peer_id: PeerId) -> list[Address]:
        """Where a peer can be dialled, as far as is known here."""
        return list(self._known.get(peer_id, []))

    def is_connected(self, peer_id: PeerId) -> bool:
        """Whether a control connection to the peer is open."""
        return any(connection.lost is None for connection in self._connections.get(peer_id, []))

    def is_client(self, peer_id: PeerId) -> bool:
        """Whether the peer is connected and cannot be dialled."""
        connections = self._connections.get(peer_id)
        return connections is not None and not any(connection.addresses for connection in connections)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent over all streams so far, control and bulk, before encryption."""
        return self._streams.bytes_sent

    # calls

    async def connect(self, address: Address, timeout_s: float | None = None) -> PeerId:
        """Open a control connection to an address; without a peer id in it, whoever answers is trusted.

        Raises:
            DialFailed: with the reason.
            Refused: the peer turned the connection down.
            Unavailable: this peer was closed meanwhile.
        """
        if address.peer_id is not None and self.is_connected(address.peer_id):
            return address.peer_id
        hello = self._hello(CONTROL)
        stream, welcome = await self._dialler.open([address], hello, timeout_s or self._config.dial_timeout_s)
        connection = self._opened(stream, welcome)
        self.learn(stream.remote, [address])
        if address.peer_id is None:
            logger.info("%s is peer %s (trusted on first use)", address, connection.remote)
        return connection.remote

    async def call(
        self, peer_id: PeerId, method: Method[Request, Response], request: Request, timeout_s: float = 5.0
    ) -> Response:
        """Call a method of a peer, dialling it if there is no connection.

        Raises:
            Unavailable: it cannot be reached, was lost, or did not answer in time.
            Refused: it said no.
            ProtocolViolation: its answer cannot be read.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        connection = await self._connection(peer_id, timeout_s)
        return await connection.call(method, request, max(deadline - loop.time(), 0.01))

    async def open_bulk(self, peer_id: PeerId, kind: str, header: bytes, timeout_s: float = 5.0) -> Stream:
        """Dial a stream of its own for bulk data.

        Raises:
            Unavailable: the peer cannot be dialled.
            Refused: it does not take this stream.
        """
        hello = self._hello(kind, header)
        stream, _ = await self._dialler.open(self._addresses_to_dial(peer_id), hello, timeout_s)
        return stream

    def release(self, stream: Stream) -> None:
        """Abort a bulk stream that :meth:`open_bulk` opened, and count its bytes."""
        self._streams.release(stream)

    async def _connection(self, peer_id: PeerId, timeout_s: float) -> ControlConnection:
        for connection in reversed(self._connections.get(peer_id, [])):  # the newest: a peer that crashed may be back
            if connection.lost is None:
                return connection
        if peer_id == self.peer_id:
            raise Unavailable("a peer does not call itself")
        self._dialler.check_open()
        if peer_id not in self._dialling:  # callers at the same time share one dial
            task = self._tasks.spawn(self._dial_control(peer_id), name=f"dial {peer_id}")
            self._dialling[peer_id] = task
            task.add_done_callback(lambda _: self._dialling.pop(peer_id))
        dial = self._dialling[peer_id]
        await asyncio.wait([dial], timeout=timeout_s)
        if not dial.done():
            raise Timeout(f"connecting to peer {peer_id}", timeout_s)
        self._dialler.check_open()
        outcome = dial.result()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _dial_control(self, peer_id: PeerId) -> ControlConnection | Unavailable | PeerError:
        """A connection, or why there is none: as a value, since those who wanted it may have given up."""
        try:
            addresses, hello = self._addresses_to_dial(peer_id), self._hello(CONTROL)
            return self._opened(*await self._dialler.open(addresses, hello, self._config.dial_timeout_s))
        except (Unavailable, PeerError) as error:
            return error

    def _addresses_to_dial(self, peer_id: PeerId) -> list[Address]:
        if not self._known.get(peer_id):
            raise Unavailable(f"no address is known for peer {peer_id}; a peer in client mode cannot be dialled")
        return self._known[peer_id]

    def _hello(self, purpose: str, header: bytes = b"") -> Hello:
        return Hello(purpose, AGENT, [str(address) for address in self.addresses], header)

    def _opened(self, stream: Stream, welcome: Welcome) -> ControlConnection:
        connection = self._new_connection(stream, welcome.addresses)
        self._tasks.spawn(self._run(connection, stream), name=f"connection to {stream.remote}")
        return connection

    # accepted streams

    async def _accepted(self, stream: Stream) -> None:
        self._streams.add(stream)
        try:
            async with time_limit(self._config.hello_timeout_s, "waiting for a hello"):
                hello = await receive_frame(stream)
            if not isinstance(hello, Hello):
                raise ProtocolViolation(stream.remote, f"began with a {type(hello).__name__} frame")
            await self._welcome(stream, hello)
        except PeerError as error:
            self.counters["protocol_violations"] += 1
            logger.warning("%s; its stream is dropped", error)
        except Unavailable as error:
            logger.debug("stream from %s: %s", stream.remote, error)
        finally:
            self._streams.release(stream)

    async def _welcome(self, stream: Stream, hello: Hello) -> None:
        welcome = Welcome(AGENT, [str(address) for address in self.addresses])
        if hello.purpose == CONTROL:
            await self._run(self._new_connection(stream, hello.addresses), stream, welcome)
        elif (acceptor := self._acceptors.get(hello.purpose)) is not None:
            await send_frame(stream, welcome)
            await acceptor(stream.remote, hello.header, stream)
        else:
            await send_frame(stream, Reject("unknown_purpose", f"no streams of kind {hello.purpose[:80]!r} here"))
            await stream.close()

    # connections

    def _new_connection(self, stream: Stream, addresses: list[str]) -> ControlConnection:
        """Enter a connection; from now on it is used for calls, and :meth:`_run` must follow."""
        self.learn(stream.remote, seen_from_outside(stream.remote, addresses, stream.remote_host))
        connection = ControlConnection(stream, addresses, self._handlers, self._config, self.counters)
        group = self._connections.setdefault(stream.remote, [])
        group.append(connection)
        if len(group) == 1:
            for callback in list(self.on_connected):
                callback(stream.remote)
        return connection

    async def _run(self, connection: ControlConnection, stream: Stream, welcome: Welcome | None = None) -> None:
        try:
            if welcome is not None:
                await send_frame(stream, welcome)
            lost = await connection.run()
            logger.debug("%s", lost)
        finally:
            self._streams.release(stream)
            self._remove(connection)
            await connection.close()

    def _remove(self, connection: ControlConnection) -> None:
        remote = connection.remote
        group = self._connections[remote]
        group.remove(connection)
        if not group:
            del self._connections[remote]
            for callback in list(self.on_lost):
                callback(remote)
