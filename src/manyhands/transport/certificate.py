"""Certificates that carry the identity of a peer in TLS.

TLS libraries accept a client certificate only from a known issuer. So all peers use one *published* issuer key, which
proves nothing by itself: each peer signs its own leaf certificate with it, over its own Ed25519 key. The TLS 1.3
handshake then proves possession of both leaf keys (RFC 8446, section 4.4.3), and each side reads the other's peer id
from the leaf.
"""

from __future__ import annotations

import datetime
import functools
import hashlib

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID

from manyhands.base.identity import Identity, PeerId, peer_id_from_public_key

ALPN = "manyhands/1"
BULK_ALPN = "manyhands-bulk/1"
"""The protocol of bulk connections: records of :mod:`manyhands.transport.sealing` follow the handshake."""

_ISSUER_KEY = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"manyhands published issuer, no secret").digest())
_ISSUER_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "manyhands published issuer")])
# wide validity: the clocks of peers may be wrong, and the dates protect nothing here
_NOT_BEFORE = datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone.utc)
_NOT_AFTER = datetime.datetime(2999, 12, 31, tzinfo=datetime.timezone.utc)


def peer_id_of_certificate(der: bytes) -> PeerId | None:
    """Return the peer id in a leaf certificate that TLS has verified; None if it holds no Ed25519 key."""
    try:
        key = x509.load_der_x509_certificate(der).public_key()
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):  # OpenSSL is not as strict
        return None
    return peer_id_from_public_key(key.public_bytes_raw()) if isinstance(key, Ed25519PublicKey) else None


def leaf_certificate(identity: Identity) -> x509.Certificate:
    """Return the certificate of a peer, signed with the published issuer key."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.peer_id)])
    return _certificate(name, identity.private_key.public_key(), serial=2, is_issuer=False)


@functools.cache
def issuer_certificate() -> x509.Certificate:
    """Return the certificate of the published issuer, against which every leaf is verified."""
    return _certificate(_ISSUER_NAME, _ISSUER_KEY.public_key(), serial=1, is_issuer=True)


def _certificate(name: x509.Name, key: Ed25519PublicKey, serial: int, is_issuer: bool) -> x509.Certificate:
    builder = x509.CertificateBuilder(_ISSUER_NAME, name, key, serial, _NOT_BEFORE, _NOT_AFTER)
    builder = builder.add_extension(x509.BasicConstraints(ca=is_issuer, path_length=0 if is_issuer else None), True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(_ISSUER_KEY.public_key())
    return builder.add_extension(issuer_id, False).sign(_ISSUER_KEY, None)
