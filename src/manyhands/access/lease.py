"""A lease: permission for one peer to take part in a run for some hours, signed by a coordinator. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from manyhands.access.charter import SignedCharter
from manyhands.access.signed import Signed, decoded, signed_by
from manyhands.base.errors import BadSignature, ProtocolViolation
from manyhands.base.identity import Identity, PeerId
from manyhands.base.structs import make_ready
from manyhands.rpc.frames import readable

DOMAIN = "run-lease"
MAX_LEASE_S = 7 * 86400.0
"""Longest lifetime of a lease that a coordinator can sign."""

Role = Literal["trainer", "auxiliary", "observer"]
"""A trainer and an auxiliary peer take part in rounds; an observer only downloads the state and measures."""

Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """Permission for one peer to take part in a run, until it expires.

    Attributes:
        charter: digest of the charter of the run.
        peer_id: the only peer that may use it.
        role: ``trainer``, ``auxiliary`` or ``observer``.
        issued_at, expires_at: seconds since 1970, by the clock of the coordinator.
    """

    charter: Digest
    peer_id: Annotated[str, msgspec.Meta(max_length=64)]
    role: Role
    issued_at: float
    expires_at: float

    def __post_init__(self) -> None:
        if not 0 < self.expires_at - self.issued_at <= MAX_LEASE_S or not math.isfinite(self.issued_at):
            raise ValueError(f"a lease lasts for more than 0 and at most {MAX_LEASE_S:g} s")

    @property
    def takes_part(self) -> bool:
        """Whether the role may take part in rounds."""
        return self.role != "observer"


make_ready(Lease)


@dataclass(frozen=True)
class SignedLease:
    """A lease of this run with a verified signature."""

    lease: Lease
    signed: Signed

    @classmethod
    def sign(cls, coordinator: Identity, lease: Lease) -> SignedLease:
        """Sign a lease."""
        return cls(lease, signed_by(coordinator, DOMAIN, lease))

    @classmethod
    def from_bytes(cls, raw: bytes, charter: SignedCharter, holder: PeerId) -> SignedLease:
        """Read and verify a lease that ``holder`` shows.

        Raises:
            ProtocolViolation, BadSignature: it is not a lease of this peer and run, or its signer is not a coordinator.
        """
        signed = decoded(raw, holder)
        if signed.signer not in charter.coordinators:
            signer = readable(signed.signer)
            raise BadSignature(holder, f"its lease is signed by {signer}, which is not a coordinator of the run")
        lease = signed.verified(DOMAIN, Lease, holder)
        if lease.charter != charter.digest:
            raise ProtocolViolation(holder, "its lease is of another run")
        if lease.peer_id != holder:
            raise ProtocolViolation(holder, f"its lease is that of peer {readable(lease.peer_id)}")
        return cls(lease, signed)

    def counts(self, wall_now: float, *, skew_s: float, grace_s: float = 0.0) -> bool:
        """Whether the lease is valid now.

        Args:
            skew_s: allowed difference between the clocks.
            grace_s: time for which it stays valid after it has expired.
        """
        return self.lease.issued_at - skew_s <= wall_now <= self.lease.expires_at + skew_s + grace_s
