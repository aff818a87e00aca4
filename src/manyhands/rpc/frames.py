"""What travels on a control connection: length-prefixed msgpack frames.

A frame is four bytes of length (big endian), then one tagged msgpack map. Unknown fields are ignored, unknown kinds are
refused. The first frame of every stream is a :class:`Hello`, answered by :class:`Welcome` or :class:`Reject`; on a bulk
stream raw bytes follow, on a control stream the other frames do.
"""

from __future__ import annotations

import msgspec

from manyhands.base.errors import ConfigError, ProtocolViolation
from manyhands.transport.api import Stream
from manyhands.transport.runs import RUN_BYTES

MAX_FRAME_BYTES = RUN_BYTES - 4
"""Larger frames are refused before they are read; large data travels on bulk streams. With its length in front a frame
is sent in one run, so that a caller who gives up never leaves half a frame behind."""

MAX_TEXT = 500  # characters of a message for people

CONTROL = "control"

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what is expected."""


class Hello(msgspec.Struct, tag="hello", omit_defaults=True):
    """Opens a stream.

    Attributes:
        purpose: ``control``, or the kind of bulk stream (such as ``averaging``).
        agent: software and version, for people.
        addresses: where the sender can be dialled; none means client mode.
        header: for bulk streams: tells the acceptor what the stream is for.
    """

    purpose: str
    agent: str = ""
    addresses: list[str] = []
    header: bytes = b""


class Welcome(msgspec.Struct, tag="welcome", omit_defaults=True):
    """Accepts a stream; fields as in :class:`Hello`."""

    agent: str = ""
    addresses: list[str] = []


class Reject(msgspec.Struct, tag="reject"):
    """Turns a stream down; the sender closes it."""

    code: str
    message: str


class Request(msgspec.Struct, tag="request"):
    """A call; ``timeout_s`` is what the caller will wait."""

    id: int
    method: str
    timeout_s: float
    body: msgspec.Raw


class Response(msgspec.Struct, tag="response"):
    """The result of a call."""

    id: int
    body: msgspec.Raw


class Failure(msgspec.Struct, tag="failure"):
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


class Goodbye(msgspec.Struct, tag="goodbye"):
    """The sender closes this connection on purpose."""

    reason: str


Frame = Hello | Welcome | Reject | Request | Response | Failure | Cancel | Ping | Pong | Goodbye

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frame(frame: Frame) -> bytes:
    """The bytes of one frame, with its length in front.

    Raises:
        ConfigError: it is larger than :data:`MAX_FRAME_BYTES`.
    """
    payload = _encoder.encode(frame)
    if len(payload) > MAX_FRAME_BYTES:
        raise ConfigError(
            f"a message of {len(payload)} bytes; {MAX_FRAME_BYTES} are allowed, larger data needs a bulk stream"
        )
    return len(payload).to_bytes(4, "big") + payload


async def send_frame(stream: Stream, frame: Frame) -> None:
    """Send one frame; frames of concurrent senders do not mix."""
    await stream.send(encode_frame(frame))


async def receive_frame(stream: Stream) -> Frame:
    """The next frame of ``stream``.

    Raises:
        ProtocolViolation: too long, not msgpack, an unknown kind, or a field of the wrong type.
        PeerLost: the stream ended.
    """
    prefix = bytearray(4)
    await stream.receive_into(memoryview(prefix))
    num_bytes = int.from_bytes(prefix, "big")
    if num_bytes > MAX_FRAME_BYTES:
        raise ProtocolViolation(stream.remote, f"a frame of {num_bytes} bytes; at most {MAX_FRAME_BYTES} are allowed")
    payload = bytearray(num_bytes)
    await stream.receive_into(memoryview(payload))
    try:
        frame: Frame = _decoder.decode(payload)
    except UNREADABLE as error:
        raise ProtocolViolation(stream.remote, f"a frame that cannot be read: {readable(str(error))}") from error
    return frame


def readable(text: str) -> str:
    """What another peer wrote, fit for a log line or a terminal: short, and without control characters."""
    return "".join(char if char.isprintable() else "?" for char in text[:MAX_TEXT])
