"""What travels on the wire: pinned bytes, and nothing that another peer may send does harm."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.errors import ConfigError, PeerLost, ProtocolViolation
from manyhands.rpc.frames import (
    MAX_FRAME_BYTES,
    CallFailure,
    Cancel,
    Drain,
    Frame,
    FrameReader,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Reject,
    Request,
    Response,
    Stripe,
    Welcome,
    encode_frame,
    readable,
    receive_frame,
)
from tests.memory_transport import MemoryStream
from tests.network import PATIENCE_S, identity_of

BODY = msgspec.Raw(msgspec.msgpack.encode({"text": "hi"}))
DEEP = b"\x91" * 100_000 + b"\xc0"  # lists in lists

# A change here breaks the peers of older versions: it needs a new ALPN.
GOLDEN: list[tuple[Frame, str]] = [
    (Hello("control"), "0000001c82a474797065a568656c6c6fa7707572706f7365a7636f6e74726f6c"),
    (
        Hello("averaging", "manyhands/0.1.0", ["/ip4/127.0.0.1/tcp/1"], b"\x01\x02"),
        "0000005f85a474797065a568656c6c6fa7707572706f7365a9617665726167696e67a56167656e74af6d616e7968616e64732f302e312e30"
        "a961646472657373657391b42f6970342f3132372e302e302e312f7463702f31a6686561646572c4020102",
    ),
    (Welcome(), "0000000e81a474797065a777656c636f6d65"),
    (
        Welcome("manyhands/0.1.0", ["/ip4/127.0.0.1/tcp/1"]),
        "0000004483a474797065a777656c636f6d65a56167656e74af6d616e7968616e64732f302e312e30"
        "a961646472657373657391b42f6970342f3132372e302e302e312f7463702f31",
    ),
    (
        Reject("unknown_purpose", "no"),
        "0000002d83a474797065a672656a656374a4636f6465af756e6b6e6f776e5f707572706f7365a76d657373616765a26e6f",
    ),
    (
        Request(7, "test.echo", 2.5, BODY),
        "0000004485a474797065a772657175657374a2696407a66d6574686f64a9746573742e6563686f"
        "a974696d656f75745f73cb4004000000000000a4626f647981a474657874a26869",
    ),
    (
        Hello("state", "", [], b"", Stripe(bytes(range(16)), 1, 4)),
        "0000004c83a474797065a568656c6c6fa7707572706f7365a57374617465a673747269706583a973747265616d5f6964c410"
        "000102030405060708090a0b0c0d0e0fa5696e64657801a5636f756e7404",
    ),
    (Response(7, BODY), "0000002183a474797065a8726573706f6e7365a2696407a4626f647981a474657874a26869"),
    (
        CallFailure(7, "busy", "too many calls at once"),
        "0000003b84a474797065a76661696c757265a2696407a4636f6465a462757379"
        "a76d657373616765b6746f6f206d616e792063616c6c73206174206f6e6365",
    ),
    (Cancel(7), "0000001182a474797065a663616e63656ca2696407"),
    (Drain(), "0000000c81a474797065a5647261696e"),
    (Ping(), "0000000b81a474797065a470696e67"),
    (Pong(), "0000000b81a474797065a4706f6e67"),
    (Goodbye("it is closing"), "0000002382a474797065a7676f6f64627965a6726561736f6ead697420697320636c6f73696e67"),
]


def stream_of(data: bytes, *, ends: bool = True) -> MemoryStream:
    """A stream on which ``data`` has arrived."""
    stream = MemoryStream(identity_of(0).peer_id, identity_of(1).peer_id)
    stream.send_now(data)  # it is its own other end
    if ends:
        stream.abort()
    return stream


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def payload_of(**fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(("frame", "wire"), GOLDEN, ids=lambda value: type(value).__name__)
async def test_encoded_frames_never_change(frame: Frame, wire: str) -> None:
    assert encode_frame(frame).hex() == wire
    again = await receive_frame(stream_of(bytes.fromhex(wire)))
    assert type(again) is type(frame)
    assert encode_frame(again).hex() == wire


@given(
    numbers=st.lists(st.integers(0, len(GOLDEN) - 1), max_size=12),
    cuts=st.lists(st.integers(0, 2000), max_size=12),
)
def test_frames_come_whole_however_their_bytes_arrive(numbers: list[int], cuts: list[int]) -> None:
    sent = b"".join(bytes.fromhex(GOLDEN[number][1]) for number in numbers)
    edges = [0, *sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
    reader = FrameReader(identity_of(0).peer_id)
    frames = [frame for a, b in itertools.pairwise(edges) for frame in reader.frames(sent[a:b])]
    assert b"".join(encode_frame(frame) for frame in frames) == sent


def test_frames_before_a_violation_are_handed_out() -> None:
    reader = FrameReader(identity_of(0).peer_id)
    frames = reader.frames(encode_frame(Ping()) + b"\xff\xff\xff\xff")
    assert isinstance(next(frames), Ping)
    with pytest.raises(ProtocolViolation, match="4294967295 bytes"):
        next(frames)


def test_every_kind_of_frame_has_a_golden_encoding() -> None:
    assert {type(frame) for frame, _ in GOLDEN} == set(Frame.__args__)


async def test_unknown_fields_are_ignored() -> None:
    payload = payload_of(type="goodbye", reason="it is closing", mood="sad", since={"then": [1, None]})
    assert await receive_frame(stream_of(framed(payload))) == Goodbye("it is closing")


@pytest.mark.parametrize(
    "payload",
    [
        payload_of(type="sing", song="la"),
        payload_of(reason="no kind at all"),
        payload_of(type="goodbye"),
        payload_of(type="goodbye", reason=7),
        payload_of(type="ping") + b"\x00",
        b"",
        b"\xc1",
        msgspec.msgpack.encode(["ping"]),
        b"\x82\xa4type\xa7goodbye\xa6reason\xa2\xff\xfe",
        b"\x83\xa4type\xa7goodbye\xa6reason\xa0\xa1x" + DEEP,
        b"\x83\xa4type\xa7goodbye\xa6reason\xa0\xa1x\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
    ],
    ids=[
        "unknown kind",
        "no kind",
        "field missing",
        "wrong type",
        "more behind",
        "empty",
        "not msgpack",
        "a list",
        "not utf-8",
        "deep",
        "huge list",
        "huge map",
    ],
)
async def test_a_frame_that_cannot_be_read_is_a_violation(payload: bytes) -> None:
    with pytest.raises(ProtocolViolation, match=f"peer {identity_of(1).peer_id}: sent a frame that cannot be read"):
        await receive_frame(stream_of(framed(payload)))


@given(st.binary(max_size=200))
def test_random_bytes_are_a_frame_or_a_violation_or_too_short(data: bytes) -> None:
    async def receive() -> None:
        stream = stream_of(data)
        try:
            while True:
                await receive_frame(stream)
        except (ProtocolViolation, PeerLost):
            pass

    asyncio.run(receive())


@given(payload=st.binary(max_size=60), place=st.integers(0, 40), kind=st.sampled_from([wire for _, wire in GOLDEN]))
def test_damaged_frames_are_a_frame_or_a_violation(payload: bytes, place: int, kind: str) -> None:
    whole = bytes.fromhex(kind)[4:]
    damaged = whole[:place] + payload + whole[place + len(payload) :]

    async def receive() -> None:
        with suppress(ProtocolViolation):
            await receive_frame(stream_of(framed(damaged)))

    asyncio.run(receive())


@pytest.mark.parametrize("num_bytes", [MAX_FRAME_BYTES + 1, 0xFFFFFFFF])
async def test_a_frame_over_the_limit_is_refused_before_it_is_read(num_bytes: int) -> None:
    stream = stream_of(num_bytes.to_bytes(4, "big"), ends=False)  # who reads on would wait for ever
    with pytest.raises(ProtocolViolation, match=f"a frame of {num_bytes} bytes; at most {MAX_FRAME_BYTES} are allowed"):
        await asyncio.wait_for(receive_frame(stream), PATIENCE_S)
    assert stream.bytes_received == 4


async def test_a_frame_of_the_largest_size_passes_and_a_larger_one_is_refused() -> None:
    overhead = len(encode_frame(Goodbye("x" * 70_000))) - 70_000 - 4
    largest = Goodbye("x" * (MAX_FRAME_BYTES - overhead))
    assert await receive_frame(stream_of(encode_frame(largest))) == largest
    with pytest.raises(ConfigError, match=f"a message of {MAX_FRAME_BYTES + 1} bytes.*bulk stream"):
        encode_frame(Goodbye(largest.reason + "x"))


def test_text_of_a_peer_is_made_fit_for_a_log_line() -> None:
    assert readable("all\x1b[31m red\nand a new line\r") == "all?[31m red?and a new line?"
    assert readable("Grüße, 世界") == "Grüße, 世界"
    assert len(readable("x" * 10_000)) == 500
