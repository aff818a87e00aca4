"""What the members of a round tell each other."""

from __future__ import annotations

import functools
import hashlib
import statistics
from collections.abc import Sequence
from typing import Annotated

import msgspec

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError
from manyhands.base.identity import PeerId
from manyhands.rpc import Method

MAX_WEIGHT = 2.0**32
"""Samples behind one vector: sums of many stay finite, and whole numbers stay exact."""
MAX_BANDWIDTH = 10**12
"""Bytes per second; far above any link."""
DEFAULT_CHUNK_NUMEL = 864 * 256  # whole rows of all codecs; small enough to send while others still come
MAX_ADDRESSES = 8
MAX_REASON_LENGTH = 500

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Weight = Annotated[float, msgspec.Meta(ge=0, le=MAX_WEIGHT)]
Bandwidth = Annotated[int, msgspec.Meta(ge=0, le=MAX_BANDWIDTH)]
AddressText = Annotated[str, msgspec.Meta(max_length=400)]  # a host name of 253 characters, a port and a peer id fit
PeerIdText = Annotated[PeerId, msgspec.Meta(max_length=64)]
Digest = Annotated[bytes, msgspec.Meta(max_length=64)]


class Position(msgspec.Struct, frozen=True):
    """Where a peer stands in the run: peers average together only at the same position.

    Attributes:
        step: global step, the number of optimizer steps made so far.
        lineage: digest of all committed rounds that led here, so that a split is seen at the next meeting.
    """

    step: Count
    lineage: Digest

    def after(self, manifest: RoundManifest) -> Position:
        """Where a committed round leads from here."""
        return Position(self.step + 1, hashlib.sha256(self.lineage + manifest.fingerprint()).digest())


class Member(msgspec.Struct, frozen=True):
    """One member of a formed group.

    Attributes:
        weight: the number of samples behind its vector.
        bandwidth: bytes per second, by its own word; it decides only who reduces how much. 0: it does not know yet, or
            is a client.
    """

    peer_id: PeerIdText
    addresses: Annotated[list[AddressText], msgspec.Meta(max_length=MAX_ADDRESSES)]
    is_client: bool
    weight: Weight
    bandwidth: Bandwidth = 0


class Group(msgspec.Struct, frozen=True):
    """A formed group; a member's rank is its index in ``members``.

    Attributes:
        min_span_numel: elements; of a vector with few of them not all members reduce a part.
        chunk_numel: elements that are encoded and reduced in one go.
        codec: the code of how values are encoded; see docs/wire.md.
    """

    group_id: Digest
    leader: PeerIdText
    position: Position
    members: list[Member]
    min_span_numel: Annotated[int, msgspec.Meta(ge=1, le=2**53)] = 1
    chunk_numel: Annotated[int, msgspec.Meta(ge=1, le=2**28)] = DEFAULT_CHUNK_NUMEL
    codec: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0

    def rank_of(self, peer_id: PeerId) -> int | None:
        """The rank of a peer, or None when it is not a member."""
        return next((rank for rank, member in enumerate(self.members) if member.peer_id == peer_id), None)

    def bandwidths(self) -> list[int]:
        """Bytes per second, by rank: 0 for clients, which never reduce; the median for who does not know its own."""
        known = [member.bandwidth for member in self.members if member.bandwidth > 0 and not member.is_client]
        usual = statistics.median_low(known) if known else 1
        return [0 if member.is_client else member.bandwidth or usual for member in self.members]

    def manifest(self, digest: bytes) -> RoundManifest:
        """What this group commits, if it commits the vector with this digest."""
        return RoundManifest(
            self.group_id,
            self.position,
            [member.peer_id for member in self.members],
            [member.weight for member in self.members],
            digest,
        )


class RoundManifest(msgspec.Struct, frozen=True):
    """What a group committed: whose vectors, by which weights, with which result.

    Attributes:
        members, weights: by rank; a weight of 0 means that the member contributed nothing.
        digest: BLAKE3 of the averaged vector as every member holds it.
    """

    group_id: Digest
    position: Position
    members: list[PeerIdText]
    weights: list[float]
    digest: Digest

    def fingerprint(self) -> bytes:
        """SHA-256 of the whole manifest."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()


class JoinRequest(msgspec.Struct):
    """Asks the supposed leader for a place in its group; answered when the group closes."""

    run_id: str
    run_fingerprint: Digest
    position: Position
    member: Member


class JoinResponse(msgspec.Struct):
    """The formed group, or the leader that the asked peer itself follows."""

    group: Group | None = None
    leader: PeerIdText = PeerId("")
    leader_addresses: list[AddressText] = []


class InviteRequest(msgspec.Struct):
    """Tells an expected peer that a round has begun at its position."""

    run_id: str
    position: Position


class InviteResponse(msgspec.Struct):
    """The invitation was heard."""


class Vote(msgspec.Struct):
    """A member's report to its leader: the digest of the vector it holds, or empty and why it holds none."""

    group_id: Digest
    digest: Digest
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_LENGTH)] = ""


class VerdictQuery(msgspec.Struct):
    """Asks a member how a round ended; the leader answers when it knows, the others at once."""

    group_id: Digest


class Verdict(msgspec.Struct):
    """How a round ended; ``manifest`` is there when it committed. ``is_known`` is False while in doubt."""

    is_known: bool
    manifest: RoundManifest | None = None
    reason: str = ""
    blamed: list[PeerIdText] = []


class StreamHeader(msgspec.Struct):
    """Opens a bulk stream between two members."""

    group_id: Digest


def readable_addresses(texts: Sequence[str]) -> list[Address]:
    """The addresses of a peer that can be read; a newer version may send others too."""
    return [address for text in texts[:MAX_ADDRESSES] if (address := _address_in(text)) is not None]


@functools.lru_cache(maxsize=4096)  # the same ones come in every round and every record
def _address_in(text: str) -> Address | None:
    try:
        return Address.parse(text)
    except ConfigError:
        return None


JOIN = Method("averaging.join", JoinRequest, JoinResponse)
INVITE = Method("averaging.invite", InviteRequest, InviteResponse)
VOTE = Method("averaging.vote", Vote, Verdict)
ASK_VERDICT = Method("averaging.ask_verdict", VerdictQuery, Verdict)
STREAM_KIND = "averaging"
