"""What the members of a round tell each other."""

from __future__ import annotations

import hashlib

import msgspec

from manyhands.base.identity import PeerId
from manyhands.rpc import Method


class Position(msgspec.Struct, frozen=True):
    """Where a peer stands in the run: peers average together only at the same position.

    Attributes:
        step: global step, the number of optimizer steps made so far.
        lineage: digest of all committed rounds that led here, so that a split is seen at the next meeting.
    """

    step: int
    lineage: bytes


class Member(msgspec.Struct, frozen=True):
    """One member of a formed group; ``weight`` is the number of samples behind its vector."""

    peer_id: PeerId
    addresses: list[str]
    is_client: bool
    weight: float


class Group(msgspec.Struct, frozen=True):
    """A formed group; a member's rank is its index in ``members``."""

    group_id: bytes
    leader: PeerId
    position: Position
    members: list[Member]

    def rank_of(self, peer_id: PeerId) -> int | None:
        """The rank of a peer, or None when it is not a member."""
        return next((rank for rank, member in enumerate(self.members) if member.peer_id == peer_id), None)


class RoundManifest(msgspec.Struct, frozen=True):
    """What a group committed: whose vectors, by which weights, with which result.

    Attributes:
        members, weights: by rank; a weight of 0 means that the member contributed nothing.
        digest: SHA-256 of the averaged vector as every member holds it.
    """

    group_id: bytes
    position: Position
    members: list[PeerId]
    weights: list[float]
    digest: bytes

    def fingerprint(self) -> bytes:
        """SHA-256 of the whole manifest."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()


class JoinRequest(msgspec.Struct):
    """Asks the supposed leader for a place in its group; answered when the group closes."""

    run_id: str
    run_fingerprint: bytes
    position: Position
    member: Member


class JoinResponse(msgspec.Struct):
    """The formed group, or the leader that the asked peer itself follows."""

    group: Group | None = None
    leader: PeerId = PeerId("")
    leader_addresses: list[str] = []


class InviteRequest(msgspec.Struct):
    """Tells an expected peer that a round has begun at its position."""

    run_id: str
    position: Position


class InviteResponse(msgspec.Struct):
    """The invitation was heard."""


class Vote(msgspec.Struct):
    """A member's report to its leader: the digest of the vector it holds, or empty and why it holds none."""

    group_id: bytes
    digest: bytes
    reason: str = ""


class VerdictQuery(msgspec.Struct):
    """Asks a member whether it knows how a round ended."""

    group_id: bytes


class Verdict(msgspec.Struct):
    """How a round ended; ``manifest`` is there when it committed. ``is_known`` is False while in doubt."""

    is_known: bool
    manifest: RoundManifest | None = None
    reason: str = ""
    blamed: list[PeerId] = []


class StreamHeader(msgspec.Struct):
    """Opens a bulk stream between two members."""

    group_id: bytes


JOIN = Method("averaging.join", JoinRequest, JoinResponse)
INVITE = Method("averaging.invite", InviteRequest, InviteResponse)
VOTE = Method("averaging.vote", Vote, Verdict)
ASK_VERDICT = Method("averaging.ask_verdict", VerdictQuery, Verdict)
STREAM_KIND = "averaging"
