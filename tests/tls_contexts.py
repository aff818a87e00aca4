"""TLS by Python's own ssl module, for other ends that behave as a test wants."""

from __future__ import annotations

import os
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from manyhands.base.identity import Identity
from manyhands.transport.certificate import ALPN, issuer_certificate, leaf_certificate


def server_context(identity: Identity) -> ssl.SSLContext:
    """As a peer accepts."""
    context = plain_context(ssl.PROTOCOL_TLS_SERVER)
    load_leaf(context, identity)
    context.num_tickets = 0
    return context


def client_context(identity: Identity) -> ssl.SSLContext:
    """As a peer dials."""
    context = plain_context(ssl.PROTOCOL_TLS_CLIENT)
    load_leaf(context, identity)
    return context


def plain_context(protocol: int) -> ssl.SSLContext:
    """As a peer's, without a certificate of its own."""
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    context.load_verify_locations(cadata=_pem(issuer_certificate()).decode())
    return context


def load_leaf(context: ssl.SSLContext, identity: Identity) -> None:
    key = identity.private_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:  # ssl reads keys from files only
        path = Path(folder) / "leaf.pem"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(key + _pem(leaf_certificate(identity)))
        context.load_cert_chain(path)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
