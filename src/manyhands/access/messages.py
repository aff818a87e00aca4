"""Calls and records between the peers of a run with a charter."""

from __future__ import annotations

from typing import Annotated

import msgspec

from manyhands.access.signed import MAX_BYTES
from manyhands.base.address import AddressTexts
from manyhands.dht import Schema
from manyhands.rpc import Method

MAX_CREDENTIAL_BYTES = 4096
MAX_BANS = 1000
RECORD_TTL_S = 86400.0
"""Lifetime of a coordinator's record, in seconds: as long as the grace time of leases."""

LEASE_RECORD_TTL_S = 3600.0
"""Lifetime of a lease's record, in seconds; a member publishes it again after a third of this time."""

BANNED = "banned"
"""Code of a refusal: the peer is banned from the run."""

NO_LEASE = "no_lease"
"""Code of a refusal: the refusing peer has no valid lease of the caller."""

SignedBytes = Annotated[bytes, msgspec.Meta(max_length=MAX_BYTES)]
CharterDigest = Annotated[bytes, msgspec.Meta(max_length=32)]
PeerIdText = Annotated[str, msgspec.Meta(max_length=64)]


class Shown(msgspec.Struct, frozen=True):
    """The leases that two peers show each other before any other call of the run; request and response.

    Attributes:
        charter: digest of the charter that this peer trusts.
        lease: the lease of this peer; empty if it has none.
    """

    charter: CharterDigest
    lease: SignedBytes = b""


class LeaseRequest(msgspec.Struct, frozen=True):
    """Asks a coordinator for a lease.

    Attributes:
        charter: digest of the charter that this peer trusts.
        wall_time: by its own clock, in seconds since 1970.
        credential: for the authorizer of the coordinator, such as the token of an invitation.
        lease: an existing one to renew; empty for none.
    """

    charter: CharterDigest
    wall_time: float
    credential: Annotated[bytes, msgspec.Meta(max_length=MAX_CREDENTIAL_BYTES)] = b""
    lease: SignedBytes = b""


class LeaseResponse(msgspec.Struct, frozen=True):
    """A new lease."""

    lease: SignedBytes


class ManageRequest(msgspec.Struct, frozen=True):
    """Asks a coordinator to ban peers and to list the members; only for the owner and the coordinators.

    Attributes:
        ban: ids of peers to ban; may be empty.
    """

    charter: CharterDigest
    ban: Annotated[list[PeerIdText], msgspec.Meta(max_length=MAX_BANS)] = []


class MemberEntry(msgspec.Struct, frozen=True):
    """A peer in the list of a coordinator.

    Attributes:
        expires_at: when its last lease ends, in seconds since 1970; 0 if this coordinator gave it none.
        invitation: id of the invitation that it used here, in hexadecimal; empty if there is none.
    """

    peer_id: PeerIdText
    role: str = ""
    expires_at: float = 0.0
    is_banned: bool = False
    invitation: Annotated[str, msgspec.Meta(max_length=64)] = ""


class ManageResponse(msgspec.Struct, frozen=True):
    """All members that the coordinator knows."""

    members: list[MemberEntry]


class CharterRecord(msgspec.Struct, frozen=True):
    """The record of a coordinator under ``RUN.charter``, signed by the coordinator.

    Attributes:
        charter: signed by the owner.
        addresses: where this peer can be dialled for a lease.
        bans: banned peer ids; valid if this peer is the owner or a coordinator.
        began_at: when the process of this peer began, by its own wall clock.
    """

    charter: SignedBytes
    addresses: AddressTexts = []
    bans: Annotated[list[PeerIdText], msgspec.Meta(max_length=MAX_BANS)] = []
    began_at: float = 0.0


CHARTER_KIND = "charter"
LEASES_KIND = "leases"
CHARTER_RECORDS = Schema(CharterRecord, is_owned=True, max_ttl_s=RECORD_TTL_S)
LEASE_RECORDS = Schema(SignedBytes, is_owned=True, max_ttl_s=LEASE_RECORD_TTL_S)


def charter_key(run_id: str) -> str:
    """Return the DHT key of the records of a run's coordinators."""
    return f"{run_id}.{CHARTER_KIND}"


def leases_key(run_id: str) -> str:
    """Return the DHT key of the leases of a run's members."""
    return f"{run_id}.{LEASES_KIND}"


class RunMethods:
    """The RPC methods of one run; on the wire their names begin with the run id."""

    def __init__(self, run_id: str) -> None:
        self.show: Method[Shown, Shown] = Method(f"{run_id}.access.show", Shown, Shown)
        self.lease: Method[LeaseRequest, LeaseResponse] = Method(f"{run_id}.access.lease", LeaseRequest, LeaseResponse)
        self.manage: Method[ManageRequest, ManageResponse] = Method(
            f"{run_id}.access.manage", ManageRequest, ManageResponse
        )
