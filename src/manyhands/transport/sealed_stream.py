"""A bulk connection as a byte stream, after its TLS handshake.

Large data is handled on threads, one for each direction while needed: they encrypt, decrypt and copy without the GIL,
directly from and into the caller's memory, and leave the loop free for control messages. Small data, such as the frames
that open the stream, is read on the loop, so that a silent peer costs no thread.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from typing import Any

from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerLost, Timeout
from manyhands.base.identity import PeerId
from manyhands.runtime.threads import BlockingThreads
from manyhands.transport import tcp
from manyhands.transport.api import Delivery
from manyhands.transport.chunks import buffer_chunks
from manyhands.transport.record_memory import give_back_room, take_room
from manyhands.transport.sealing import RECORD_EXTRA_BYTES, BadRecord, Opener, RecordBuffer, Sealer
from manyhands.transport.tcp import ENDED, why_ended

THREAD_BYTES = 64 * 1024
"""A receive of at least this size runs on a thread."""

AT_ONCE_BYTES = 16 * 1024
"""A message up to this size is sent on the loop, as far as the system accepts it at once: a thread would cost more."""

HELD_BACK_BYTES = 512
"""Bytes that may be held back, to be sent together with the next data of the same call."""

DROPPED_BYTES = 1 << 16
"""Most bytes that are read and dropped in one call while this end waits for the other one to close too."""

RECORDS_AT_ONCE = 64
"""Records that are opened in one iteration of the loop."""

NEAR_BYTES = 1023 * 256
"""Record size on short links. With the overhead of sealing it is just below four segments of the loopback interface
(65,483 bytes each): a short fifth one would cost the system as much as a full one."""

FAR_BYTES = 1 << 15
"""Record size on long links. Small records show progress more often, and their cost does not matter there."""

IDLE_S = 0.2
"""Time without a receive after which the loop watches whether the other end has closed the stream."""

DO_NOT_WAIT = getattr(socket, "MSG_DONTWAIT", 0)


class SealedStream:
    """A stream after its handshake.

    Args:
        sock: connected; the stream takes ownership.
        sealer, opener: for sent and received records.
        received: bytes that already arrived after the handshake.
    """

    def __init__(
        self,
        sock: socket.socket,
        sealer: Sealer,
        opener: Opener,
        remote: PeerId,
        remote_host: str,
        threads: BlockingThreads,
        received: bytes = b"",
    ) -> None:
        self.is_bulk = True
        self.remote = remote
        self.remote_host = remote_host
        self.bytes_sent = 0
        self.bytes_received = 0
        self._loop = asyncio.get_running_loop()
        self.last_received = self._loop.time()
        sock.setblocking(True)  # threads block in their calls; calls on the loop pass DO_NOT_WAIT
        self._sock = sock
        self._sealer = sealer
        self._records = RecordBuffer(opener, received)
        self._threads = threads
        self._is_far = tcp.is_long(sock)
        self._max_plain = FAR_BYTES if self._is_far else NEAR_BYTES
        self._sending = asyncio.Lock()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._why_closed = ENDED
        self._readable: asyncio.Future[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._num_jobs = 0
        self._is_received = False  # a task is receiving
        self._is_watched = False  # the loop watches the socket
        self._is_closing = False  # this end has shut down sending
        self._is_detached = False  # the socket belongs to somebody else
        self._loop.call_soon(self._watch)

    # the Stream interface

    async def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        async with self._sending:
            self._look()
            self._check_open()
            if sum(map(len, views)) > AT_ONCE_BYTES:
                await self._on_thread(self._send_all, views)
            elif len(rest := self._send_at_once(views)):
                await self._on_thread(self._send_sealed, rest)

    async def send_each(self, pieces: Iterator[memoryview]) -> None:
        async with self._sending:
            self._check_open()
            await self._on_thread(self._send_all, pieces)

    async def receive_into(self, view: memoryview) -> None:
        if len(view) >= THREAD_BYTES and self.bytes_sent:  # no thread for a peer that was not welcomed yet
            await self._receive(self._receive_on_thread(iter([view])))
        else:
            await self._receive(self._receive_on_loop(view))

    async def receive_each(self, views: Iterator[memoryview]) -> None:
        await self._receive(self._receive_on_thread(views))

    async def _receive_on_loop(self, view: memoryview) -> None:
        while len(view := view[self._take_into(view) :]):
            if self._is_ready():
                await asyncio.sleep(0)  # many small records: let other tasks run
                continue
            self._check_open()
            await self._wait_readable()

    async def _receive_on_thread(self, views: Iterator[memoryview]) -> None:
        self._unwatch()
        await self._on_thread(self._receive_all, views)

    async def _receive(self, receiving: Coroutine[Any, Any, None]) -> None:
        if self._is_received:
            receiving.close()
            raise RuntimeError("two tasks receive from one stream")
        self._is_received = True
        try:
            await receiving
        except asyncio.CancelledError:  # the receiver could not find the start of the next message
            self.abort()
            raise
        finally:
            self._is_received = False
            self._watch_later()

    def delivery(self) -> Delivery | None:
        return tcp.delivery(self._sock) if self._is_far and not self._closed.done() else None

    def pace(self, bytes_per_s: float) -> None:
        if not self._closed.done():
            tcp.pace(self._sock, bytes_per_s)

    async def close(self, timeout_s: float = 1.0) -> None:
        try:
            with suppress(Timeout, PeerLost):
                async with time_limit(timeout_s, f"closing a stream to peer {self.remote}"), self._sending:
                    self._shut_down_sending()
                    await self.wait_closed()
        finally:
            self.abort()

    async def wait_closed(self) -> None:
        await asyncio.wait([self._closed])

    def abort(self) -> None:
        self._end("the stream was aborted here")

    def detach(self) -> socket.socket:
        """Give up the socket without closing it: nothing that follows on it is sealed.

        No call may be running, and nothing that has arrived may be unread. The stream can only be aborted afterwards,
        which then ends :meth:`wait_closed` and does not touch the socket.

        Raises:
            PeerLost: the stream is closed.
        """
        self._check_open()
        self._is_detached = True
        self._unwatch()
        self._sock.setblocking(False)
        return self._sock

    # on the loop

    def _watch(self) -> None:
        """Watch for data or the close of the other end, unless received data is still waiting to be taken."""
        is_on_thread = self._is_received and self._readable is None
        if self._is_detached or self._closed.done():
            return
        if not (self._is_watched or is_on_thread or self._is_full()):
            self._is_watched = True
            self._loop.add_reader(self._sock, self._on_readable)

    def _watch_later(self) -> None:
        """Start to watch after a while without a receive; data that arrives before is for the next thread."""
        if self._idle is None and not self._closed.done():
            self._idle = self._loop.call_later(IDLE_S, self._when_idle)

    def _when_idle(self) -> None:
        self._idle = None
        self._watch()

    def _look(self) -> None:
        """Check before a send whether the other end has closed, if the loop is not watching."""
        if self._idle is not None and not self._is_watched and not self._is_full():
            self._on_readable()

    def _unwatch(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._sock)

    def _is_full(self) -> bool:
        return self._is_ready() and not self._is_closing

    def _is_ready(self) -> bool:
        try:
            return self._records.is_ready
        except BadRecord as error:
            self._end(str(error))
            return True

    async def _wait_readable(self) -> None:
        """Wait until there is data to take, or the stream is closed."""
        self._readable = self._loop.create_future()
        try:
            self._watch()
            await self._readable
        finally:
            self._readable = None

    def _on_readable(self) -> None:
        room = memoryview(bytearray(DROPPED_BYTES)) if self._is_closing else self._records.room()
        try:
            num_bytes = self._sock.recv_into(room, 0, DO_NOT_WAIT)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(why_ended(error))
            return
        if num_bytes == 0:
            self._end(ENDED)
            return
        self.last_received = self._loop.time()
        if self._is_closing:
            return
        self._records.added(num_bytes)
        if self._is_full():
            self._unwatch()
            self._wake()

    def _wake(self) -> None:
        if self._readable is not None and not self._readable.done():
            self._readable.set_result(None)

    def _take_into(self, view: memoryview) -> int:
        try:
            return self._take(view, RECORDS_AT_ONCE)
        except BadRecord as error:
            self._end(str(error))
            raise self._lost() from error

    # on threads

    async def _on_thread(self, job: Callable[..., None], *args: object) -> None:
        """Run the job of one direction on a thread, which no longer uses the caller's memory when this returns."""
        try:
            done = self._threads.start(job, *args)
        except RuntimeError as no_thread:
            self._end(f"this machine has no threads left ({no_thread})")
            raise self._lost() from no_thread
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
        if isinstance(error, (_Gone, BadRecord)):
            self._end(str(error))
            raise self._lost() from error
        if error is not None:
            self._end(f"this end failed with a {type(error).__name__}")
            raise error

    def _send_at_once(self, views: Iterable[memoryview]) -> memoryview:
        """Send a small message without waiting; return the sealed bytes that the system did not accept."""
        plain = b"".join(views)
        if not plain:
            return memoryview(b"")
        record = memoryview(bytearray(len(plain) + RECORD_EXTRA_BYTES))
        self._sealer.seal_into(memoryview(plain), record)
        try:
            num_sent = self._sock.send(record, DO_NOT_WAIT)
        except (BlockingIOError, InterruptedError):
            num_sent = 0
        except OSError as error:
            self._end(why_ended(error))
            raise self._lost() from error
        self.bytes_sent += len(plain)
        return record[num_sent:]

    def _send_sealed(self, record: memoryview) -> None:
        try:
            self._sock.sendall(record)
        except OSError as error:
            raise _Gone(why_ended(error)) from error

    def _send_all(self, views: Iterable[memoryview]) -> None:
        sealed = take_room(HELD_BACK_BYTES)
        num_sealed = 0
        num_plain = 0
        for chunk in buffer_chunks(views, self._max_plain):
            if (num_bytes := num_sealed + len(chunk) + RECORD_EXTRA_BYTES) > len(sealed):
                larger = take_room(num_bytes)
                larger[:num_sealed] = sealed[:num_sealed]
                give_back_room(sealed)
                sealed = larger
            num_sealed += self._sealer.seal_into(chunk, sealed[num_sealed:])
            num_plain += len(chunk)
            if num_sealed > HELD_BACK_BYTES:  # small data is sent with what follows it
                self._send_sealed(sealed[:num_sealed])
                self.bytes_sent += num_plain
                num_sealed = 0
                num_plain = 0
        if num_sealed:  # an empty send would fail if the other end has received all and closed
            self._send_sealed(sealed[:num_sealed])
            self.bytes_sent += num_plain
        give_back_room(sealed)

    def _receive_all(self, views: Iterable[memoryview]) -> None:
        for view in views:
            left = view
            while len(left := left[self._take(left) :]):
                if self._closed.done():
                    raise _Gone(ENDED)
                try:
                    num_bytes = self._sock.recv_into(self._records.room())
                except OSError as error:
                    raise _Gone(why_ended(error)) from error
                if num_bytes == 0:
                    raise _Gone(ENDED)
                self._records.added(num_bytes)
                self.last_received = self._loop.time()
        self._records.rest()

    def _take(self, view: memoryview, max_records: int | None = None) -> int:
        num_bytes = self._records.take_into(view, max_records)
        self.bytes_received += num_bytes
        return num_bytes

    # closing

    def _shut_down_sending(self) -> None:
        """Tell the other end that nothing more is sent; drop received data until it closes too."""
        self._check_open()
        self._is_closing = True
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._end(why_ended(error))
        self._wake()
        self._watch()

    def _check_open(self) -> None:
        if self._closed.done():
            raise self._lost()
        if self._is_closing or self._is_detached:
            raise PeerLost(self.remote, "the stream was closed here")

    def _lost(self) -> PeerLost:
        return PeerLost(self.remote, self._why_closed)

    def _end(self, reason: str) -> None:
        if self._closed.done():
            return
        self._why_closed = reason
        self._closed.set_result(None)
        self._unwatch()
        self._wake()
        if self._is_detached:
            return
        with suppress(OSError):  # it may not be connected any more
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the threads that wait for it
        self._close_socket()

    def _close_socket(self) -> None:
        """Close the socket once no thread uses it."""
        if self._closed.done() and self._num_jobs == 0:
            self._sock.close()


class _Gone(Exception):
    """The socket failed in a thread, or the other end has closed it."""
