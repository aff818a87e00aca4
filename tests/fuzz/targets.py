"""All decoders of what comes from outside, as fuzz targets."""

from __future__ import annotations

import warnings
import zlib

from manyhands.base.address import Address, parse_addresses
from manyhands.base.errors import ConfigError, PeerLost, ProtocolViolation
from manyhands.base.identity import Identity, PeerId, peer_id_from_public_key, public_key_of
from manyhands.base.run_id import checked_run_id
from manyhands.rpc.announce import seen_from_outside
from manyhands.rpc.frames import Frame, FrameReader, Hello, Welcome, encode_frame, receive_frame
from manyhands.rpc.outside import OutsideView
from manyhands.transport.certificate import leaf_certificate, peer_id_of_certificate
from tests.fuzz import access_targets, codec_targets, dht_targets, monitor_targets, reach_targets, run_targets
from tests.fuzz.files import IDENTITY_FILES, load_identity
from tests.fuzz.target import REMOTE, Target, finish, stream_of
from tests.network import identity_of
from tests.unit.rpc.test_frames import GOLDEN

from cryptography.hazmat.primitives import serialization  # isort: skip

OWN_ID = identity_of(1).peer_id
MULTIADDR = f"/ip4/203.0.113.7/tcp/31337/p2p/{OWN_ID}"
ADDRESSES = [
    MULTIADDR,
    "/ip6/2001:db8::7/tcp/1",
    f"/dns4/0.tcp.ngrok.io/tcp/12345/p2p/{OWN_ID}",
    "/dns/a-b.example/tcp/65535/",
    "example.org:31337",
    "[::1]:31337",
    "127.0.0.1:0",
]
ADDRESS_TOKENS = [
    "/", ":", "::", "[", "]", ".", "..", "-", "_", "%eth0", "%", "0x7f", "0", "00", "127.1", "1.2.3.4", "65536", "-1",
    "+1", "/tcp/", "/udp/", "/p2p/", "/ip4/", "/ip6/", "/dns/", "/dns4/", "/quic", OWN_ID, "12D3KooW", "\0", "\n", " ",
    "\u0661", "\u00b2", "\u202e", "\u3002", "xn--", "\u00e4", "\udcff", "a" * 64, "::ffff:1.2.3.4", "fe80::1%1", "@",
]  # fmt: skip
TEXT_TOKENS = [
    OWN_ID,
    "12D3KooW",
    "1",
    "l",
    "O",
    "Qm",
    " ",
    "\n",
    "\0",
    "\udcff",
    ".",
    "/",
    "\u00a0",
    "\u2028",
    "x" * 64,
]


def text_of(data: bytes) -> str:
    """Text as the command line gives it: bytes that are not UTF-8 become lone surrogates."""
    return data.decode("utf-8", "surrogateescape")


def _frames(data: bytes) -> None:
    """One frame after the other, and likewise cut out of pieces as they might come: both find the same."""
    frames, fault = _frames_one_by_one(data)
    cut, fault_of_cut = _frames_in_pieces(data)
    assert [encode_frame(frame) for frame in cut] == [encode_frame(frame) for frame in frames][: len(cut)]
    assert isinstance(fault_of_cut, ProtocolViolation) == isinstance(fault, ProtocolViolation)
    assert len(cut) == len(frames) or fault_of_cut is not None
    raise fault


def _frames_one_by_one(data: bytes) -> tuple[list[Frame], Exception]:
    frames: list[Frame] = []
    stream = stream_of(data)
    while True:
        try:
            frames.append(finish(receive_frame(stream)))
        except (ProtocolViolation, PeerLost) as error:
            return frames, error


def _frames_in_pieces(data: bytes) -> tuple[list[Frame], Exception | None]:
    frames: list[Frame] = []
    reader = FrameReader(REMOTE)
    size = 1 + zlib.crc32(data) % 50 if len(data) < 10_000 else 4096
    for start in range(0, len(data), size):
        try:
            frames += reader.frames(data[start : start + size])
        except ProtocolViolation as error:
            return frames, error
    return frames, None


def _hello(data: bytes) -> None:
    frame = finish(receive_frame(stream_of(data)))
    if isinstance(frame, (Hello, Welcome)):
        known = seen_from_outside(OWN_ID, frame.addresses, "203.0.113.7")
        assert len(known) <= 9
        assert all(address.peer_id == OWN_ID for address in known)
    if isinstance(frame, Welcome):
        view = OutsideView()
        view.note(OWN_ID, (frame.seen_host, frame.seen_port), ("192.168.0.2", 31337))
        assert all(Address.of(host, 1).protocol.startswith("ip") for host in view.hosts)


def _address(data: bytes) -> None:
    (address,) = parse_addresses([text_of(data)])
    assert Address.parse(str(address)) == address, "what was read is written so that it is read again"
    assert 0 <= address.port <= 65535
    assert len(str(address)) < 400
    assert str(address).isprintable()


def _peer_id(data: bytes) -> None:
    text = text_of(data)
    assert peer_id_from_public_key(public_key_of(PeerId(text)).public_bytes_raw()) == text


def _run_id(data: bytes) -> None:
    text = text_of(data)
    assert checked_run_id(text) == text
    text.encode()


def _certificate(data: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cryptography announces what it will refuse some day
        peer_id = peer_id_of_certificate(data)
    assert peer_id is None or public_key_of(peer_id)


FRAMES = [bytes.fromhex(wire)[4:] for _, wire in GOLDEN]
HELLOS = [
    encode_frame(frame)[4:]
    for frame in (
        Hello("control", "manyhands/0.1.0", ADDRESSES),
        Hello("averaging", "manyhands/0.1.0", ADDRESSES[:2], b"\x81\xa8group_id\xc4\x05group"),
        Welcome("manyhands/0.1.0", ADDRESSES),
        Welcome("manyhands/0.1.0", ADDRESSES, relays=True, seen_host="203.0.113.7", seen_port=31337),
    )
]
CERTIFICATES = [leaf_certificate(identity_of(1)).public_bytes(serialization.Encoding.DER)]
FRAME_ERRORS = (ProtocolViolation, PeerLost)

TARGETS: dict[str, Target] = {
    target.name: target
    for target in [
        Target(name="frames", seeds=FRAMES, run=_frames, errors=FRAME_ERRORS, is_framed=True),
        Target(name="hello", seeds=HELLOS, run=_hello, errors=FRAME_ERRORS, is_framed=True),
        Target(
            name="address",
            seeds=[text.encode() for text in ADDRESSES],
            run=_address,
            errors=(ConfigError,),
            kind="text",
            tokens=ADDRESS_TOKENS,
        ),
        Target(
            name="peer-id",
            seeds=[OWN_ID.encode(), Identity.from_seed(b"z" * 32).peer_id.encode()],
            run=_peer_id,
            errors=(ConfigError,),
            kind="text",
            tokens=TEXT_TOKENS,
        ),
        Target(
            name="run-id",
            seeds=[b"my-albert", "L\u00e4ufe_2".encode(), b"x" * 64],
            run=_run_id,
            errors=(ConfigError,),
            kind="text",
            tokens=TEXT_TOKENS,
        ),
        Target(
            name="identity-file",
            seeds=IDENTITY_FILES,
            run=load_identity,
            errors=(ConfigError,),
            kind="bytes",
            weight=0.3,
        ),
        Target(name="certificate", seeds=CERTIFICATES, run=_certificate, errors=(), kind="bytes", weight=0.5),
        *access_targets.TARGETS,
        *codec_targets.TARGETS,
        *dht_targets.TARGETS,
        *monitor_targets.TARGETS,
        *reach_targets.TARGETS,
        *run_targets.TARGETS,
    ]
}
