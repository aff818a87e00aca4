"""One TLS connection on asyncio, as a stream of bytes."""

from __future__ import annotations

import asyncio
from typing import cast

from manyhands.base.errors import PeerLost
from manyhands.base.identity import PeerId
from manyhands.transport.api import MAX_UNREAD_BYTES
from manyhands.transport.buffer import ReceiveBuffer
from manyhands.transport.certificate import peer_id_of_certificate
from manyhands.transport.runs import runs_of

RECEIVE_BACKLOG_BYTES = 256 * 1024


class TlsStream(asyncio.BufferedProtocol):
    """Made by asyncio; usable once the handshake is over and :attr:`remote` is set."""

    remote: PeerId

    def __init__(self) -> None:
        self.remote_host = ""
        self.bytes_sent = 0
        self.bytes_received = 0
        self._loop = asyncio.get_running_loop()
        self.last_received = self._loop.time()
        self._buffer = ReceiveBuffer(RECEIVE_BACKLOG_BYTES, self._resume_reading)
        self._sending = asyncio.Lock()
        self._writable = asyncio.Event()
        self._writable.set()
        self._closed = self._loop.create_future()
        self._transport: asyncio.Transport | None = None

    # what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.remote_host = (transport.get_extra_info("peername") or [""])[0]  # None when it has left already

    def get_buffer(self, sizehint: int) -> memoryview:
        view: memoryview = self._buffer.get_buffer()
        return view

    def buffer_updated(self, nbytes: int) -> None:
        self.bytes_received += nbytes
        self.last_received = self._loop.time()
        self._buffer.updated(nbytes)
        if self._buffer.is_full and self._transport is not None:
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._buffer.end(PeerLost(self._remote_name(), f"connection closed{f' ({exc})' if exc else ''}"))
        self._writable.set()
        if self._transport is not None:
            self._transport.abort()  # Python 3.10 counts it as open when only the other end has closed it
        if not self._closed.done():
            self._closed.set_result(None)

    # what the handshake found

    @property
    def selected_alpn(self) -> str | None:
        assert self._transport is not None
        alpn: str | None = self._transport.get_extra_info("ssl_object").selected_alpn_protocol()
        return alpn

    def certified_peer_id(self) -> PeerId | None:
        """Whose certificate it is, or None when it names no peer."""
        assert self._transport is not None
        return peer_id_of_certificate(self._transport.get_extra_info("ssl_object").getpeercert(binary_form=True))

    # what the layers above call

    async def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        async with self._sending:
            for number, run in enumerate(runs_of(buffers)):
                if number > 0:
                    await self._room_for_more()
                for chunk in run:
                    self._write(chunk)
            await self._writable.wait()

    def send_now(self, message: bytes) -> None:
        self._write(memoryview(message))
        if self._transport is not None and self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.abort()
            raise PeerLost(self._remote_name(), "it does not read what it is sent")

    async def receive(self) -> bytes:
        return await self._buffer.take()

    async def _room_for_more(self) -> None:
        try:
            await self._writable.wait()
        except asyncio.CancelledError:  # in the middle of a message: nobody could tell where the next one begins
            self.abort()
            raise

    def _write(self, chunk: memoryview) -> None:
        if self._closed.done() or self._transport is None or self._transport.is_closing():
            raise PeerLost(self._remote_name(), "connection closed")
        self._transport.write(chunk)
        self.bytes_sent += len(chunk)

    async def receive_into(self, view: memoryview) -> None:
        try:
            await self._buffer.fill(view)
        except asyncio.CancelledError:
            self.abort()
            raise

    async def close(self, timeout_s: float = 1.0) -> None:
        if self._transport is not None:
            self._transport.close()
            await asyncio.wait([self._closed], timeout=timeout_s)
        self.abort()

    async def wait_closed(self) -> None:
        await asyncio.wait([self._closed])

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._buffer.end(PeerLost(self._remote_name(), "the stream was aborted here"))

    def _resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _remote_name(self) -> str:
        return getattr(self, "remote", self.remote_host or "unknown")
