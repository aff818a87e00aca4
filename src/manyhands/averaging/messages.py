"""The messages between the members of a round; on the wire each run has methods of its own."""

from __future__ import annotations

import enum
import functools
import hashlib
import statistics
from collections.abc import Collection, Sequence
from typing import Annotated, TypeVar

import msgspec

from manyhands.averaging.timing import DAY_S
from manyhands.base.address import MAX_ADDRESSES, Address, AddressText, AddressTexts
from manyhands.base.errors import ConfigError, ProtocolViolation
from manyhands.base.identity import PeerId
from manyhands.base.structs import make_ready
from manyhands.rpc import Method
from manyhands.rpc.frames import UNREADABLE

T = TypeVar("T")

MAX_WEIGHT = 2.0**32
"""Limit of the samples behind one peer's vector: so sums of many stay finite, and whole numbers exact."""
MAX_SUM_WEIGHT = 2.0**52
"""Limit of the samples behind the mean of many peers, in a grid of groups."""
MAX_NORM = 2.0**160
"""Limit of the norm of one peer's vector; no vector of finite float32 has a larger one."""
MAX_BANDWIDTH = 10**12
"""Limit in bytes per second; far above any link."""
MAX_REASON_LENGTH = 500
SHORT_ID_BYTES = 8
NAME_BYTES = 16
"""Length of a round's name on a stream."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Weight = Annotated[float, msgspec.Meta(ge=0, le=MAX_SUM_WEIGHT)]
Norm = Annotated[float, msgspec.Meta(ge=0, le=MAX_NORM)]
Scale = Annotated[float, msgspec.Meta(ge=0, le=1)]
Bandwidth = Annotated[int, msgspec.Meta(ge=0, le=MAX_BANDWIDTH)]
PeerIdText = Annotated[PeerId, msgspec.Meta(max_length=64)]
Digest = Annotated[bytes, msgspec.Meta(max_length=64)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
ExchangeNumber = Annotated[int, msgspec.Meta(ge=0, le=2**16)]
LateNumber = Annotated[int, msgspec.Meta(ge=0, le=2)]
MarkNumber = Annotated[int, msgspec.Meta(ge=0, le=15)]
MAX_PARTS = 4096


class Late(enum.IntEnum):
    """The kind of peers that the leader waited for in vain when a group formed."""

    NOBODY = 0
    GUESTS = 1
    MEMBERS = 2


class Position(msgspec.Struct, frozen=True, omit_defaults=True):
    """A peer's position in the run: peers average together only at the same position.

    Attributes:
        step: global step, the number of optimizer steps made so far.
        lineage: digest of all committed rounds that led here, and in a run of the roster here, too
            (:mod:`manyhands.averaging.roster`); peers see by it that a run has split.
        group_key: group of the grid, in swarms that are too large for one; see docs/explanation/averaging.md.
    """

    step: Count
    lineage: Digest
    group_key: Annotated[str, msgspec.Meta(max_length=100)] = ""


MAX_CLIENTS_MET = 1024
"""Most other clients that a client names when it asks for a place: as many as it may be connected to."""


class Mark(enum.IntFlag):
    """Flags of a member in a manifest."""

    CLIENT = 1  # it cannot be dialled
    IDLE = 2  # it gave a weight of 0
    LEFT_OUT = 4  # it was not in the last exchange of the round
    CLIPPED = 8  # its values counted scaled down


class Member(msgspec.Struct, frozen=True, omit_defaults=True):
    """One member of a formed group.

    Attributes:
        weight: samples behind its vector.
        bandwidth: bytes per second that it can send, as it says; 0 if it does not know.
        may_reduce: false of a member that was blamed in its last round, and of guests while there is trouble: it owns a
            span only if nobody else can.
        is_met: whether all other members can exchange with it although it is a client, as the leader says.
        is_punchable: of a client: whether it knows where its connections come from, so that other clients can connect
            to it without a relay.
        norm: the L2 norm of its values, as it says; 0 if it does not say, as in rounds that do not clip.
        scale: the factor with which its values count; not sent, as it follows from the norms (:mod:`.round.limits`).
    """

    peer_id: PeerIdText
    addresses: AddressTexts
    is_client: bool
    weight: Weight
    bandwidth: Bandwidth = 0
    may_reduce: bool = True
    is_met: bool = False
    is_punchable: bool = False
    norm: Norm = 0.0
    scale: Scale = 1.0

    @property
    def can_reduce(self) -> bool:
        """Whether all other members can exchange with it."""
        return self.is_met or not self.is_client


class Group(msgspec.Struct, frozen=True, dict=True):
    """A formed group; a member's rank is its index in ``members``.

    Attributes:
        nonce: chosen by the leader, so that no two groups are alike.
        codec: see docs/reference/wire.md.
        late: one of :class:`Late`.
    """

    nonce: Digest
    leader: PeerIdText
    position: Position
    members: list[Member]
    codec: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    late: LateNumber = 0

    @functools.cached_property
    def group_id(self) -> bytes:
        """A digest of the whole group: so members to which the leader sends different groups do not meet."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()[:NAME_BYTES]

    def rank_of(self, peer_id: PeerId) -> int | None:
        """The rank of a peer, or None when it is not a member."""
        return next((rank for rank, member in enumerate(self.members) if member.peer_id == peer_id), None)

    def bandwidths(self, ranks: Collection[int]) -> list[int]:
        """Bytes per second of the reducers among the members of these ranks; the median where unknown.

        0 for the other members. Clients reduce only if all others can exchange with them; members with
        ``may_reduce=False`` do only if nobody else can.
        """
        known = [member.bandwidth for member in self.members if member.bandwidth and member.can_reduce]
        usual = statistics.median_low(known) if known else 1
        able = {rank for rank in ranks if self.members[rank].can_reduce}
        able = {rank for rank in able if self.members[rank].may_reduce} or able
        return [member.bandwidth or usual if rank in able else 0 for rank, member in enumerate(self.members)]

    def manifest(
        self, digest: bytes, parts: Sequence[SpanResult] = (), members: Collection[int] | None = None
    ) -> RoundManifest:
        """The manifest with which this group commits a vector.

        Args:
            members: ranks that took part in the last exchange; default: all.
        """
        leader = self.rank_of(self.leader)
        assert leader is not None
        absent = set.intersection(*(set(part.absent) for part in parts)) if parts else set()
        marks = []
        for rank, member in enumerate(self.members):
            mark = Mark(0)
            if member.is_client:
                mark |= Mark.CLIENT
            if member.weight == 0:
                mark |= Mark.IDLE
            if members is not None and rank not in members:
                mark |= Mark.LEFT_OUT
            elif member.weight > 0 and member.scale < 1:
                mark |= Mark.CLIPPED
            marks.append(int(mark))
        return RoundManifest(
            self.group_id,
            self.position,
            leader,
            [member.peer_id for member in self.members],
            [0.0 if rank in absent else member.weight for rank, member in enumerate(self.members)],
            marks,
            digest,
            list(parts),
            self.late,
        )


class SpanResult(msgspec.Struct, frozen=True):
    """The contributors to ``flat_N[start:stop]``: all members with a weight except the absent ones."""

    start: Count
    stop: Count
    reducer: Rank  # rank of the member that averaged it
    absent: list[Rank]  # ascending; may contain members with a weight of 0


class RoundManifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of a committed round.

    Attributes:
        members, weights: by rank; a weight of 0 means that the member contributed nothing.
        marks: by rank; flags of :class:`Mark`.
        digest: digest of the means as sent; see :func:`digest_of_all`.
        parts: the contributors to each part of the vector; empty if all members with a weight gave all parts.
        late: one of :class:`Late`.
    """

    group_id: Digest
    position: Position
    leader: Rank
    members: list[PeerIdText]
    weights: list[float]
    marks: list[MarkNumber]
    digest: Digest
    parts: Annotated[list[SpanResult], msgspec.Meta(max_length=MAX_PARTS)] = []
    late: LateNumber = 0

    @property
    def left_out(self) -> frozenset[int]:
        """Ranks of the members that were not in the last exchange."""
        return frozenset(rank for rank, mark in enumerate(self.marks) if mark & Mark.LEFT_OUT)

    @property
    def clipped(self) -> list[PeerId]:
        """The members whose values counted scaled down."""
        return [peer_id for peer_id, mark in zip(self.members, self.marks, strict=True) if mark & Mark.CLIPPED]

    def contributors(self) -> dict[PeerId, float]:
        """The members whose values count, with their weights."""
        return {member: weight for member, weight in zip(self.members, self.weights, strict=True) if weight > 0}

    def cut(self) -> dict[PeerId, list[tuple[int, int]]]:
        """Members whose values count in some parts only: start and stop of each, in elements of the vector."""
        cut: dict[PeerId, list[tuple[int, int]]] = {}
        for rank, (peer_id, weight) in enumerate(zip(self.members, self.weights, strict=True)):
            if weight > 0 and any(rank in part.absent for part in self.parts):
                spans = cut[peer_id] = []
                for part in self.parts:
                    if rank not in part.absent:
                        start = spans.pop()[0] if spans and spans[-1][1] == part.start else part.start
                        spans.append((start, part.stop))
        return cut

    def fingerprint(self) -> bytes:
        """SHA-256 of the whole manifest."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()


class JoinRequest(msgspec.Struct, omit_defaults=True):
    """Asks a leader for a place in its group; answered when the group closes.

    Attributes:
        patience_s: how long the asking peer waits for the leader's own training loop.
        punched, relayed: clients that it can exchange with, without a relay and through one.
    """

    run_fingerprint: Digest
    position: Position
    member: Member
    patience_s: Annotated[float, msgspec.Meta(ge=0, le=DAY_S)]
    punched: Annotated[list[PeerIdText], msgspec.Meta(max_length=MAX_CLIENTS_MET)] = []
    relayed: Annotated[list[PeerIdText], msgspec.Meta(max_length=MAX_CLIENTS_MET)] = []


class JoinResponse(msgspec.Struct, omit_defaults=True):
    """The formed group, or the leader that the asked peer follows; neither if the asking peer has asked again."""

    group: Group | None = None
    leader: PeerIdText = PeerId("")
    leader_addresses: list[AddressText] = []


class CallRequest(msgspec.Struct):
    """Tells a peer that a round has begun at its position, and that the calling peer leads it."""

    run_fingerprint: Digest
    position: Position


class CallResponse(msgspec.Struct, omit_defaults=True):
    """The leader that the called peer follows, if that is not the calling peer."""

    leader: PeerIdText = PeerId("")
    leader_addresses: list[AddressText] = []


class Complaint(msgspec.Struct, frozen=True):
    """A member's report to the leader that another member, or it itself, did wrong or did nothing.

    It decides who takes part in the next exchange of the round. What the manifest says of a member afterwards is an
    *accusation* (:mod:`.roster`).
    """

    about: Rank
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_LENGTH)]
    is_violation: bool = False  # it sent forbidden data, rather than too little
    is_stalled: bool = False  # it opened no stream, or sent nothing; else it may have given up the other one first


class Vote(msgspec.Struct):
    """A member's report to the leader of its round, after each exchange (:mod:`.round.round_machine`).

    Attributes:
        exchange: number of the exchange, counted from 0.
        digests: BLAKE3 of the means of each member's span, by rank, as this member holds them; empty for members that
            reduce nothing. No digests at all if the member lacks a part of the result.
        parts: the contributors to the result that it holds, as in :class:`RoundManifest`.
        reason: why it lacks a part of the result.
        complaints: members whose values or means did not come, and why.
    """

    group_id: Digest
    exchange: ExchangeNumber
    digests: Annotated[list[Digest], msgspec.Meta(max_length=2**16)] = []
    parts: Annotated[list[SpanResult], msgspec.Meta(max_length=MAX_PARTS)] = []
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_LENGTH)] = ""
    complaints: Annotated[list[Complaint], msgspec.Meta(max_length=256)] = []

    @property
    def digest(self) -> bytes:
        """The digest of the whole result, as in :class:`RoundManifest`; empty without one."""
        return digest_of_all(self.digests) if self.digests else b""


def digest_of_all(digests: Sequence[bytes]) -> bytes:
    """The digest of a result: SHA-256 of those of its spans, in order of ranks."""
    return hashlib.sha256(b"".join(digests)).digest()


class Received(msgspec.Struct):
    """The leader has counted a vote."""


class Again(msgspec.Struct, frozen=True):
    """The leader's order: these members exchange their values once more, and vote on that."""

    exchange: ExchangeNumber
    members: Annotated[list[Rank], msgspec.Meta(max_length=2**16)]


NOBODY = b""
"""An id that no group has. A peer that is asked whether it is in that group answers at once: a ping."""


class VerdictQuery(msgspec.Struct):
    """Asks how a round goes on; the asked member answers as soon as there is news for the asking one.

    The leader has news when the round is decided, or when there is another exchange; any other member when it knows the
    verdict, or has lost the leader too.
    """

    group_id: Digest
    exchange: ExchangeNumber = 0  # the one that the asking member is in


class Verdict(msgspec.Struct):
    """How a round goes on.

    Attributes:
        is_known: whether the round is decided; then ``manifest`` is set if it committed.
        reason: why it was aborted; if it committed, what went wrong, member by member.
        blamed: the members at fault.
        again: the next exchange, if there is one.
    """

    is_known: bool
    manifest: RoundManifest | None = None
    reason: str = ""
    blamed: Annotated[list[PeerIdText], msgspec.Meta(max_length=4096)] = []
    again: Again | None = None


class InRoundQuery(msgspec.Struct):
    """Asks a member whether it is in the round."""

    group_id: Digest
    leader: PeerIdText = PeerId("")


class InRound(msgspec.Struct):
    """Whether a member is in the round, or waits for a group of that leader."""

    is_in: bool


class StreamHeader(msgspec.Struct):
    """Opens a bulk stream for a round; if the id is empty, the first ``NAME_BYTES`` bytes of the stream contain it."""

    group_id: Digest


@functools.lru_cache(maxsize=4096)
def short_id(peer_id: PeerId) -> bytes:
    """A few bytes that name a peer to others that know its id."""
    return hashlib.sha256(peer_id.encode()).digest()[:SHORT_ID_BYTES]


def readable_addresses(texts: Sequence[str]) -> list[Address]:
    """The addresses of a peer that can be parsed; a newer version may send others too."""
    return [address for text in texts[:MAX_ADDRESSES] if (address := _address_in(text)) is not None]


@functools.lru_cache(maxsize=4096)  # the same addresses come in every round and every record
def _address_in(text: str) -> Address | None:
    try:
        return Address.parse(text)
    except ConfigError:
        return None


def read_header(remote: PeerId, header: bytes, kind: type[T]) -> T:
    """The header of a stream that a peer has opened; raises ``ProtocolViolation`` if it cannot be read."""
    try:
        return msgspec.msgpack.decode(header, type=kind)
    except UNREADABLE as error:
        raise ProtocolViolation(remote, "a stream header that cannot be read") from error


JOIN = Method("averaging.join", JoinRequest, JoinResponse)
CALL = Method("averaging.call", CallRequest, CallResponse)
VOTE = Method("averaging.vote", Vote, Received)
ASK_VERDICT = Method("averaging.ask_verdict", VerdictQuery, Verdict)
ASK_IN_ROUND = Method("averaging.ask_in_round", InRoundQuery, InRound)
make_ready(StreamHeader)
STREAM_KIND = "averaging"
