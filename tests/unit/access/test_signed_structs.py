"""Charter, lease and invitation: what counts, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from manyhands.access import Charter, Limits, SignedCharter
from manyhands.access.charter import DOMAIN as CHARTER_DOMAIN
from manyhands.access.invitation import SignedInvitation
from manyhands.access.lease import MAX_LEASE_S, Lease, SignedLease
from manyhands.access.signed import signed_by
from manyhands.base.errors import BadSignature, ConfigError, PeerError, ProtocolViolation
from tests.unit.access.world import CHARTER, COORDINATOR, OWNER, PEER, START_S, STRANGER, charter_of, lease_of, token_of


def test_a_charter_comes_back_from_its_file_and_from_the_wire(tmp_path: Path) -> None:
    path = tmp_path / "ours.charter"
    CHARTER.save(path)
    assert SignedCharter.load(path) == CHARTER
    assert SignedCharter.from_bytes(CHARTER.signed.encoded(), "peer") == CHARTER
    assert CHARTER.charter.limits == Limits(max_weight_ratio=3.0, max_weight_share=0.25)
    shown = path.read_text()
    assert f'"digest": "{CHARTER.digest.hex()}"' in shown, "people can read what they sign"
    with pytest.raises(ConfigError, match="exists, and is not overwritten"):
        charter_of("open").save(path)
    assert SignedCharter.load(path) == CHARTER


@pytest.mark.parametrize("content", [b"", b"hello", b"\xff\xfe", b"manyhands-charter-1 111", b"manyhands-charter-1 \n"])
def test_a_file_that_is_no_charter_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ours.charter"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a charter, or was changed"):
        SignedCharter.load(path)
    with pytest.raises(ConfigError, match="No such file"):
        SignedCharter.load(tmp_path / "other")


def test_a_charter_that_the_owner_has_not_signed_is_refused() -> None:
    forged = signed_by(STRANGER, CHARTER_DOMAIN, CHARTER.charter)
    with pytest.raises(BadSignature, match="is not signed by the owner"):
        SignedCharter.from_bytes(forged.encoded(), "peer")
    changed = msgspec.structs.replace(CHARTER.signed, body=CHARTER.signed.body.replace(b"invite", b"opened"))
    with pytest.raises(BadSignature):
        SignedCharter.from_bytes(changed.encoded(), "peer")
    with pytest.raises(BadSignature):  # a signature for one purpose is worth nothing for another
        SignedCharter.from_bytes(signed_by(OWNER, "run-lease", CHARTER.charter).encoded(), "peer")


@pytest.mark.parametrize(
    "fields",
    [
        {"run_id": "a.b"},
        {"owner": "nobody"},
        {"access": "closed"},
        {"coordinators": ["nobody"]},
        {"coordinators": [OWNER.peer_id] * 17},
        {"manifest": b"short"},
        {"limits": {"max_weight_ratio": float("nan")}},
        {"limits": {"max_weight_share": 0.0}},
        {"created_at": float("inf")},
    ],
)
def test_a_charter_with_invalid_fields_is_refused(fields: dict[str, Any]) -> None:
    said = msgspec.to_builtins(CHARTER.charter, builtin_types=(bytes,)) | fields
    body = msgspec.msgpack.encode(said)
    signed = msgspec.structs.replace(CHARTER.signed, body=body, signature=OWNER.sign(CHARTER_DOMAIN, body))
    with pytest.raises(ProtocolViolation, match="cannot be read"):
        SignedCharter.from_bytes(signed.encoded(), "peer")


def test_a_charter_of_a_later_version_counts_with_its_own_digest() -> None:
    said = msgspec.to_builtins(CHARTER.charter, builtin_types=(bytes,)) | {"colour": "blue"}
    body = msgspec.msgpack.encode(said)
    signed = msgspec.structs.replace(CHARTER.signed, body=body, signature=OWNER.sign(CHARTER_DOMAIN, body))
    later = SignedCharter.from_bytes(signed.encoded(), "peer")
    assert later.charter == CHARTER.charter
    assert later.digest != CHARTER.digest


def test_the_owner_is_a_coordinator_too() -> None:
    assert CHARTER.coordinators[0] == COORDINATOR.peer_id
    assert CHARTER.coordinators[-1] == OWNER.peer_id
    assert SignedCharter.sign(OWNER, Charter("run", OWNER.peer_id)).coordinators == (OWNER.peer_id,)


@pytest.mark.parametrize("signer", [COORDINATOR, OWNER])
def test_a_lease_counts_for_its_peer(signer: Any) -> None:
    held = SignedLease.from_bytes(lease_of(signer=signer).signed.encoded(), CHARTER, PEER.peer_id)
    assert held.lease.role == "trainer"
    assert held.lease.takes_part


@pytest.mark.parametrize(
    ("lease", "message"),
    [
        (lease_of(signer=STRANGER), "is not a coordinator of the run"),
        (lease_of(signer=PEER), "is not a coordinator of the run"),
        (lease_of(charter=charter_of(run_id="other")), "its lease is of another run"),
        (lease_of(charter=charter_of(created_at=2.0)), "its lease is of another run"),
        (lease_of(STRANGER.peer_id), "its lease is that of peer"),
    ],
)
def test_a_lease_of_another_signer_run_or_peer_is_refused(lease: SignedLease, message: str) -> None:
    with pytest.raises(PeerError, match=message):
        SignedLease.from_bytes(lease.signed.encoded(), CHARTER, PEER.peer_id)


def test_no_lease_lasts_for_ever() -> None:
    for lasts_s in (MAX_LEASE_S + 1, 0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a lease lasts for"):
            Lease(CHARTER.digest, PEER.peer_id, "trainer", START_S, START_S + lasts_s)
    with pytest.raises(ValueError, match="a lease lasts for"):
        Lease(CHARTER.digest, PEER.peer_id, "trainer", float("-inf"), float("-inf"))


def test_a_lease_counts_within_its_time_the_skew_and_the_grace() -> None:
    held = lease_of(lasts_s=100.0)
    assert held.counts(START_S - 60, skew_s=60)
    assert not held.counts(START_S - 61, skew_s=60), "it is from the future"
    assert held.counts(START_S + 160, skew_s=60)
    assert not held.counts(START_S + 161, skew_s=60)
    assert held.counts(START_S + 1160, skew_s=60, grace_s=1000)
    assert not held.counts(START_S + 1161, skew_s=60, grace_s=1000)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "cannot be read"),
        (b"\xc1", "cannot be read"),
        (bytes(20_000), "it has 20000 bytes"),
        (token_of(signer=STRANGER), "is not a coordinator of the run"),
        (token_of(charter=charter_of(run_id="other")), "for another run"),
        (lease_of().signed.encoded(), "the signature does not match"),
        (token_of()[:-1] + b"x", "the signature does not match"),
    ],
)
def test_an_invalid_invitation_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(PeerError, match=message):
        SignedInvitation.from_bytes(raw, CHARTER, "peer")


def test_an_invitation_of_the_owner_counts() -> None:
    invitation = SignedInvitation.from_bytes(token_of(5, signer=OWNER), CHARTER, "peer").invitation
    assert (invitation.uses, invitation.coordinator) == (5, COORDINATOR.peer_id)
