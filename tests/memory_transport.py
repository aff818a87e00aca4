"""A transport without sockets, in one process."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError, DialFailed, DialReason, PeerLost
from manyhands.base.identity import Identity, PeerId
from manyhands.runtime.tasks import TaskOwner
from manyhands.testing.relayed import RelayedInProcess
from manyhands.transport.api import MAX_UNREAD_BYTES, Ends, OnStream, Port, Stream
from manyhands.transport.buffer import ReceiveBuffer
from manyhands.transport.chunks import buffer_chunks
from manyhands.transport.piecewise import Piecewise

BACKLOG_BYTES = 256 * 1024


class MemoryNetwork:
    """Connects the peers of one test."""

    def __init__(self) -> None:
        self.listeners: dict[tuple[str, int], MemoryListener] = {}
        self._ports = itertools.count(1024)

    def free_port(self) -> int:
        taken = {port for _, port in self.listeners}
        return next(port for port in self._ports if port not in taken)


class MemoryStream(Piecewise):
    """One end of an in-process stream; ``send`` waits while the other end's backlog is full."""

    def __init__(self, owner: PeerId, remote: PeerId, *, is_bulk: bool = False) -> None:
        self.is_bulk = is_bulk
        self.rtt_s = math.inf
        self.ends: Ends | None = None
        self.remote = remote
        self.remote_host = "127.0.0.1"
        self.bytes_sent = 0
        self.bytes_received = 0
        self.last_received = asyncio.get_running_loop().time()
        self.other: MemoryStream = self
        self._owner = owner
        self._room = asyncio.Event()
        self._room.set()
        self._buffer = ReceiveBuffer(BACKLOG_BYTES, self._room.set)
        self._sending = asyncio.Lock()
        self._closed = asyncio.Event()

    async def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        async with self._sending:
            for number, chunk in enumerate(buffer_chunks(buffers)):
                await self._room_for(number)
                self.bytes_sent += len(chunk)
                self.other._arrived(chunk)  # noqa: SLF001 (the other end of the same stream)
            await asyncio.sleep(0)

    async def _room_for(self, number: int) -> None:
        try:
            await self.other._room.wait()  # noqa: SLF001
        except asyncio.CancelledError:
            if number > 0:  # in the middle of a message: the receiver could not find the start of the next one
                self.abort()
            raise
        if self._closed.is_set():
            raise PeerLost(self.remote, "connection closed")

    def _arrived(self, chunk: memoryview) -> None:
        self.bytes_received += len(chunk)
        self.last_received = asyncio.get_running_loop().time()
        self._buffer.feed(chunk)
        if self._buffer.is_full:
            self._room.clear()

    async def send_message(self, message: bytes) -> None:
        while not self.other._room.is_set():  # noqa: SLF001
            await self.other._room.wait()  # noqa: SLF001
        self.send_now(message)
        await asyncio.sleep(0)

    def send_now(self, message: bytes) -> None:
        if self._closed.is_set():
            raise PeerLost(self.remote, "connection closed")
        self.bytes_sent += len(message)
        self.other._arrived(memoryview(message))  # noqa: SLF001
        if self.other._buffer.num_waiting > MAX_UNREAD_BYTES:  # noqa: SLF001
            self.abort()
            raise PeerLost(self.remote, "it does not read what it is sent")

    async def receive(self) -> bytes:
        return await self._buffer.take()

    async def receive_into(self, view: memoryview) -> None:
        try:
            await self._buffer.fill(view)
        except asyncio.CancelledError:
            self.abort()
            raise

    def delivery(self) -> None:
        return None  # there is no link

    def pace(self, bytes_per_s: float) -> None:
        pass

    async def close(self, timeout_s: float = 1.0) -> None:
        self.abort()

    async def wait_closed(self) -> None:
        await self._closed.wait()

    def abort(self) -> None:
        for end in (self, self.other):
            end._end()  # noqa: SLF001

    def _end(self) -> None:
        self._closed.set()
        self._room.set()
        self._buffer.end(PeerLost(self.remote, "connection closed"))


class MemoryListener:
    """An open port of a :class:`MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, identity: Identity, address: Address, on_stream: OnStream) -> None:
        self.identity = identity
        self.addresses = [address]
        self._network = network
        self._on_stream = on_stream
        self._tasks = TaskOwner("listener")
        self._streams: set[MemoryStream] = set()

    def accept(self, stream: MemoryStream) -> None:
        self._tasks.spawn(self._serve(stream), name=f"stream from {stream.remote}")

    async def _serve(self, stream: MemoryStream) -> None:
        self._streams.add(stream)
        try:
            await self._on_stream(stream)
        except PeerLost:
            pass
        finally:
            self._streams.discard(stream)
            stream.abort()

    async def close(self) -> None:
        address = self.addresses[0]
        self._network.listeners.pop((address.host, address.port), None)
        for stream in self._streams:
            stream.abort()
        await self._tasks.close()


class MemoryTransport(RelayedInProcess):
    """Dials and listens in a :class:`MemoryNetwork` as one identity."""

    def __init__(self, identity: Identity, network: MemoryNetwork) -> None:
        self.identity = identity
        self.network = network

    def close(self) -> None:
        pass

    def take_port(self) -> Port:
        raise ConfigError("this transport has no ports that both ends could dial at the same time")

    async def dial_from(
        self, port: Port, places: Sequence[Address], peer_id: PeerId, timeout_s: float, *, is_bulk: bool
    ) -> Stream:
        raise DialFailed(f"peer {peer_id}", DialReason.UNREACHABLE, "there are no ports")

    async def accept_from(self, port: Port, places: Sequence[Address], peer_id: PeerId, timeout_s: float) -> Stream:
        raise DialFailed(f"peer {peer_id}", DialReason.UNREACHABLE, "there are no ports")

    async def listen(self, address: Address, on_stream: OnStream) -> MemoryListener:
        port = address.port or self.network.free_port()
        if (address.host, port) in self.network.listeners:
            raise ConfigError(f"cannot listen on {address}: port {port} is taken; choose another, or 0 for a free one")
        listener = MemoryListener(self.network, self.identity, Address.of(address.host, port), on_stream)
        self.network.listeners[address.host, port] = listener
        return listener

    async def dial(self, address: Address, timeout_s: float) -> MemoryStream:
        return await self._dial(address, is_bulk=False)

    async def dial_bulk(self, address: Address, timeout_s: float) -> MemoryStream:
        return await self._dial(address, is_bulk=True)

    async def _dial(self, address: Address, *, is_bulk: bool) -> MemoryStream:
        await asyncio.sleep(0)
        listener = self.network.listeners.get((address.host, address.port))
        if listener is None:
            raise DialFailed(str(address), DialReason.REFUSED)
        remote = listener.identity.peer_id
        if remote == self.identity.peer_id:
            raise DialFailed(str(address), DialReason.ITSELF)
        if address.peer_id not in (None, remote):
            raise DialFailed(str(address), DialReason.WRONG_IDENTITY, f"found {remote}")
        here = MemoryStream(self.identity.peer_id, remote, is_bulk=is_bulk)
        there = MemoryStream(remote, self.identity.peer_id, is_bulk=is_bulk)
        here.other = there
        there.other = here
        listener.accept(there)
        return here
