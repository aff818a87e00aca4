"""Bare asyncio: TLS 1.3 with mutual certificates and a ``BufferedProtocol``, as a reference for speed.

Each connection begins with a header of fixed size that gives its purpose; there is no other framing.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import cast

import msgspec
from _certificates import Credentials
from _link import ECHO_BYTES, MIB, Link, LinkClosed, Plan, Serve, Sink

PIECE_BYTES = MIB
BUFFER_BYTES = 256 * 1024
HEADER_BYTES = 128
ECHO = Plan("echo")


def _header(plan: Plan) -> bytes:
    return msgspec.json.encode(plan).ljust(HEADER_BYTES)


def _cut(payload: bytes) -> Sequence[memoryview]:
    view = memoryview(payload)
    return [view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES)]


class Connection(asyncio.BufferedProtocol):
    """Receives into one reused buffer; ``on_bytes`` gets the bytes."""

    def __init__(self, on_bytes: Sink | None = None) -> None:
        self.early: list[bytes] = []
        self.on_bytes: Sink = on_bytes or self.keep
        self.closed = asyncio.Event()
        self.transport: asyncio.Transport
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._writable = asyncio.Event()
        self._writable.set()

    def keep(self, view: memoryview) -> None:
        """Keep bytes that arrive before there is a receiver."""
        self.early.append(bytes(view))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.on_bytes(self._buffer[:nbytes])

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        self._writable.set()

    async def send(self, piece: memoryview) -> None:
        if self.closed.is_set() or self.transport.is_closing():
            raise LinkClosed
        self.transport.write(piece)
        await self._writable.wait()

    async def receive(self, sink: Sink) -> None:
        for chunk in self.early:
            sink(memoryview(chunk))
        self.early.clear()
        self.on_bytes = sink
        await self.closed.wait()

    async def close(self) -> None:
        self.transport.close()
        try:
            await asyncio.wait_for(self.closed.wait(), 1.0)
        except asyncio.TimeoutError:
            self.transport.abort()


class Server:
    """Listens; echoes, or serves links."""

    def __init__(self, credentials: Credentials) -> None:
        self.cut = _cut
        self._context = credentials.context(ssl.PROTOCOL_TLS_SERVER)
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Future[None]] = set()

    async def start(self, serve: Serve) -> str:
        self._serve = serve
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._accepted, "127.0.0.1", 0, ssl=self._context)
        return str(self._listener.sockets[0].getsockname()[1])

    def _accepted(self) -> Connection:
        header = bytearray()

        def on_bytes(view: memoryview) -> None:
            missing = HEADER_BYTES - len(header)
            header.extend(view[:missing])
            if len(header) == HEADER_BYTES:
                self._begin(connection, msgspec.json.decode(bytes(header), type=Plan), view[missing:])

        connection = Connection(on_bytes)
        self._connections.add(connection)
        return connection

    def _begin(self, connection: Connection, plan: Plan, rest: memoryview) -> None:
        if plan == ECHO:
            connection.on_bytes = lambda view: connection.transport.write(bytes(view))
        else:
            connection.on_bytes = connection.keep
            task = asyncio.ensure_future(self._serve(connection, plan))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if len(rest) > 0:
            connection.on_bytes(rest)

    async def close(self) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.transport.abort()
        for task in list(self._tasks):
            task.cancel()


async def _open(port: int, context: ssl.SSLContext, plan: Plan) -> Connection:
    _, connection = await asyncio.get_running_loop().create_connection(
        Connection, "127.0.0.1", port, ssl=context, server_hostname=""
    )
    connection.transport.write(_header(plan))
    return connection


class EchoConnection:
    """Echoes small messages; as a dial, it counts once the first one is back."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        self._port = port
        self._context = context
        self._message = bytes(ECHO_BYTES)

    async def open(self) -> None:
        self._connection = await _open(self._port, self._context, ECHO)
        self._connection.on_bytes = self._on_bytes
        await self.echo()

    async def echo(self) -> None:
        self._missing = ECHO_BYTES
        self._answered = asyncio.get_running_loop().create_future()
        self._connection.transport.write(self._message)
        await self._answered

    def _on_bytes(self, view: memoryview) -> None:
        self._missing -= len(view)
        if self._missing == 0:
            self._answered.set_result(None)

    async def close(self) -> None:
        await self._connection.close()


class Client:
    """Dials."""

    def __init__(self, credentials: Credentials) -> None:
        self.cut = _cut
        self._context = credentials.context(ssl.PROTOCOL_TLS_CLIENT)

    async def start(self, contact: str) -> None:
        self._port = int(contact)
        self._echo = self.prepare_dial()
        await self._echo.open()
        self.echo = self._echo.echo

    async def open_link(self, plan: Plan) -> Link:
        return await _open(self._port, self._context, plan)

    def prepare_dial(self) -> EchoConnection:
        return EchoConnection(self._port, self._context)

    async def close(self) -> None:
        await self._echo.close()
