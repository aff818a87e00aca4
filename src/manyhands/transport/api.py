"""The interface of all transports: authenticated byte streams between two peers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeGuard

from manyhands.base.address import Address
from manyhands.base.identity import Identity, PeerId

MAX_UNREAD_BYTES = 4 << 20
"""Unread bytes after which a stream to a peer that does not read is aborted."""


class Delivery(NamedTuple):
    """Counters of a stream from the operating system; bytes include encryption.

    Attributes:
        delivered: sent bytes that the other end's system has acknowledged.
        sent: including retransmissions.
        resent: retransmissions of data that seemed to be lost.
        busy_s: seconds in which data was queued or in flight, and the other end had room for it.
    """

    delivered: int
    sent: int
    resent: int
    busy_s: float

    def since(self, before: Delivery) -> Delivery:
        """Return the difference to an earlier sample."""
        return Delivery(
            self.delivered - before.delivered,
            self.sent - before.sent,
            self.resent - before.resent,
            self.busy_s - before.busy_s,
        )


class Ends(NamedTuple):
    """Both ends of a TCP connection: IP addresses and ports."""

    here: tuple[str, int]
    there: tuple[str, int]


class Port(Protocol):
    """A local TCP port that is reserved for one connection."""

    number: int

    def close(self) -> None:
        """Give it up, unless the connection was made."""


def total_of(deliveries: Iterable[Delivery]) -> Delivery:
    """Return the sums of the counters of several streams."""
    delivered = 0
    sent = 0
    resent = 0
    busy_s = 0.0
    for one in deliveries:
        delivered += one.delivered
        sent += one.sent
        resent += one.resent
        busy_s += one.busy_s
    return Delivery(delivered, sent, resent, busy_s)


class Stream(Protocol):
    """An ordered, encrypted byte stream to one peer whose identity is proven.

    One task may send while another receives. Any call may raise :class:`manyhands.base.errors.PeerLost`.
    """

    @property
    def is_bulk(self) -> bool:
        """Whether it was dialled for bulk data; if not, it is a :class:`ControlStream`."""

    @property
    def remote(self) -> PeerId:
        """The peer at the other end."""

    @property
    def remote_host(self) -> str:
        """The IP address at the other end, as seen from here."""

    @property
    def bytes_sent(self) -> int:
        """Bytes sent so far, before encryption."""

    @property
    def bytes_received(self) -> int:
        """Bytes received so far, after decryption."""

    @property
    def last_received(self) -> float:
        """Loop time at which the last bytes arrived, or the stream was opened."""

    async def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        """Send buffers in order; returns once they are handed over and the backlog is within its limit.

        The buffers must not change before it returns. Cancelling it ends the stream.
        """

    async def receive_into(self, view: memoryview) -> None:
        """Fill the whole of ``view`` (format ``B``, writable) with the next bytes."""

    async def send_each(self, pieces: Iterator[memoryview]) -> None:
        """Send the pieces of an iterator, which runs outside the loop. A piece may change when the next is requested.

        An exception of the iterator ends the stream and is raised here.
        """

    async def receive_each(self, views: Iterator[memoryview]) -> None:
        """Fill each view of an iterator, which runs outside the loop and is resumed once its last view is full.

        An exception of the iterator ends the stream and is raised here.
        """

    def delivery(self) -> Delivery | None:
        """Return the counters of a stream on a long link; None on others, and if the system has none."""

    def pace(self, bytes_per_s: float) -> None:
        """Limit the send rate from now on, with even spacing, if the system can; infinity removes the limit."""

    async def close(self, timeout_s: float = 1.0) -> None:
        """Flush what was sent, then close; abort when that takes longer than ``timeout_s`` seconds."""

    async def wait_closed(self) -> None:
        """Wait until either end closes the stream, without a timeout."""

    def abort(self) -> None:
        """Close at once; waiting calls on both ends raise ``PeerLost``. May be called twice."""


class ControlStream(Stream, Protocol):
    """A stream that is also suited to small messages in both directions."""

    @property
    def rtt_s(self) -> float:
        """The shortest round trip that the system has measured, in seconds; infinite if unknown."""

    @property
    def ends(self) -> Ends | None:
        """The IP addresses and ports of the connection, as seen from here; None if it has none, or is closed."""

    async def send_message(self, message: bytes) -> None:
        """Send one message once the backlog is within its limit; if cancelled, it is sent whole or not at all."""

    def send_now(self, message: bytes) -> None:
        """Queue one small message without waiting, after what was sent before.

        Raises:
            PeerLost: the stream is closed, or is aborted now since the other end has left
                :data:`MAX_UNREAD_BYTES` unread.
        """

    async def receive(self) -> bytes:
        """Return the next bytes, as many as have arrived, at least one. Cancelling it loses none."""


def is_control(stream: Stream) -> TypeGuard[ControlStream]:
    """Whether a stream was dialled for control messages."""
    return not stream.is_bulk


OnStream = Callable[[Stream], Awaitable[None]]
"""Called with each accepted stream, as a task of the listener; the stream is aborted if it raises."""


Pay = Callable[[int], Awaitable[None]]
"""Called with a number of bytes before they are forwarded; it waits to limit the rate."""


class Listener(Protocol):
    """An open port."""

    addresses: list[Address]
    """The addresses that it listens on, with the actual port."""

    async def close(self) -> None:
        """Stop accepting, and end running handshakes and handlers."""


class Transport(Protocol):
    """Dials and accepts streams."""

    identity: Identity

    async def dial(self, address: Address, timeout_s: float) -> ControlStream:
        """Open a stream to ``address``; the answering peer must have its ``peer_id``, if it has one.

        Raises:
            DialFailed: with the reason; also after ``timeout_s``.
        """

    async def dial_bulk(self, address: Address, timeout_s: float) -> Stream:
        """Like :meth:`dial`, for a bulk stream."""

    async def dial_through(self, carrier: Stream, peer_id: PeerId, timeout_s: float, *, is_bulk: bool) -> Stream:
        """Like :meth:`dial`, over a bulk stream whose other end is a relay: it forwards what follows to the peer.

        Takes over the carrier, also on failure. Nothing of it may be unread.
        """

    async def accept_through(self, carrier: Stream, timeout_s: float) -> Stream:
        """Accept a stream that another peer opens with :meth:`dial_through`; takes over the carrier, also on failure.

        Raises:
            DialFailed: no peer has proven its identity in time.
        """

    async def forward(self, one: Stream, other: Stream, chunk_bytes: int, pay: Pay) -> None:
        """Take over two bulk streams, and forward bytes unread between the machines at their other ends.

        Returns once both ends are closed, or one of the connections fails.

        Args:
            chunk_bytes: most bytes that are held in each direction.
        """

    def public_ip6(self) -> str:
        """Return the global IPv6 address from which this machine connects to others; empty if it has none."""

    def take_port(self) -> Port:
        """Reserve a free local port for :meth:`dial_from` or :meth:`accept_from`.

        Raises:
            ConfigError: this system cannot open connections from both ends at the same time.
        """

    async def dial_from(
        self, port: Port, places: Sequence[Address], peer_id: PeerId, timeout_s: float, *, is_bulk: bool
    ) -> Stream:
        """Like :meth:`dial`, to a peer that connects from these places to ``port`` at about the same time.

        Each connection attempt lets the packets of the other end through the firewall or router of this machine
        (simultaneous open, RFC 9293, section 3.5). Takes over the port.
        """

    async def accept_from(self, port: Port, places: Sequence[Address], peer_id: PeerId, timeout_s: float) -> Stream:
        """Accept a stream that another peer opens with :meth:`dial_from`; takes over the port.

        Raises:
            DialFailed: that peer has not proven its identity in time.
        """

    def close(self) -> None:
        """Release shared resources; all streams must be closed."""

    async def listen(self, address: Address, on_stream: OnStream) -> Listener:
        """Accept streams on ``address``; port 0 takes a free one.

        Raises:
            ConfigError: the port is taken, or the host is not an address of this machine.
        """
