"""Certificates: the peer id goes in and comes out, and nothing else that a certificate may hold does harm."""

from __future__ import annotations

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from manyhands.transport.certificate import issuer_certificate, leaf_certificate, peer_id_of_certificate
from tests.network import identity_of


def der_of(leaf: x509.Certificate) -> bytes:
    return leaf.public_bytes(serialization.Encoding.DER)


def test_a_certificate_gives_back_its_peer_id() -> None:
    assert peer_id_of_certificate(der_of(leaf_certificate(identity_of(1)))) == identity_of(1).peer_id


def test_a_certificate_with_another_kind_of_key_has_no_peer_id() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "somebody")])
    issuer = issuer_certificate()
    dates = issuer.not_valid_before_utc, issuer.not_valid_after_utc
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, *dates)
    assert peer_id_of_certificate(der_of(builder.sign(key, hashes.SHA256()))) is None


def test_a_certificate_of_an_unknown_version_has_no_peer_id() -> None:
    """OpenSSL may accept it: anybody can sign with the published issuer key, and sign anything."""
    der = bytearray(der_of(leaf_certificate(identity_of(1))))
    version = der.index(bytes.fromhex("a003020102"))
    der[version + 4] = 9
    assert peer_id_of_certificate(bytes(der)) is None


@given(place=st.integers(0, 200), value=st.integers(0, 255))
@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")
def test_reading_a_damaged_certificate_raises_nothing(place: int, value: int) -> None:
    der = bytearray(der_of(leaf_certificate(identity_of(1))))
    der[place] = value
    assert peer_id_of_certificate(bytes(der)) is None or isinstance(peer_id_of_certificate(bytes(der)), str)
