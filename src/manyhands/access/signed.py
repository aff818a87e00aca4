"""Signed messages: the body as bytes, the signer's id, and the signature. Pure.

The signed bytes are kept as received and never encoded again, so a later version can add fields that this one ignores.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, TypeVar

import msgspec

from manyhands.base.errors import BadSignature, ProtocolViolation
from manyhands.base.identity import Identity, PeerId, verify
from manyhands.base.structs import make_ready
from manyhands.rpc.frames import readable

MAX_BODY_BYTES = 1 << 14
MAX_BYTES = MAX_BODY_BYTES + 256
"""Most bytes of an encoded body with its signature."""

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
Body = TypeVar("Body", bound=msgspec.Struct)


class Signed(msgspec.Struct, frozen=True, array_like=True):
    """A body and the signature of ``signer`` over it."""

    signer: Annotated[str, msgspec.Meta(max_length=64)]
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_BODY_BYTES)]
    signature: Annotated[bytes, msgspec.Meta(max_length=64)]

    @property
    def digest(self) -> bytes:
        """SHA-256 of the signed bytes."""
        return hashlib.sha256(self.body).digest()

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def verified(self, domain: str, body_type: type[Body], source: str) -> Body:
        """Verify the signature and return the body.

        Args:
            source: the peer that it came from, for the errors.
        Raises:
            BadSignature: the signer has not signed it for this purpose.
            ProtocolViolation: the signed content is something else.
        """
        try:
            verify(PeerId(self.signer), domain, self.body, self.signature)
        except BadSignature as error:
            raise BadSignature(source, f"the signature does not match ({domain})") from error
        try:
            return msgspec.msgpack.decode(self.body, type=body_type)
        except UNREADABLE as error:
            raise ProtocolViolation(source, f"the {domain} cannot be read: {readable(str(error))}") from error


make_ready(Signed)


def signed_by(identity: Identity, domain: str, body: msgspec.Struct) -> Signed:
    """Sign a body for one purpose."""
    raw = msgspec.msgpack.encode(body)
    return Signed(identity.peer_id, raw, identity.sign(domain, raw))


def decoded(raw: bytes, source: str) -> Signed:
    """Decode the bytes of :meth:`Signed.encoded`, without verifying them.

    Args:
        source: the peer that it came from, for the error.
    Raises:
        ProtocolViolation: it is something else.
    """
    try:
        if len(raw) > MAX_BYTES:
            raise ValueError(f"it has {len(raw)} bytes; at most {MAX_BYTES} are allowed")
        return msgspec.msgpack.decode(raw, type=Signed)
    except UNREADABLE as error:
        text = f"sent something signed that cannot be read: {readable(str(error))}"
        raise ProtocolViolation(source, text) from error
