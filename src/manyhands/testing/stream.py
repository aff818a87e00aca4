"""One end of a stream in the simulated network."""

from __future__ import annotations

import asyncio
import functools
import math
import zlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from manyhands.base.errors import PeerLost
from manyhands.base.identity import PeerId
from manyhands.testing.host import Host
from manyhands.testing.links import TURN_BYTES
from manyhands.transport.api import MAX_UNREAD_BYTES, Delivery, Ends
from manyhands.transport.chunks import buffer_chunks
from manyhands.transport.piecewise import Piecewise

if TYPE_CHECKING:
    from manyhands.testing.network import SimNetwork

BACKLOG_BYTES = 256 * 1024
HEARD_BYTES = 64
"""Messages of at most this many bytes go to :attr:`SimStream.hear`."""

WINDOW_BYTES = 1 << 20
"""The sender waits while this many bytes are in flight, as with the window of TCP."""

LONG_LATENCY_S = 0.005
"""One-way latency in seconds below which :meth:`SimStream.delivery` reports nothing, as with real transports."""


class SimStream(Piecewise):
    """One end of a stream between two hosts.

    A chunk costs one timer, and one more for each limited bandwidth that it passes.

    Attributes:
        number: the same at both ends.
        is_silent: half-open: received bytes are lost, and neither end is notified.
        num_unread: received bytes that the program has not read.
        hear: takes small messages as they arrive, so that no task must be woken for them; returns False for all others.
            Called while the program waits for bytes, outside of its context.
        is_handed_over: whether its host's program has received it; a dialler receives it after the handshake.
    """

    def __init__(self, network: SimNetwork, host: Host, other_host: Host, remote: PeerId, number: int) -> None:
        self.is_bulk = False
        self.rtt_s = math.inf
        self.ends: Ends | None = None
        self.remote = remote
        self.remote_host = other_host.ip
        self.bytes_sent = 0
        self.bytes_received = 0
        self.last_received = network.loop.now
        self.is_silent = False
        self.is_handed_over = False
        self.host = host
        self.life = host.life
        self.other: SimStream = self
        self.number = number
        self._network = network
        self._loop = network.loop
        self._rng = network.rng
        self._trace = network.trace
        self._link = network.link(host.name, other_host.name)
        self._up = network.up(host.name)
        self._down = network.down(other_host.name)
        self._unread: deque[bytes] = deque()
        self.num_unread = 0
        self._reader: asyncio.Future[None] | None = None
        self.hear: Callable[[bytes], bool] = _nothing_is_heard
        self._sending = asyncio.Lock()
        self._room: asyncio.Event | None = None
        self._end_reason = ""
        self._ended: asyncio.Event | None = None
        self._in_flight: deque[bytes | None] = deque()  # None is the end of the stream
        self._in_order_after = 0.0
        self._busy_s = self._busy_since = 0.0  # time with bytes in flight
        network.streams[self] = None

    def __repr__(self) -> str:
        return f"stream #{self.number} {self.host.name}>{self.other.host.name}"

    def pair_with(self, other: SimStream) -> None:
        """Connect two ends."""
        self.other = other
        other.other = self

    # sending

    async def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        async with self._sending:
            for number, chunk in enumerate(buffer_chunks(buffers)):
                if not self._has_room():
                    await self._wait_for_room(number)
                if self._end_reason:
                    raise PeerLost(self.remote, "connection closed")
                self._send_chunk(bytes(chunk))

    async def send_message(self, message: bytes) -> None:
        if not self._has_room():
            await self._wait_for_room(0)
        self.send_now(message)

    def send_now(self, message: bytes) -> None:
        if self._end_reason:
            raise PeerLost(self.remote, "connection closed")
        self._send_chunk(message)
        if self.bytes_sent - self.other.bytes_received > MAX_UNREAD_BYTES:
            self.abort()
            raise PeerLost(self.remote, "it does not read what it is sent")

    def _has_room(self) -> bool:
        other = self.other
        return self.bytes_sent - other.bytes_received < WINDOW_BYTES and other.num_unread < BACKLOG_BYTES

    async def _wait_for_room(self, number: int) -> None:
        try:
            while not self._has_room() and not self._end_reason:
                self._room = self._room or asyncio.Event()
                await self._room.wait()
        except asyncio.CancelledError:
            if number > 0:  # a part of the message was sent: the receiver could not tell where the next one begins
                self.abort()
            raise

    def look_for_room(self) -> None:
        """Wake the sender if there is room now; called when the other end has read something."""
        if self._room is not None and (self._has_room() or self._end_reason):
            self._room.set()
            self._room = None

    def _send_chunk(self, chunk: bytes) -> None:
        num_bytes = len(chunk)
        if self.bytes_sent == self.other.bytes_received:
            self._busy_since = self._loop.now
        self.bytes_sent += num_bytes
        if not (self._up.is_limited or self._down.is_limited):
            self._in_flight.append(chunk)
            self._cross(num_bytes)
        else:
            for start in range(0, num_bytes, TURN_BYTES):
                piece = chunk[start : start + TURN_BYTES]
                self._transfer(piece, len(piece))

    # in flight: up, across, down; each arrival delivers the oldest chunk

    def _transfer(self, chunk: bytes | None, num_bytes: int) -> None:
        self._in_flight.append(chunk)
        if self._up.is_limited:
            self._up.enter(self, num_bytes, functools.partial(self._cross, num_bytes))
        else:
            self._cross(num_bytes)

    def _cross(self, num_bytes: int) -> None:
        arrival = self._loop.now + self._link.delay_s(self._rng)
        if arrival < self._in_order_after:
            arrival = self._in_order_after
        self._in_order_after = arrival
        self._loop.call_outside(arrival, self._reached, num_bytes)

    def _reached(self, num_bytes: int) -> None:
        if self._link.num_blocks:
            self._link.hold(self._reached, num_bytes)
        elif self._down.is_limited:
            self._down.enter(self, num_bytes, self._deliver)
        elif self.other.life.is_running and not self.is_silent:
            self.other.arrived(self._in_flight.popleft())
        else:
            self._deliver()

    def _deliver(self) -> None:
        chunk = self._in_flight.popleft()
        if not self.is_silent:
            self._loop.call_in(self.other.life, self.other.arrived, chunk)

    # receiving

    def arrived(self, chunk: bytes | None) -> None:
        """Receive bytes, or the end of the stream."""
        if self._end_reason:
            return
        now = self._loop.now
        other = self.other
        if chunk is None:
            self._network.note(f"{other.host.name}>{self.host.name} #{self.number} closed")
            self._end("connection closed")
            return
        num_bytes = len(chunk)
        self._trace.add_chunk(now, other.host.name, self.host.name, self.number, num_bytes, zlib.crc32(chunk))
        self.bytes_received += num_bytes
        self.last_received = now
        if other.bytes_sent == self.bytes_received:
            other._busy_s += now - other._busy_since  # noqa: SLF001 (the other end of the same stream)
        reader = self._reader
        if reader is None or reader.done() or num_bytes > HEARD_BYTES or not self.hear(chunk):
            self.num_unread += num_bytes
            self._unread.append(chunk)
            if reader is not None and not reader.done():
                reader.set_result(None)
        if other._room is not None:  # noqa: SLF001 (the other end of the same stream)
            other.look_for_room()

    async def receive(self) -> bytes:
        unread = self._unread
        if not unread:
            if self._reader is not None or self._end_reason:
                self._check_readable()
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if len(unread) == 1:
            taken = unread.popleft()
        else:
            taken = b"".join(unread)
            unread.clear()
        self._took(len(taken))
        return taken

    async def receive_into(self, view: memoryview) -> None:
        try:
            while len(view):
                if not self._unread:
                    await self._wait_for_bytes()
                chunk = self._unread.popleft()
                num_bytes = min(len(chunk), len(view))
                view[:num_bytes] = chunk[:num_bytes]
                view = view[num_bytes:]
                if num_bytes < len(chunk):
                    self._unread.appendleft(chunk[num_bytes:])
                self._took(num_bytes)
        except asyncio.CancelledError:
            self.abort()
            raise

    def _check_readable(self) -> None:
        if self._reader is not None:
            raise RuntimeError("two tasks receive from one stream")
        if self._end_reason:
            raise PeerLost(self.remote, self._end_reason)

    async def _wait_for_bytes(self) -> None:
        self._check_readable()
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _took(self, num_bytes: int) -> None:
        self.num_unread -= num_bytes
        if self.other._room is not None:  # noqa: SLF001 (the other end of the same stream)
            self.other.look_for_room()

    # the end

    def delivery(self) -> Delivery | None:
        if self._link.latency_s < LONG_LATENCY_S or self._end_reason:
            return None
        arrived = self.other.bytes_received
        under_way_s = self._loop.now - self._busy_since if self.bytes_sent > arrived else 0.0
        return Delivery(arrived, self.bytes_sent, 0, self._busy_s + under_way_s)

    def pace(self, bytes_per_s: float) -> None:
        pass  # queues are unlimited here

    async def close(self, timeout_s: float = 1.0) -> None:
        self.abort()

    async def wait_closed(self) -> None:
        if not self._end_reason:
            self._ended = self._ended or asyncio.Event()
            await self._ended.wait()

    def abort(self) -> None:
        if not self._end_reason:
            self._end("the stream was closed here")
            self._transfer(None, 0)

    def vanish(self) -> None:
        """Handle the loss of this end's machine; the other end is not notified."""
        if not self._end_reason:
            self.is_silent = self.other.is_silent = True
            self._end("the machine is gone")

    def _end(self, reason: str) -> None:
        self._end_reason = reason
        self.hear = _nothing_is_heard
        self._network.streams.pop(self, None)
        if self._ended is not None:
            self._ended.set()
        if self._reader is not None and not self._reader.done():
            self._reader.set_exception(PeerLost(self.remote, reason))
        self.look_for_room()


def _nothing_is_heard(chunk: bytes) -> bool:
    return False
