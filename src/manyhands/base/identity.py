"""The identity of a peer: an Ed25519 key, and the peer id derived from it.

The peer id is the libp2p form of the public key (``12D3KooW…``), so that ordinary multiaddrs name our peers.
Source: libp2p specs, "Peer Ids and Keys"; RFC 8032 (Ed25519).
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from pathlib import Path
from typing import NewType

import base58
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from manyhands.base.errors import BadSignature, ConfigError

logger = logging.getLogger(__name__)

PeerId = NewType("PeerId", str)
"""A peer's id: 52 characters of base58 that begin with ``12D3KooW``."""

# multihash "identity", 36 bytes; then the libp2p protobuf: key type Ed25519 (field 1 = 1), 32 bytes of key (field 2)
_PREFIX = bytes.fromhex("002408011220")
_SIGNATURE_PREFIX = b"manyhands/1 "


def peer_id_from_public_key(public_key: bytes) -> PeerId:
    """Return the peer id of a raw 32-byte Ed25519 public key."""
    return PeerId(base58.b58encode(_PREFIX + public_key).decode())


@functools.lru_cache(maxsize=4096)
def public_key_of(peer_id: PeerId) -> Ed25519PublicKey:
    """Return the public key in a peer id.

    Raises:
        ConfigError: not an Ed25519 peer id.
    """
    try:
        raw = base58.b58decode(peer_id) if len(peer_id) <= 64 else b""
    except ValueError:
        raw = b""
    # one spelling per peer: base58 ignores white space at the end
    if len(raw) != len(_PREFIX) + 32 or peer_id_from_public_key(raw[len(_PREFIX) :]) != peer_id:
        raise ConfigError(
            f"{peer_id[:80]!r} is not a peer id; a peer id has 52 characters and begins with 12D3KooW, "
            "as printed by the peer when it starts"
        )
    return Ed25519PublicKey.from_public_bytes(raw[len(_PREFIX) :])


class Identity:
    """The private key of one peer. Keep it secret: anyone who has it can act as this peer."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self.private_key = private_key
        self.peer_id = peer_id_from_public_key(private_key.public_key().public_bytes_raw())

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    @classmethod
    def generate(cls) -> Identity:
        """Create an identity from the system's randomness."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """Create the identity of a 32-byte seed; the same seed gives the same peer id."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load_or_create(cls, path: str | Path) -> Identity:
        """Read the identity in ``path`` (PEM, PKCS #8), or create one there, readable by its owner only.

        Raises:
            ConfigError: the file has other contents, or cannot be read or written.
        """
        path = Path(path)
        try:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                identity = cls.generate()
                identity.save(path)
                return identity
            pem = path.read_bytes()
            if not pem:
                raise ConfigError(
                    f"identity file {path} is empty: the disk was full, or the machine went down, when it was written; "
                    "restore it from a copy, or delete it: a new identity is then made"
                )
            key = serialization.load_pem_private_key(pem, password=None)
            if isinstance(key, Ed25519PrivateKey):
                _keep_to_owner(path)
        except OSError as error:
            raise ConfigError(
                f"identity file {path}: {error.strerror}; name a file that can be read, or one in a folder that can be "
                "written"
            ) from error
        except ConfigError:
            raise
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(
                f"identity file {path} is not an unencrypted PEM private key; name a file that does not exist: a new "
                "key is then made there"
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(
                f"identity file {path} holds {type(key).__name__}; an Ed25519 key is needed. Name a file that does not "
                "exist: a new key is then made there"
            )
        return cls(key)

    def save(self, path: Path) -> None:
        """Write the key to ``path`` atomically, even if the disk is full or the machine goes down."""
        pem = self.private_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        descriptor, draft = tempfile.mkstemp(prefix=path.name, suffix=".new", dir=path.parent)  # readable by owner only
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(pem)
                file.flush()
                os.fsync(file.fileno())
            Path(draft).replace(path)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise

    def sign(self, domain: str, message: bytes) -> bytes:
        """Sign ``message`` for one domain; the signature, 64 bytes, is invalid in any other domain."""
        return self.private_key.sign(signed_bytes(domain, message))


def verify(peer_id: PeerId, domain: str, message: bytes, signature: bytes) -> None:
    """Check that ``peer_id`` signed ``message`` for ``domain``.

    Raises:
        BadSignature: it did not, or the peer id is malformed.
    """
    try:
        public_key_of(peer_id).verify(signature, signed_bytes(domain, message))
    except (InvalidSignature, ConfigError) as error:
        raise BadSignature(peer_id, f"the signature does not match ({domain})") from error


def _keep_to_owner(path: Path) -> None:
    """Remove the access of other users to a private key.

    Raises:
        ConfigError: other users can write it, and that cannot be changed.
    """
    mode = path.stat().st_mode & 0o777
    if os.name != "posix" or not mode & 0o077:
        return
    try:
        path.chmod(0o600)
    except OSError as error:
        if mode & 0o022:
            raise ConfigError(
                f"identity file {path} can be written by other users of this machine (mode {mode:o}), and that cannot "
                f"be changed ({error.strerror}); its owner must run: chmod 600 {path}"
            ) from error
        logger.warning(
            "Identity file %s can be read by other users of this machine (mode %o), who can act as this peer; its "
            "owner should run: chmod 600 %s",
            path,
            mode,
            path,
        )
        return
    logger.warning(
        "Identity file %s was open to other users of this machine (mode %o) and is now readable by its owner only; if "
        "somebody may have copied it, make a new key (a peer: delete the file; a run's owner: move the key and the "
        "charter away, and make new ones with manyhands run create)",
        path,
        mode,
    )


def signed_bytes(domain: str, message: bytes) -> bytes:
    """Return what is signed of a message of one domain."""
    name = domain.encode()
    return _SIGNATURE_PREFIX + len(name).to_bytes(2, "big") + name + message
