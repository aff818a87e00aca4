"""Identity files for fuzzing: of the right kind, and of others."""

from __future__ import annotations

import atexit
import base64
import tempfile
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, x25519
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

from manyhands.base.identity import Identity
from tests.network import identity_of


def _pem(key: PrivateKeyTypes, password: bytes | None = None, *, as_openssh: bool = False) -> bytes:
    layout = serialization.PrivateFormat.OpenSSH if as_openssh else serialization.PrivateFormat.PKCS8
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, layout, encryption)


_KEY = identity_of(1).private_key
IDENTITY_FILES = [
    _pem(_KEY),
    _pem(_KEY, b"secret"),
    _pem(_KEY, as_openssh=True),
    _pem(ec.derive_private_key(7, ec.SECP256R1())),
    _pem(x25519.X25519PrivateKey.from_private_bytes(b"x" * 32)),
    _pem(ed448.Ed448PrivateKey.from_private_bytes(b"x" * 57)),
]

_folder: list[tempfile.TemporaryDirectory[str]] = []


def _path() -> Path:
    if not _folder:
        _folder.append(tempfile.TemporaryDirectory(prefix="manyhands-fuzz-"))
        atexit.register(_folder[0].cleanup)
    return Path(_folder[0].name) / "identity.pem"


def load_identity(data: bytes) -> None:
    """Read the bytes as an identity file."""
    path = _path()
    path.write_bytes(data)
    identity = Identity.load_or_create(path)
    assert Identity.from_seed(identity.private_key.private_bytes_raw()).peer_id == identity.peer_id


def armoured(der: bytes) -> bytes:
    """Some bytes between the lines that begin and end a PEM private key."""
    return b"-----BEGIN PRIVATE KEY-----\n" + base64.encodebytes(der) + b"-----END PRIVATE KEY-----\n"
