"""What every transport provides: authenticated byte streams between two peers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple, Protocol, TypeGuard

from manyhands.base.address import Address
from manyhands.base.identity import Identity, PeerId

MAX_UNREAD_BYTES = 4 << 20
"""What may wait for a peer that does not read, before its stream is given up."""


class Delivery(NamedTuple):
    """What the system has done for a stream so far; bytes with encryption.

    Attributes:
        delivered: of what was sent, what the other end's system has confirmed.
        sent: with what was sent again.
        resent: sent again, since it seemed to be lost.
        busy_s: seconds in which something waited for the line, or was under way, and the other end had room for it.
    """

    delivered: int
    sent: int
    resent: int
    busy_s: float

    def since(self, before: Delivery) -> Delivery:
        """What has been done after something was done."""
        return Delivery(
            self.delivered - before.delivered,
            self.sent - before.sent,
            self.resent - before.resent,
            self.busy_s - before.busy_s,
        )


class Stream(Protocol):
    """An ordered, encrypted byte stream to one peer whose identity is proven.

    One task may send while another receives. Any call may raise :class:`manyhands.base.errors.PeerLost`.
    """

    @property
    def is_bulk(self) -> bool:
        """Whether it was dialled for bulk: it is no :class:`ControlStream`."""

    @property
    def remote(self) -> PeerId:
        """Who is at the other end."""

    @property
    def remote_host(self) -> str:
        """The IP address at the other end, as seen from here."""

    @property
    def bytes_sent(self) -> int:
        """So far, before encryption."""

    @property
    def bytes_received(self) -> int:
        """So far, after decryption."""

    @property
    def last_received(self) -> float:
        """The loop's time when the last bytes came, or when the stream was made."""

    async def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        """Send buffers one after the other; returns once they are handed over and the backlog is within its bound.

        The buffers must not change before it returns. Cancelling it ends the stream.
        """

    async def receive_into(self, view: memoryview) -> None:
        """Fill the whole of ``view`` (format ``B``, writable) with the next bytes."""

    async def send_each(self, pieces: Iterator[memoryview]) -> None:
        """Send what an iterator makes; it works beside the loop. A piece may change when the next one is asked for.

        What it raises ends the stream, and is raised here.
        """

    async def receive_each(self, views: Iterator[memoryview]) -> None:
        """Fill each view that an iterator gives; it works beside the loop, and goes on when its last view is full.

        What it raises ends the stream, and is raised here.
        """

    def delivery(self) -> Delivery | None:
        """What has been sent over a long link; None on others, and where the system does not tell."""

    def pace(self, bytes_per_s: float) -> None:
        """Have the system send no faster from now on, and evenly, if it can; as fast as it likes if infinite."""

    async def close(self, timeout_s: float = 1.0) -> None:
        """Flush what was sent, then close; aborts when that takes longer than ``timeout_s`` seconds."""

    async def wait_closed(self) -> None:
        """Wait until the stream is closed, by either end. No bound: put one around it."""

    def abort(self) -> None:
        """Close at once; waiting calls on both ends raise ``PeerLost``. May be called twice."""


class ControlStream(Stream, Protocol):
    """A stream that is fit for small messages in both directions as well."""

    @property
    def rtt_s(self) -> float:
        """The shortest round trip that the system has seen, in seconds; infinite if it does not tell."""

    async def send_message(self, message: bytes) -> None:
        """Send one message once the backlog is within its bound; when it is cancelled, whole or not at all."""

    def send_now(self, message: bytes) -> None:
        """Hand over one small message without waiting, after what was sent before.

        Raises:
            PeerLost: the stream is closed, or ends here since the other end has not read
                :data:`MAX_UNREAD_BYTES` that were sent.
        """

    async def receive(self) -> bytes:
        """The next bytes, as many as are here, at least one. Cancelling it loses none."""


def is_control(stream: Stream) -> TypeGuard[ControlStream]:
    """Whether a stream was dialled for control messages."""
    return not stream.is_bulk


OnStream = Callable[[Stream], Awaitable[None]]
"""Called with each accepted stream, as a task of the listener; the stream is aborted if it raises."""


class Listener(Protocol):
    """An open port."""

    addresses: list[Address]
    """Where it listens, with the actual port."""

    async def close(self) -> None:
        """Stop accepting, and end the handshakes and handlers that are under way."""


class Transport(Protocol):
    """A way to reach other peers."""

    identity: Identity

    async def dial(self, address: Address, timeout_s: float) -> ControlStream:
        """Open a stream to ``address``; who answers must be its ``peer_id``, if it has one.

        Raises:
            DialFailed: with the reason; also when ``timeout_s`` is over.
        """

    async def dial_bulk(self, address: Address, timeout_s: float) -> Stream:
        """As :meth:`dial`, for a stream that carries bulk."""

    def close(self) -> None:
        """Let go of what the streams share; they must be closed."""

    async def listen(self, address: Address, on_stream: OnStream) -> Listener:
        """Accept streams on ``address``; port 0 takes a free one.

        Raises:
            ConfigError: the port is taken, or the host is not an address of this machine.
        """
