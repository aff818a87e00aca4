"""Caches the checks of signatures: all hosts of a simulation are one process, which verifies each signature once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from manyhands.base import identity

MAX_REMEMBERED = 20_000

SignatureArguments = tuple[str, bytes, bytes]


class _RememberingKey:
    """A public key that remembers the signatures it has verified; a bad signature is checked each time."""

    def __init__(self, peer_id: str, key: Ed25519PublicKey, good: dict[SignatureArguments, None]) -> None:
        self._peer_id = peer_id
        self.key = key
        self._good = good

    def verify(self, signature: bytes, message: bytes) -> None:
        signed = (self._peer_id, bytes(signature), bytes(message))
        if signed not in self._good:
            self.key.verify(signature, message)
            _remember(self._good, signed)


@contextmanager
def each_signature_once() -> Iterator[None]:
    """Within the block, a signature that was made or verified in this process is not verified again.

    All results are the same as without it; it saves about 0.15 ms for each check.
    """
    good: dict[SignatureArguments, None] = {}
    real: Callable[[identity.PeerId], Ed25519PublicKey] = identity.public_key_of
    real_sign = identity.Identity.sign

    def remembering(peer_id: identity.PeerId) -> _RememberingKey:
        return _RememberingKey(peer_id, real(peer_id), good)

    def sign(self: identity.Identity, domain: str, message: bytes) -> bytes:
        signature = real_sign(self, domain, message)
        _remember(good, (self.peer_id, signature, identity.signed_bytes(domain, message)))
        return signature

    identity.public_key_of = remembering  # type: ignore[assignment]
    identity.Identity.sign = sign  # type: ignore[method-assign]
    try:
        yield
    finally:
        identity.public_key_of = real  # type: ignore[assignment]
        identity.Identity.sign = real_sign  # type: ignore[method-assign]


def _remember(good: dict[SignatureArguments, None], signed: SignatureArguments) -> None:
    good[signed] = None
    if len(good) > MAX_REMEMBERED:
        del good[next(iter(good))]
