"""One TLS connection as a stream of bytes.

Small messages are encrypted and sent on the loop. What is large moves on threads of its own, one for each direction as
long as it takes: they encrypt, decrypt and copy without Python's lock, straight from and into the caller's memory, and
the loop stays free for everybody's control messages.
"""

from __future__ import annotations

import asyncio
import select
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerLost, Timeout
from manyhands.base.identity import PeerId
from manyhands.runtime.threads import BlockingThreads
from manyhands.transport.api import MAX_UNREAD_BYTES
from manyhands.transport.buffer import SCRATCH_BYTES, ReceiveBuffer
from manyhands.transport.chunks import CHUNK_BYTES, chunks_of
from manyhands.transport.tls_session import TlsEnded, TlsFailed, TlsSession

RECEIVE_BACKLOG_BYTES = 256 * 1024
SEND_BACKLOG_BYTES = 256 * 1024

THREAD_BYTES = 128 * 1024
"""A send or a receive of at least this size moves on a thread."""

CIPHERTEXT_BYTES = CHUNK_BYTES + CHUNK_BYTES // 64
"""A chunk with its record headers and tags: 22 bytes for each 16 KiB (RFC 8446, section 5.2)."""

POLL_S = 1.0
"""A thread that waits for its socket looks this often whether the stream was aborted."""

ENDED = "connection closed"


class TlsStream:
    """A stream after its handshake.

    Args:
        sock: connected, not blocking; it belongs to the stream from now on.
        session: after its handshake.
        threads: for what is large.
        ciphertext: memory to receive into on the loop; all streams of the loop may share it.
    """

    def __init__(
        self,
        sock: socket.socket,
        session: TlsSession,
        remote: PeerId,
        remote_host: str,
        threads: BlockingThreads,
        ciphertext: bytearray,
    ) -> None:
        self.remote = remote
        self.remote_host = remote_host
        self.bytes_sent = 0
        self.bytes_received = 0
        self._loop = asyncio.get_running_loop()
        self.last_received = self._loop.time()
        self._sock = sock
        self._session = session
        self._session_lock = threading.Lock()  # a direction on a thread and the other one on the loop, or two threads
        self._threads = threads
        self._ciphertext = memoryview(ciphertext)
        self._buffer = ReceiveBuffer(RECEIVE_BACKLOG_BYTES, self._read_soon)
        self._sending = asyncio.Lock()
        self._unsent: deque[memoryview] = deque()
        self._num_unsent = 0
        self._room = asyncio.Event()  # little is unsent
        self._drained = asyncio.Event()  # nothing is
        self._room.set()
        self._drained.set()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._num_jobs = 0
        self._is_received_on_thread = self._is_sent_on_thread = self._is_reading = self._is_closing = False
        self._read_soon()

    # what the layers above call

    async def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        async with self._sending:
            self._check_open()
            try:
                await self._drained.wait()
                self._check_open()
                if sum(map(len, views)) < THREAD_BYTES:
                    for view in views:
                        self._write(view)
                    await self._drained.wait()
                else:
                    self._is_sent_on_thread = True
                    await self._on_thread(self._send_all, views)
                    return  # all was sent, also if the other end has read it and closed the stream since
            except asyncio.CancelledError:  # nobody could tell where the next message begins
                self.abort()
                raise
            finally:
                self._is_sent_on_thread = False
            self._check_open()

    async def send_message(self, message: bytes) -> None:
        while not self._room.is_set():  # again, since others waited too and may have been first
            await self._room.wait()
        self.send_now(message)

    def send_now(self, message: bytes) -> None:
        if self._is_sent_on_thread:
            raise RuntimeError("a message in the middle of a bulk send")
        self._write(memoryview(message))
        if self._num_unsent > MAX_UNREAD_BYTES:
            self._end("it does not read what it is sent")
            self._check_open()

    async def receive(self) -> bytes:
        return await self._buffer.take()

    async def receive_into(self, view: memoryview) -> None:
        if self._is_received_on_thread:
            raise RuntimeError("two tasks receive from one stream")
        try:
            view = self._buffer.take_into(view)
            if len(view) < THREAD_BYTES:
                await self._buffer.fill(view)
                return
            self._check_open()
            self._stop_reading()
            self._is_received_on_thread = True
            try:
                await self._on_thread(self._receive_all, view)
            finally:
                self._is_received_on_thread = False
                self._read_soon()
        except asyncio.CancelledError:
            self.abort()
            raise

    async def close(self, timeout_s: float = 1.0) -> None:
        try:
            with suppress(Timeout, PeerLost):
                async with time_limit(timeout_s, f"closing a stream to peer {self.remote}"), self._sending:
                    await self._drained.wait()
                    self._say_goodbye()
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
            for chunk in chunks_of([plaintext]):
                with self._session_lock:
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
            self._end(_reason(error))
            return
        if self._num_unsent <= SEND_BACKLOG_BYTES:
            self._room.set()
        else:
            self._room.clear()
        if self._unsent and not was_waiting:
            self._drained.clear()
            self._loop.add_writer(self._sock, self._send_unsent)
        elif not self._unsent and was_waiting:
            self._loop.remove_writer(self._sock)
            self._drained.set()

    def _say_goodbye(self) -> None:
        """Nothing more is sent; what still comes is read and dropped until the other end closes as well."""
        self._check_open()
        self._is_closing = True
        self._buffer.end(PeerLost(self.remote, "the stream was closed here"))
        with self._session_lock:
            self._session.end()
            self._take_ciphertext(0)
        self._send_unsent()
        if not self._closed.done():
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError as error:
                self._end(_reason(error))
        self._read_soon()

    # receiving on the loop

    def _read_soon(self) -> None:
        self._loop.call_soon(self._start_reading)

    def _start_reading(self) -> None:
        if self._closed.done() or self._is_reading or self._is_received_on_thread:
            return
        self._decrypt()  # what came before the last pause
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
            self._end(_reason(error))
            return
        if num_bytes == 0:
            self._end(ENDED)
            return
        with self._session_lock:
            self._session.received(self._ciphertext[:num_bytes])
        self._decrypt()
        if self._is_paused():
            self._stop_reading()

    def _decrypt(self) -> None:
        """Decrypt what has come, as far as there is room for it."""
        try:
            while not self._is_paused():
                view = memoryview(bytearray(SCRATCH_BYTES)) if self._is_closing else self._buffer.get_buffer()
                with self._session_lock:
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

    # on threads

    async def _on_thread(self, job: Callable[..., None], *args: object) -> None:
        """Run one direction on a thread to its end; it has let go of the caller's memory when this returns."""
        done = self._threads.start(job, *args)
        self._num_jobs += 1
        was_cancelled = False
        while not done.done():
            try:
                await asyncio.wait([done])
            except asyncio.CancelledError:
                was_cancelled = True
                self.abort()  # the thread notices at once
        self._num_jobs -= 1
        self._close_socket()
        error = done.exception()
        if was_cancelled:
            raise asyncio.CancelledError
        if isinstance(error, (OSError, TlsFailed)):
            self._end(_reason(error))
        elif error is not None:
            self._end("an internal error")
            raise error
        if error is not None:
            self._check_open()

    def _send_all(self, views: Sequence[memoryview]) -> None:
        ciphertext = memoryview(bytearray(CIPHERTEXT_BYTES))
        for chunk in chunks_of(views):
            with self._session_lock:
                self._session.write(chunk)
                num_bytes = self._session.ciphertext_into(ciphertext)
            while num_bytes:
                self._send_on_thread(ciphertext[:num_bytes])
                with self._session_lock:
                    num_bytes = self._session.ciphertext_into(ciphertext)
            self.bytes_sent += len(chunk)

    def _send_on_thread(self, data: memoryview) -> None:
        while len(data):
            try:
                data = data[self._sock.send(data) :]
            except (BlockingIOError, InterruptedError):
                self._wait_for_socket(selectors.EVENT_WRITE)

    def _receive_all(self, view: memoryview) -> None:
        ciphertext = memoryview(bytearray(CIPHERTEXT_BYTES))
        view = self._decrypt_into(view)
        while len(view):
            try:
                num_bytes = self._sock.recv_into(ciphertext)
            except (BlockingIOError, InterruptedError):
                self._wait_for_socket(selectors.EVENT_READ)
                continue
            if num_bytes == 0:
                raise ConnectionError(ENDED)
            with self._session_lock:
                self._session.received(ciphertext[:num_bytes])
            view = self._decrypt_into(view)

    def _decrypt_into(self, view: memoryview) -> memoryview:
        """Decrypt what has come; returns the rest of ``view``."""
        try:
            with self._session_lock:
                num_bytes = self._session.read_into(view)
        except TlsEnded as error:
            raise ConnectionError(ENDED) from error
        if num_bytes:
            self.bytes_received += num_bytes
            self.last_received = self._loop.time()
        return view[num_bytes:]

    def _wait_for_socket(self, event: int) -> None:
        while not self._is_ready(event):
            if self._closed.done():
                raise ConnectionError(ENDED)

    def _is_ready(self, event: int) -> bool:
        """Wait until the socket can be read or written; False after a while."""
        if not hasattr(select, "poll"):  # Windows
            readers = [self._sock] if event == selectors.EVENT_READ else []
            writers = [self._sock] if event == selectors.EVENT_WRITE else []
            return any(select.select(readers, writers, [self._sock], POLL_S))
        poll = select.poll()
        poll.register(self._sock, select.POLLIN if event == selectors.EVENT_READ else select.POLLOUT)
        return bool(poll.poll(POLL_S * 1000))

    # the end

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
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the threads that wait for it
        self._close_socket()

    def _close_socket(self) -> None:
        """Let go of the socket once no thread uses it."""
        if self._closed.done() and self._num_jobs == 0:
            self._sock.close()


def _reason(error: OSError | TlsFailed) -> str:
    if isinstance(error, ConnectionError) and error.args == (ENDED,):
        return ENDED
    text = error.strerror if isinstance(error, OSError) else str(error)
    return f"{ENDED} ({text or error})"
