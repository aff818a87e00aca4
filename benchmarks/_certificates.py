"""Certificates for mutual TLS, for systems without their own."""

from __future__ import annotations

import datetime
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

NAME = "benchmark"

_Key = Ed25519PrivateKey | ec.EllipticCurvePrivateKey


@dataclass(frozen=True)
class Credentials:
    """An issuer certificate, and a leaf certificate with its key, in PEM."""

    issuer: bytes
    leaf: bytes
    key: bytes

    def context(self, protocol: int) -> ssl.SSLContext:
        """TLS 1.3 that requires a certificate of the same issuer from the other side."""
        context = ssl.SSLContext(protocol)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.issuer.decode())
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
        with tempfile.TemporaryDirectory() as folder:  # ssl reads keys only from files
            path = Path(folder) / "leaf.pem"
            path.write_bytes(self.key + self.leaf)
            context.load_cert_chain(path)
        return context


def make_credentials(key_type: str) -> list[Credentials]:
    """Two leaf certificates of one issuer, for a server and a client.

    Args:
        key_type: ``ed25519`` as in manyhands, or ``p256`` for software without Ed25519.
    """
    issuer_key = _new_key(key_type)
    issuer = _sign(NAME + " issuer", issuer_key, issuer_key, is_issuer=True)
    leaves = []
    for _ in range(2):
        key = _new_key(key_type)
        leaf = _sign(NAME, key, issuer_key, is_issuer=False)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        leaves.append(Credentials(_pem(issuer), _pem(leaf), pem))
    return leaves


def _new_key(key_type: str) -> _Key:
    return Ed25519PrivateKey.generate() if key_type == "ed25519" else ec.generate_private_key(ec.SECP256R1())


def _sign(name: str, key: _Key, issuer_key: _Key, is_issuer: bool) -> x509.Certificate:
    now = datetime.datetime.now(datetime.timezone.utc)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME + " issuer")])
    day = datetime.timedelta(days=1)
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), 1 if is_issuer else 2, now - day, now + day)
    builder = builder.add_extension(x509.BasicConstraints(ca=is_issuer, path_length=None), True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
    builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), False)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), False)
    return builder.sign(issuer_key, None if isinstance(issuer_key, Ed25519PrivateKey) else hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
