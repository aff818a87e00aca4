"""An invitation: a signed token, inside a ticket, that one or more peers can exchange for a lease. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import msgspec

from manyhands.access.charter import SignedCharter
from manyhands.access.lease import Digest, Role
from manyhands.access.signed import Signed, decoded, signed_by
from manyhands.base.errors import BadSignature, ProtocolViolation
from manyhands.base.identity import Identity
from manyhands.base.structs import make_ready
from manyhands.rpc.frames import readable

DOMAIN = "run-invitation"
MAX_USES = 100_000
ID_BYTES = 12


class Invitation(msgspec.Struct, frozen=True, array_like=True):
    """Permission to get a lease, issued by a coordinator or the owner.

    Attributes:
        charter: digest of the charter of the run.
        id: identifies it in the accounts of the coordinator.
        uses: number of peers that get a lease for it; a peer that comes again is not counted again.
        expires_at: seconds since 1970.
        coordinator: the peer that redeems it, so that its uses are counted in one place.
        role: the role of the leases.
        peer_id: the only peer that may use it; empty for any.
    """

    charter: Digest
    id: Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
    uses: Annotated[int, msgspec.Meta(ge=1, le=MAX_USES)]
    expires_at: float
    coordinator: Annotated[str, msgspec.Meta(max_length=64)]
    role: Role = "trainer"
    peer_id: Annotated[str, msgspec.Meta(max_length=64)] = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.expires_at):
            raise ValueError(f"expires_at is {self.expires_at}; it must be finite")


make_ready(Invitation)


@dataclass(frozen=True)
class SignedInvitation:
    """An invitation to this run with a verified signature."""

    invitation: Invitation
    signed: Signed

    @classmethod
    def sign(cls, identity: Identity, invitation: Invitation) -> SignedInvitation:
        """Sign an invitation."""
        return cls(invitation, signed_by(identity, DOMAIN, invitation))

    @classmethod
    def from_bytes(cls, raw: bytes, charter: SignedCharter, source: str) -> SignedInvitation:
        """Read and verify a token.

        Raises:
            ProtocolViolation, BadSignature: it is not an invitation to this run, or its signer is not a coordinator.
        """
        signed = decoded(raw, source)
        if signed.signer not in charter.coordinators:
            raise BadSignature(source, f"its signer {readable(signed.signer)} is not a coordinator of the run")
        invitation = signed.verified(DOMAIN, Invitation, source)
        if invitation.charter != charter.digest:
            raise ProtocolViolation(source, "the invitation is for another run")
        return cls(invitation, signed)
