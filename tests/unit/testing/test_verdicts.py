"""Signatures that are verified once."""

from __future__ import annotations

import pytest

from manyhands.base import identity
from manyhands.base.errors import BadSignature
from manyhands.base.identity import verify
from manyhands.testing.verdicts import each_signature_once
from tests.network import identity_of

real_sign = identity.Identity.sign


def test_remembered_verdicts_accept_good_signatures_and_reject_bad_ones() -> None:
    ours, theirs = identity_of(1), identity_of(2)
    signature = ours.sign("test", b"message")
    real = identity.public_key_of
    with each_signature_once():
        for _ in range(3):
            verify(ours.peer_id, "test", b"message", signature)
            for peer_id, domain, message, claimed in (
                (theirs.peer_id, "test", b"message", signature),
                (ours.peer_id, "tests", b"message", signature),
                (ours.peer_id, "test", b"massage", signature),
                (ours.peer_id, "test", b"message", signature[:-1] + b"\0"),
                (identity.PeerId("nobody"), "test", b"message", signature),
            ):
                with pytest.raises(BadSignature):
                    verify(peer_id, domain, message, claimed)
    assert identity.public_key_of is real


def test_a_signature_made_in_this_process_is_verified_without_cryptography(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = identity_of(1), identity_of(2)
    with each_signature_once():
        signature = ours.sign("test", b"message")
        with pytest.raises(BadSignature):
            verify(theirs.peer_id, "test", b"message", signature)
        key = identity.public_key_of(ours.peer_id)
        monkeypatch.setattr(key, "key", None)
        key.verify(signature, identity.signed_bytes("test", b"message"))
    assert identity.Identity.sign is real_sign


def test_the_second_time_costs_no_cryptography(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = identity_of(1)
    signature = ours.sign("test", b"message")
    with each_signature_once():
        verify(ours.peer_id, "test", b"message", signature)
        key = identity.public_key_of(ours.peer_id)
        monkeypatch.setattr(key, "key", None)
        key.verify(signature, identity.signed_bytes("test", b"message"))
