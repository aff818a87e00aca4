"""A control connection as a byte stream: TLS, on the loop.

Bulk data has connections of its own; see :mod:`manyhands.transport.sealed_stream`.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from contextlib import suppress

from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerLost, Timeout
from manyhands.base.identity import PeerId
from manyhands.transport import tcp
from manyhands.transport.api import MAX_UNREAD_BYTES, Ends
from manyhands.transport.buffer import SCRATCH_BYTES, ReceiveBuffer
from manyhands.transport.chunks import buffer_chunks
from manyhands.transport.piecewise import Piecewise
from manyhands.transport.tcp import ENDED, round_trip_s, why_ended
from manyhands.transport.tls_session import TlsEnded, TlsFailed, TlsSession

BACKLOG_BYTES = 256 * 1024
"""Bytes that wait to be taken, and that wait to be sent, before the other end or the caller has to wait."""


class TlsStream(Piecewise):
    """A stream after its handshake.

    Args:
        sock: connected, non-blocking; the stream takes ownership.
        session: after its handshake.
        ciphertext: memory to receive into on the loop; all streams of the loop may share it.
    """

    def __init__(
        self,
        sock: socket.socket,
        session: TlsSession,
        remote: PeerId,
        remote_host: str,
        ciphertext: bytearray,
    ) -> None:
        self.is_bulk = False
        self.remote = remote
        self.remote_host = remote_host
        self.bytes_sent = 0
        self.bytes_received = 0
        self._loop = asyncio.get_running_loop()
        self.last_received = self._loop.time()
        self._sock = sock
        self._session = session
        self._ciphertext = memoryview(ciphertext)
        self._buffer = ReceiveBuffer(BACKLOG_BYTES, self._read_soon)
        self._sending = asyncio.Lock()
        self._unsent: deque[memoryview] = deque()
        self._num_unsent = 0
        self._room = asyncio.Event()  # the backlog is within its limit
        self._drained = asyncio.Event()  # the backlog is empty
        self._room.set()
        self._drained.set()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._is_sending = False
        self._is_reading = False
        self._is_closing = False  # this end has shut down sending
        self._read_soon()

    # the Stream interface

    @property
    def rtt_s(self) -> float:
        return round_trip_s(self._sock)

    async def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        async with self._sending:
            self._check_open()
            self._is_sending = True
            try:
                for chunk in buffer_chunks(buffers):
                    self._write(chunk)
                    await self._drained.wait()
            except asyncio.CancelledError:  # the receiver could not find the start of the next message
                self.abort()
                raise
            finally:
                self._is_sending = False
            self._check_open()

    @property
    def ends(self) -> Ends | None:
        return tcp.ends(self._sock)

    async def send_message(self, message: bytes) -> None:
        while not self._room.is_set():  # checked again, since other waiting tasks may have been first
            await self._room.wait()
        self.send_now(message)

    def send_now(self, message: bytes) -> None:
        if self._is_sending:
            raise RuntimeError("a message in the middle of another send")
        self._write(memoryview(message))
        if self._num_unsent > MAX_UNREAD_BYTES:
            self._end("it does not read what it is sent")
            self._check_open()

    async def receive(self) -> bytes:
        return await self._buffer.take()

    async def receive_into(self, view: memoryview) -> None:
        try:
            await self._buffer.fill(view)
        except asyncio.CancelledError:
            self.abort()
            raise

    def delivery(self) -> None:
        return None  # control messages are too small to be paced

    def pace(self, bytes_per_s: float) -> None:
        pass

    async def close(self, timeout_s: float = 1.0) -> None:
        try:
            with suppress(Timeout, PeerLost):
                async with time_limit(timeout_s, f"closing a stream to peer {self.remote}"), self._sending:
                    await self._drained.wait()
                    self._shut_down_sending()
                    await self.wait_closed()
        finally:
            self.abort()

    async def wait_closed(self) -> None:
        await asyncio.wait([self._closed])

    def abort(self) -> None:
        self._end("the stream was aborted here")

    # sending on the loop

    def _write(self, plaintext: memoryview) -> None:
        self._check_open()
        try:
            for chunk in buffer_chunks([plaintext], SCRATCH_BYTES):  # the session keeps memory for the longest
                self._session.write(chunk)
                self._take_ciphertext(len(chunk))
        except TlsFailed as error:
            self._end(str(error))
            self._check_open()
        self.bytes_sent += len(plaintext)
        self._send_unsent()

    def _take_ciphertext(self, num_plain: int) -> None:
        max_bytes = num_plain + num_plain // 64 + 256  # with headers and tags
        while data := self._session.ciphertext(max_bytes):
            self._unsent.append(memoryview(data))
            self._num_unsent += len(data)
            if len(data) < max_bytes:
                return

    def _send_unsent(self) -> None:
        was_waiting = not self._drained.is_set()
        try:
            while self._unsent:
                num_bytes = self._sock.send(self._unsent[0])
                self._num_unsent -= num_bytes
                if num_bytes == len(self._unsent[0]):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = self._unsent[0][num_bytes:]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._end(why_ended(error))
            return
        if self._num_unsent <= BACKLOG_BYTES:
            self._room.set()
        else:
            self._room.clear()
        if self._unsent and not was_waiting:
            self._drained.clear()
            self._loop.add_writer(self._sock, self._send_unsent)
        elif not self._unsent and was_waiting:
            self._loop.remove_writer(self._sock)
            self._drained.set()

    def _shut_down_sending(self) -> None:
        """Tell the other end that nothing more is sent; drop received data until it closes too."""
        self._check_open()
        self._is_closing = True
        self._buffer.end(PeerLost(self.remote, "the stream was closed here"))
        self._session.end()
        self._take_ciphertext(0)
        self._send_unsent()
        if not self._closed.done():
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError as error:
                self._end(why_ended(error))
        self._read_soon()

    # receiving on the loop

    def _read_soon(self) -> None:
        self._loop.call_soon(self._start_reading)

    def _start_reading(self) -> None:
        if self._closed.done() or self._is_reading:
            return
        self._decrypt()  # data from before the last pause
        if not self._closed.done() and not self._is_paused():
            self._is_reading = True
            self._loop.add_reader(self._sock, self._on_readable)

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._sock)

    def _is_paused(self) -> bool:
        return self._buffer.is_full and not self._is_closing

    def _on_readable(self) -> None:
        try:
            num_bytes = self._sock.recv_into(self._ciphertext)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(why_ended(error))
            return
        if num_bytes == 0:
            self._end(ENDED)
            return
        self._session.received(self._ciphertext[:num_bytes])
        self._decrypt()
        if self._is_paused():
            self._stop_reading()

    def _decrypt(self) -> None:
        """Decrypt received data, as far as there is room for it."""
        try:
            while not self._is_paused():
                view = memoryview(bytearray(SCRATCH_BYTES)) if self._is_closing else self._buffer.get_buffer()
                num_bytes = self._session.read_into(view)
                if num_bytes == 0:
                    return
                self.bytes_received += num_bytes
                self.last_received = self._loop.time()
                if not self._is_closing:
                    self._buffer.updated(num_bytes)
                if num_bytes < len(view) and not self._session.is_over:  # more ciphertext is needed
                    return
        except TlsEnded:
            self._end(ENDED)
        except TlsFailed as error:
            self._end(str(error))

    # closing

    def _check_open(self) -> None:
        if self._closed.done():
            raise PeerLost(self.remote, ENDED)

    def _end(self, reason: str) -> None:
        if self._closed.done():
            return
        self._closed.set_result(None)
        self._stop_reading()
        if not self._drained.is_set():
            self._loop.remove_writer(self._sock)
        self._unsent.clear()
        self._buffer.end(PeerLost(self.remote, reason))
        self._room.set()
        self._drained.set()
        with suppress(OSError):  # it may not be connected any more
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
