"""Fuzz targets: what peers tell each other about their reachability, up to the words that are printed."""

from __future__ import annotations

import msgspec

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError, ProtocolViolation
from manyhands.base.identity import PeerId
from manyhands.doctor import findings
from manyhands.doctor.checks import Finding
from manyhands.optim.run.reached_networks import told_votes
from manyhands.reach.messages import (
    DIAL_BACK,
    EXAMINE,
    REACHED,
    DialBackRequest,
    DialBackResponse,
    DialOutcome,
    ExamineRequest,
    ExamineResponse,
    ReachedRequest,
    ReachedResponse,
)
from manyhands.rpc.announce import ANNOUNCE, Announcement, AnnounceResponse, seen_from_outside
from manyhands.rpc.dial_rules import may_dial, may_dial_heard
from manyhands.rpc.dialled_back_streams import DIAL_BULK, TOKEN_BYTES, DialRequest, DialResponse
from manyhands.rpc.punched_streams import PUNCH, PunchRequest, PunchResponse
from manyhands.rpc.relayed_streams import RelayRequest
from tests.fuzz.target import Target, decoded

ADDRESSES = ["/ip4/203.0.113.7/tcp/31337", "/dns4/peer.example/tcp/1", "[::1]:7", "127.0.0.1:1"]
DIALLED = [Address.parse(text) for text in ADDRESSES]


def _examine_response(data: bytes) -> None:
    seen = decoded(data, ExamineResponse)
    if host := findings.ip_address(seen.host):
        Address.of(host, 1)
    _printable(findings.answers(seen))
    _printable(findings.clock(1.8e9 - seen.wall_time_s, 0.1, 60.0, None))


def _dial_back_request(data: bytes) -> None:
    for text in decoded(data, DialBackRequest).addresses:
        try:
            address = Address.parse(text)
        except ConfigError:
            continue
        if address.protocol.startswith("ip"):
            assert not (may_dial(address.host, "8.8.8.8") and address.is_loopback)


def _reached_response(data: bytes) -> None:
    hosts = decoded(data, ReachedResponse).hosts
    told_votes([PeerId(str(number)) for number in range(len(hosts))], [hosts])


def _dial_back_response(data: bytes) -> None:
    outcomes = list(zip(DIALLED, decoded(data, DialBackResponse).outcomes, strict=False))
    for are_announced in (False, True):
        _printable(findings.dialled_back(outcomes, are_announced=are_announced, port_was_chosen=True))


def _printable(finding: Finding) -> None:
    assert finding.detail.isprintable()
    assert finding.advice.isprintable()
    assert len(finding.detail) < 4000


def _dial_request(data: bytes) -> None:
    assert len(decoded(data, DialRequest).token) == TOKEN_BYTES


def _places(data: bytes, kind: type[PunchRequest] | type[PunchResponse]) -> None:
    """What a peer on the internet dials of it."""
    for text in decoded(data, kind).places:
        try:
            place = Address.parse(text)
        except ConfigError:
            continue
        if place.protocol.startswith("ip") and may_dial_heard(place.host, place.port, ["8.8.8.8"]):
            assert not place.is_loopback
            assert not place.is_unspecified


def _announcement(data: bytes) -> None:
    for address in seen_from_outside(PeerId("12D3KooW"), decoded(data, Announcement).addresses, "203.0.113.7"):
        assert str(address).isprintable()


_VIOLATION = (ProtocolViolation,)
TARGETS = [
    Target(
        name=f"{ANNOUNCE.name}.request",
        seeds=[msgspec.msgpack.encode(Announcement(["/dns4/x.tcp.ngrok.io/tcp/12345", "/ip4/127.0.0.1/tcp/31337"]))],
        run=_announcement,
        errors=_VIOLATION,
        weight=0.2,
    ),
    Target(
        name=f"{ANNOUNCE.name}.response",
        seeds=[msgspec.msgpack.encode(AnnounceResponse())],
        run=lambda data: decoded(data, AnnounceResponse),
        errors=_VIOLATION,
        weight=0.2,
    ),
    Target(
        name=f"{DIAL_BULK.name}.request",
        seeds=[msgspec.msgpack.encode(DialRequest(bytes(TOKEN_BYTES)))],
        run=_dial_request,
        errors=_VIOLATION,
        weight=0.2,
    ),
    Target(
        name=f"{DIAL_BULK.name}.response",
        seeds=[msgspec.msgpack.encode(DialResponse())],
        run=lambda data: decoded(data, DialResponse),
        errors=_VIOLATION,
        weight=0.2,
    ),
    Target(
        name=f"{PUNCH.name}.request",
        seeds=[msgspec.msgpack.encode(PunchRequest(["/ip4/203.0.113.7/tcp/31337", "/ip6/2001:db8::1/tcp/31337"]))],
        run=lambda data: _places(data, PunchRequest),
        errors=_VIOLATION,
        weight=0.5,
    ),
    Target(
        name=f"{PUNCH.name}.response",
        seeds=[msgspec.msgpack.encode(PunchResponse(["/ip4/203.0.113.7/tcp/31337"]))],
        run=lambda data: _places(data, PunchResponse),
        errors=_VIOLATION,
        weight=0.5,
    ),
    Target(
        name="relay.request",
        seeds=[msgspec.msgpack.encode(RelayRequest(PeerId("12D3KooW"), is_bulk=True))],
        run=lambda data: decoded(data, RelayRequest),
        errors=_VIOLATION,
        weight=0.5,
    ),
    Target(
        name=f"{EXAMINE.name}.request",
        seeds=[msgspec.msgpack.encode(ExamineRequest())],
        run=lambda data: decoded(data, ExamineRequest),
        errors=_VIOLATION,
        weight=0.2,
    ),
    Target(
        name=f"{EXAMINE.name}.response",
        seeds=[
            msgspec.msgpack.encode(ExamineResponse(1.8e9, host, 7, "manyhands/0.1.0")) for host in ("::1", "8.8.8.8")
        ],
        run=_examine_response,
        errors=_VIOLATION,
        weight=0.5,
    ),
    Target(
        name=f"{DIAL_BACK.name}.request",
        seeds=[msgspec.msgpack.encode(DialBackRequest(ADDRESSES))],
        run=_dial_back_request,
        errors=_VIOLATION,
        weight=0.5,
    ),
    Target(
        name=f"{DIAL_BACK.name}.response",
        seeds=[
            msgspec.msgpack.encode(DialBackResponse([DialOutcome(ADDRESSES[0])])),
            msgspec.msgpack.encode(DialBackResponse([DialOutcome(a, "refused", "why") for a in ADDRESSES])),
        ],
        run=_dial_back_response,
        errors=_VIOLATION,
        weight=0.5,
    ),
    Target(
        name=f"{REACHED.name}.request",
        seeds=[msgspec.msgpack.encode(ReachedRequest([PeerId("12D3KooW")]))],
        run=lambda data: decoded(data, ReachedRequest),
        errors=_VIOLATION,
        weight=0.2,
    ),
    Target(
        name=f"{REACHED.name}.response",
        seeds=[msgspec.msgpack.encode(ReachedResponse([host, "", "no address"])) for host in ("fe80::1%0", "8.8.8.8")],
        run=_reached_response,
        errors=_VIOLATION,
        weight=0.5,
    ),
]
