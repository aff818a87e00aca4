"""The frames of a control connection: length-prefixed msgpack.

A frame is four bytes of length (big endian), then one tagged msgpack map. Unknown fields are ignored, unknown kinds are
refused. The first frame of every stream is a :class:`Hello`, answered by :class:`Welcome` or :class:`Reject`; on a bulk
stream raw bytes follow, on a control stream the other frames do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from manyhands.base.address import AddressText
from manyhands.base.errors import ConfigError, ProtocolViolation
from manyhands.base.identity import PeerId
from manyhands.transport.api import Stream, is_control

MAX_FRAME_BYTES = (1 << 20) - 4
"""Larger frames are refused before they are read; large data is sent on bulk streams."""

MAX_TEXT = 500  # characters of a message for people

MAX_HEADER_BYTES = 1 << 16  # of a bulk stream

MAX_STRIPES = 8  # connections that carry one bulk stream

CONTROL = "control"

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of msgspec for bytes that do not decode."""


Addresses = Annotated[list[AddressText], msgspec.Meta(max_length=64)]
Agent = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class Stripe(msgspec.Struct):
    """Identifies one of several connections that carry a bulk stream.

    Attributes:
        stream_id: chosen by the dialler, the same for all connections of the stream.
        index: of this connection, from 0.
        count: number of connections.
    """

    stream_id: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STRIPES)]
    count: Annotated[int, msgspec.Meta(ge=2, le=MAX_STRIPES)]


class Hello(msgspec.Struct, tag="hello", omit_defaults=True):
    """Opens a stream.

    Attributes:
        purpose: ``control``, or the kind of bulk stream (such as ``averaging``).
        agent: software and version, for people.
        addresses: where the sender can be dialled; empty means client mode.
        header: for bulk streams: tells the acceptor what the stream is for.
        stripe: for bulk streams over several connections.
    """

    purpose: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
    agent: Agent = ""
    addresses: Addresses = []
    header: Annotated[bytes, msgspec.Meta(max_length=MAX_HEADER_BYTES)] = b""
    stripe: Stripe | None = None


class Welcome(msgspec.Struct, tag="welcome", omit_defaults=True):
    """Accepts a stream; fields as in :class:`Hello`.

    Attributes:
        seen_host, seen_port: where the control stream comes from, as seen by the sender; empty and 0 if unknown.
        relays: whether the sender forwards bulk streams.
    """

    agent: Agent = ""
    addresses: Addresses = []
    seen_host: Annotated[str, msgspec.Meta(max_length=64)] = ""
    seen_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    relays: bool = False


class Reject(msgspec.Struct, tag="reject"):
    """Refuses a stream; the sender closes it."""

    code: str
    message: str


class Request(msgspec.Struct, tag="request"):
    """A call; ``timeout_s`` is how long the caller waits."""

    id: int
    method: str
    timeout_s: float
    body: msgspec.Raw


class Response(msgspec.Struct, tag="response"):
    """The result of a call."""

    id: int
    body: msgspec.Raw


class CallFailure(msgspec.Struct, tag="failure"):
    """A call that ended without a result; ``code`` is for programs, ``message`` for people."""

    id: int
    code: str
    message: str


class Cancel(msgspec.Struct, tag="cancel"):
    """The caller no longer waits for this call."""

    id: int


class Ping(msgspec.Struct, tag="ping"):
    """Shows that the sender is alive and asks for a :class:`Pong`."""


class Pong(msgspec.Struct, tag="pong"):
    """Answers a :class:`Ping`."""


class Drain(msgspec.Struct, tag="drain"):
    """The sender begins no more calls on this connection.

    The connection is closed once both ends have sent this and all calls are answered.
    """


class Goodbye(msgspec.Struct, tag="goodbye"):
    """The sender closes this connection on purpose."""

    reason: str


Frame = Hello | Welcome | Reject | Request | Response | CallFailure | Cancel | Ping | Pong | Drain | Goodbye

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frame(frame: Frame) -> bytes:
    """Encode one frame, with its length in front.

    Raises:
        ConfigError: it is larger than :data:`MAX_FRAME_BYTES`.
    """
    payload = _encoder.encode(frame)
    if len(payload) > MAX_FRAME_BYTES:
        raise ConfigError(
            f"a message of {len(payload)} bytes; at most {MAX_FRAME_BYTES} are allowed. Send larger data over a bulk "
            "stream"
        )
    return len(payload).to_bytes(4, "big") + payload


async def send_frame(stream: Stream, frame: Frame) -> None:
    """Send one frame; a cancelled call to a control stream never sends a part of it."""
    data = encode_frame(frame)
    await (stream.send_message(data) if is_control(stream) else stream.send(data))


async def receive_frame(stream: Stream) -> Frame:
    """Receive the next frame of ``stream``.

    Raises:
        ProtocolViolation: too long, not msgpack, an unknown kind, or a field of the wrong type.
        PeerLost: the stream ended.
    """
    prefix = bytearray(4)
    await stream.receive_into(memoryview(prefix))
    payload = bytearray(_checked_length(stream.remote, prefix))
    await stream.receive_into(memoryview(payload))
    return _decode(stream.remote, bytes(payload))


class FrameReader:
    """Splits the bytes of a control stream into frames.

    Args:
        remote: the sender, for errors.
    """

    def __init__(self, remote: PeerId) -> None:
        self._remote = remote
        self._received = bytearray()
        self._num_needed = 4  # bytes needed for the next step

    @property
    def is_midway(self) -> bool:
        """Whether an incomplete frame is buffered."""
        return bool(self._received)

    def frames(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that ``data`` completes; take all of them before the next call.

        Raises:
            ProtocolViolation: as :func:`receive_frame`.
        """
        if self._received:
            self._received += data
            if len(self._received) < self._num_needed:
                return
            data = bytes(self._received)
            self._received.clear()
        start = 0
        self._num_needed = 4
        num_bytes = len(data)
        while num_bytes >= start + 4:
            end = start + 4 + _checked_length(self._remote, data[start : start + 4])
            if num_bytes < end:
                self._num_needed = end - start
                break
            yield _decode(self._remote, data[start + 4 : end])
            start = end
        if start < num_bytes:
            self._received += data[start:]


def _checked_length(remote: PeerId, prefix: bytes | bytearray) -> int:
    num_bytes = int.from_bytes(prefix, "big")
    if num_bytes > MAX_FRAME_BYTES:
        raise ProtocolViolation(remote, f"sent a frame of {num_bytes} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return num_bytes


def _decode(remote: PeerId, payload: bytes) -> Frame:
    try:
        frame: Frame = _decoder.decode(payload)
    except UNREADABLE as error:
        raise ProtocolViolation(remote, f"sent a frame that cannot be read: {readable(str(error))}") from error
    return frame


def readable(text: str) -> str:
    """Shorten text from another peer and replace control characters, for a log line or a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text[:MAX_TEXT])
