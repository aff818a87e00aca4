"""Decides which peers may join a group, which codec the group uses, and which groups a member accepts. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from manyhands.averaging.codecs import INT8, NONE, BadEncoding, Codec, codec_named, codec_of_code
from manyhands.averaging.config import AUTO, SLOW_BYTES_PER_S
from manyhands.averaging.grid.seats import MAX_AXES
from manyhands.averaging.matchmaking.matchmaking_machine import (
    BARRED,
    BEHIND,
    OTHER_MANIFEST,
    OTHER_POSITION,
    name_of,
    where_the_run_is,
)
from manyhands.averaging.messages import CallRequest, Group, JoinRequest, Member, Position
from manyhands.averaging.roster import Roster
from manyhands.averaging.timing import FAR_RTT_S
from manyhands.base.errors import Refused
from manyhands.base.identity import PeerId

MAX_REDUCING_CLIENTS = 64
"""So many clients of a group connect to all of its clients, so that they may reduce; the others connect to these."""


class Ways(NamedTuple):
    """The other clients that a client can exchange with: without a relay, and through one."""

    punched: frozenset[PeerId] = frozenset()
    relayed: frozenset[PeerId] = frozenset()


def check_ahead(me: PeerId, here: Position, position: Position) -> None:
    """Refuse a peer that is behind, so that it does not begin a branch of the run unknowingly.

    Raises:
        Refused: ``position`` is behind this peer's.
    """
    if position.step < here.step:
        raise Refused(me, BEHIND, where_the_run_is(here, position))


def check_join(
    me: PeerId,
    run_fingerprint: bytes,
    here: Position,
    roster: Roster | None,
    remote: PeerId,
    request: JoinRequest,
    *,
    is_client: bool,
) -> None:
    """Check that a peer may have a place in the group that this one leads or would lead.

    Raises:
        Refused: why not.
    """
    _check_manifest(me, run_fingerprint, request.run_fingerprint)
    if request.member.peer_id != remote:
        raise Refused(me, "bad_request", "a member joins for itself")
    if is_client:
        raise Refused(me, "client_mode", "this peer is in client mode, and leads no group")
    check_ahead(me, here, request.position)
    if request.position != here:
        which = f" in group {here.group_key}" if here.group_key else ", perhaps of another branch"
        raise Refused(me, OTHER_POSITION, f"this peer is at {name_of(here)}{which}")
    if roster is not None and (num_rounds := roster.barred_rounds(remote)):
        why = f"your peer was at fault in rounds; it gets no place in the next {num_rounds}"
        raise Refused(me, BARRED, why)


def check_call(me: PeerId, run_fingerprint: bytes, here: Position, request: CallRequest) -> None:
    """Check that a peer which calls this one to a round is not behind; raises ``Refused``."""
    _check_manifest(me, run_fingerprint, request.run_fingerprint)
    check_ahead(me, here, request.position)


def _check_manifest(me: PeerId, own: bytes, theirs: bytes) -> None:
    if theirs != own:
        raise Refused(me, OTHER_MANIFEST, "the model or the settings differ from those of this peer")


def fault_of(group: Group, leader: PeerId, own: Member, here: Position, codec: str) -> str | None:
    """Why a group is not a valid answer of its leader to this peer, in words; None if it is valid.

    Args:
        codec: this peer's setting.
    """
    rank = group.rank_of(own.peer_id)
    named = None
    if rank is not None:  # the leader may change these, as it says who reduces
        named = msgspec.structs.replace(
            group.members[rank], bandwidth=own.bandwidth, may_reduce=own.may_reduce, is_met=False
        )
    ids = {member.peer_id for member in group.members}
    if (
        group.leader != leader
        or leader not in ids
        or group.position != here
        or named != own
        or len(ids) != len(group.members)
        or all(member.is_client for member in group.members)
    ):
        return "the leader sent a group that is not for this peer"
    try:
        chosen = codec_of_code(group.codec, codec)
    except BadEncoding as error:
        return f"the leader chose {error}"
    if codec not in (AUTO, chosen.name) and not chosen.passes_on:  # a sparse codec is made from the setting
        return f"the leader chose codec {chosen.name!r}, but this peer's is {codec!r}"
    return None


def clients_to_meet(own_id: PeerId, clients: Mapping[PeerId, bool], members: Collection[PeerId]) -> list[PeerId]:
    """The other clients of a group to which a client connects: those that may reduce, or all if it may itself.

    Args:
        clients: of the group, this one too; for each whether it is punchable, as one that is not never reduces.
        members: of the run; they come before guests.
    """
    punchable = [client for client, is_punchable in clients.items() if is_punchable]
    may_reduce = sorted(punchable, key=lambda one: (one not in members, one))[:MAX_REDUCING_CLIENTS]
    return [one for one in (clients if own_id in may_reduce else may_reduce) if one != own_id]


def met_clients(members: Sequence[Member], ways: Mapping[PeerId, Ways]) -> set[int]:
    """The ranks of clients that may reduce: all other clients can exchange with them, half or more without a relay.

    Members that are no clients can be dialled by all, so only pairs of clients count; a single client reduces nothing.
    Both of a pair must have said it: so a client that lies can only make itself reduce nothing.

    Args:
        ways: what each client has said; those that have said nothing are left out.
    """
    clients = {member.peer_id: rank for rank, member in enumerate(members) if member.is_client}
    nowhere = Ways()
    met: set[int] = set()
    for client, rank in clients.items():
        own = ways.get(client, nowhere)
        others = clients.keys() - {client}
        if not others or not others <= own.punched | own.relayed:
            continue
        punched = {one for one in own.punched & others if client in ways.get(one, nowhere).punched}
        relayed = {one for one in own.relayed & others if client in ways.get(one, nowhere).relayed}
        if punched | relayed == others and 2 * len(punched) >= len(others):
            met.add(rank)
    return met


def is_later_round(position: Position, here: Position) -> bool:
    """Whether a peer that is ``here`` in a grid reaches ``position`` without loading a state."""
    is_same_grid = bool(here.group_key) and position.lineage == here.lineage
    return is_same_grid and here.step < position.step <= here.step + MAX_AXES


def chosen_codec(setting: str, bandwidths: Iterable[int], rtts_s: Iterable[float]) -> Codec:
    """The codec that the leader of a round chooses: exact values where links are fast, else 8 bits.

    Args:
        setting: the user's codec setting; only ``auto`` leaves a choice.
        bandwidths: bytes per second, as the members say; 0 if unknown.
        rtts_s: seconds of a round trip between the leader and each other member; infinite if unknown.
    """
    if setting != AUTO:
        return codec_named(setting)
    is_slow = any(0 < bandwidth < SLOW_BYTES_PER_S for bandwidth in bandwidths)
    is_far = any(FAR_RTT_S < rtt_s < float("inf") for rtt_s in rtts_s)
    return INT8 if is_slow or is_far else NONE
