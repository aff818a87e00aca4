"""Fuzz targets: charters, leases, invitations, bans and tickets. What is signed is fuzzed before and after signing."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import base58
import msgspec

from manyhands.access import Charter, Invitation, Lease, SignedCharter
from manyhands.access.charter import DOMAIN as CHARTER_DOMAIN
from manyhands.access.invitation import DOMAIN as INVITATION_DOMAIN
from manyhands.access.invitation import SignedInvitation
from manyhands.access.lease import DOMAIN as LEASE_DOMAIN
from manyhands.access.lease import SignedLease
from manyhands.access.ledger import Accounts, HeldLease, Invitations, Ledger, Uses
from manyhands.access.members import readable
from manyhands.access.messages import (
    CHARTER_RECORDS,
    CharterRecord,
    LeaseRequest,
    LeaseResponse,
    ManageRequest,
    ManageResponse,
    MemberEntry,
    Shown,
)
from manyhands.access.signed import MAX_BODY_BYTES, Signed
from manyhands.base.address import Address
from manyhands.base.errors import BadSignature, ConfigError, ProtocolViolation
from manyhands.base.identity import Identity, PeerId
from manyhands.base.ticket import PREFIX, Ticket, split_tickets
from manyhands.cli.access_commands import described
from manyhands.dht.records import decode_value, encode_value
from tests.fuzz.target import REMOTE, Target, decoded
from tests.network import identity_of

OWNER, COORDINATOR, PEER = map(identity_of, range(1, 4))
CHARTER = SignedCharter.sign(
    OWNER, Charter("ours", OWNER.peer_id, "invite", [COORDINATOR.peer_id], bytes(32), created_at=1.0)
)
LEASE = SignedLease.sign(COORDINATOR, Lease(CHARTER.digest, PEER.peer_id, "trainer", 1.7e9, 1.7e9 + 43200))
INVITATION = SignedInvitation.sign(
    COORDINATOR, Invitation(CHARTER.digest, bytes(12), 5, 1.7e9, COORDINATOR.peer_id, "observer", PEER.peer_id)
)
NOW = 1.69e9
ADDRESS = Address.parse(f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER.peer_id}")
TICKETS = [
    Ticket("ours", [ADDRESS], b"d" * 16),
    Ticket("ours", [ADDRESS], b"", CHARTER.digest, INVITATION.signed.encoded()),
]


def _resigned(signer: Identity, domain: str, data: bytes) -> bytes:
    """The body as it would come from one who may sign, and signs anything."""
    body = data[:MAX_BODY_BYTES]
    return Signed(signer.peer_id, body, signer.sign(domain, body)).encoded()


def _charter(data: bytes) -> None:
    charter = SignedCharter.from_bytes(_resigned(OWNER, CHARTER_DOMAIN, data), REMOTE)
    assert charter.charter.owner == OWNER.peer_id
    assert len(charter.coordinators) <= 17
    limits = charter.charter.limits
    assert all(map(math.isfinite, (limits.max_weight_ratio, limits.max_weight_share)))
    assert msgspec.json.encode(charter.described())
    assert SignedCharter.from_bytes(charter.signed.encoded(), REMOTE) == charter


def _lease(data: bytes) -> None:
    held = SignedLease.from_bytes(_resigned(COORDINATOR, LEASE_DOMAIN, data), CHARTER, PEER.peer_id)
    assert held.lease.peer_id == PEER.peer_id
    assert not held.counts(held.lease.expires_at + 1e9, skew_s=60, grace_s=86400)


def _invitation(data: bytes) -> None:
    raw = _resigned(COORDINATOR, INVITATION_DOMAIN, data)
    invitation = SignedInvitation.from_bytes(raw, CHARTER, REMOTE).invitation
    assert invitation.uses >= 1
    assert math.isfinite(invitation.expires_at)


def _signed(data: bytes) -> None:
    faults = 0
    for read in (
        lambda: SignedCharter.from_bytes(data, REMOTE),
        lambda: SignedLease.from_bytes(data, CHARTER, PeerId(PEER.peer_id)),
        lambda: SignedInvitation.from_bytes(data, CHARTER, REMOTE),
    ):
        try:
            read()
        except (ProtocolViolation, BadSignature) as error:
            faults += 1
            last = error
    assert faults >= 2, "a signature counts for one purpose"
    raise last


def _charter_record(data: bytes) -> None:
    decode_value(data)
    try:
        record = CHARTER_RECORDS.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    assert len(record.bans) <= 1000
    readable(record.addresses)
    SignedCharter.from_bytes(record.charter, REMOTE)


def _ticket(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    ticket = Ticket.parse(text)
    assert Ticket.parse(str(ticket)).charter == ticket.charter
    split_tickets([text])
    if ticket.is_charted and ticket.token:
        SignedInvitation.from_bytes(ticket.token, CHARTER, REMOTE)


def _ticket_content(data: bytes) -> None:
    _ticket((PREFIX + base58.b58encode_check(data[:600]).decode()).encode())


def _file(name: str, data: bytes) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-")) / "coordinator"
    folder.mkdir()
    (folder / name).write_bytes(data)
    return folder.parent


def _cleared(state_dir: Path) -> None:
    for path in sorted(state_dir.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    state_dir.rmdir()


def _bans(data: bytes) -> None:
    """The file of ``manyhands ban``, which users may edit."""
    state_dir = _file("bans.json", data)
    try:
        assert all(entry.is_banned for entry in Ledger(state_dir).members())
    finally:
        _cleared(state_dir)


def _members_file(data: bytes) -> None:
    """The file of the coordinator: who came by which invitation, and until when."""
    state_dir = _file("members.json", data)
    try:
        ledger = Ledger(state_dir)
        for entry in ledger.members():
            described(entry, NOW)
            ledger.used_by(entry.peer_id)
        ledger.to_save(NOW)()
        Ledger(state_dir)
    finally:
        _cleared(state_dir)


def _invitations_file(data: bytes) -> None:
    """The file of ``manyhands invite`` and ``run revoke-invitation``: each writes to it what the other one has."""
    state_dir = _file("invitations.json", data)
    try:
        ledger = Ledger(state_dir)
        ledger.note_issued(INVITATION.invitation, NOW)
        ledger.revoke(INVITATION.invitation.id.hex(), NOW)
        assert INVITATION.invitation.id.hex() in Ledger(state_dir).invitations.revoked
    finally:
        _cleared(state_dir)


def _charter_file(data: bytes) -> None:
    state_dir = _file("charter", data)
    try:
        SignedCharter.load(state_dir / "coordinator" / "charter")
    finally:
        _cleared(state_dir)


def _charter_text() -> bytes:
    state_dir = _file("other", b"")
    try:
        CHARTER.save(state_dir / "charter")
        return (state_dir / "charter").read_bytes()
    finally:
        _cleared(state_dir)


def _decoder(name: str, *seeds: msgspec.Struct) -> Target:
    kind = type(seeds[0])
    encoded = [msgspec.msgpack.encode(seed) for seed in seeds]
    return Target(
        name=name, seeds=encoded, run=lambda data: decoded(data, kind), errors=(ProtocolViolation,), weight=0.2
    )


_SIGNED_ERRORS = (ProtocolViolation, BadSignature)
_RECORD = CharterRecord(CHARTER.signed.encoded(), [str(ADDRESS)], [PEER.peer_id], 1.7e9)
_MEMBERS = msgspec.json.encode(
    Accounts(
        {INVITATION.invitation.id.hex(): Uses(1.7e9, [PEER.peer_id], 5)}, {PEER.peer_id: HeldLease("trainer", 1.7e9)}
    )
)
_INVITATIONS = msgspec.json.encode(Invitations({"0" * 24: 1.7e9}, {"1" * 24: 1.7e9}))
_SIGNED = [CHARTER.signed, LEASE.signed, INVITATION.signed]

TARGETS = [
    Target(name="access.charter", seeds=[CHARTER.signed.body], run=_charter, errors=_SIGNED_ERRORS),
    Target(name="access.lease", seeds=[LEASE.signed.body], run=_lease, errors=_SIGNED_ERRORS),
    Target(name="access.invitation", seeds=[INVITATION.signed.body], run=_invitation, errors=_SIGNED_ERRORS),
    Target(name="access.signed", seeds=[s.encoded() for s in _SIGNED], run=_signed, errors=_SIGNED_ERRORS),
    Target(
        name="access.charter-record",
        seeds=[encode_value(msgspec.to_builtins(_RECORD, builtin_types=(bytes,)))],
        run=_charter_record,
        errors=(ValueError, *_SIGNED_ERRORS),
    ),
    Target(
        name="access.bans-file", seeds=[b'{"banned_at": {"12D3KooW": 1.5}}'], run=_bans, errors=(ConfigError,),
        kind="bytes", weight=0.3,
    ),
    Target(
        name="access.members-file", seeds=[_MEMBERS], run=_members_file, errors=(ConfigError,), kind="bytes",
        weight=0.3,
    ),
    Target(
        name="access.invitations-file", seeds=[_INVITATIONS], run=_invitations_file, errors=(ConfigError,),
        kind="bytes", weight=0.3,
    ),
    Target(
        name="access.charter-file", seeds=[_charter_text()], run=_charter_file, errors=(ConfigError,), kind="bytes",
        weight=0.3,
    ),
    Target(
        name="ticket", seeds=[str(ticket).encode() for ticket in TICKETS], run=_ticket,
        errors=(ConfigError, *_SIGNED_ERRORS), kind="text", tokens=["mh1", "mh2", "1", "l", "0", " ", "\n", "\udcff"],
    ),
    Target(
        name="ticket.content",
        seeds=[base58.b58decode_check(str(ticket).removeprefix(PREFIX)) for ticket in TICKETS],
        run=_ticket_content,
        errors=(ConfigError, *_SIGNED_ERRORS),
    ),
    _decoder("access.show", Shown(CHARTER.digest, LEASE.signed.encoded())),
    _decoder("access.lease.request", LeaseRequest(CHARTER.digest, 1.7e9, INVITATION.signed.encoded())),
    _decoder("access.lease.response", LeaseResponse(LEASE.signed.encoded())),
    _decoder("access.manage.request", ManageRequest(CHARTER.digest, [PEER.peer_id])),
    _decoder("access.manage.response", ManageResponse([MemberEntry(PEER.peer_id, "trainer", 1.7e9, is_banned=True)])),
]  # fmt: skip
