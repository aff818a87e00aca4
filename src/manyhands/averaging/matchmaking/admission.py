"""Rules for admission: which peers may join a group, and which groups a member accepts. Pure."""

from __future__ import annotations

from manyhands.averaging.codec_choice import allowed_codec
from manyhands.averaging.codecs import BadEncoding
from manyhands.averaging.grid.layout import MAX_AXES
from manyhands.averaging.messages import Group, JoinRequest, Member, Position
from manyhands.base.errors import Refused
from manyhands.base.identity import PeerId

BEHIND = "behind"
"""Refusal code: the asked peer has made steps that the asking one has not."""
TOLD_BEHIND = "told_behind"
"""Likewise, but the asked peer only heard so from a peer that it invited."""
OTHER_MANIFEST = "other_manifest"
"""Refusal code: the asking peer has another model or other settings."""
OTHER_POSITION = "other_position"
"""Refusal code: the asking peer is at another position in the run."""
OTHER_PART = "other_part"
"""Refusal code: the position has the same name, but the two peers made their last steps apart."""
UNKNOWN = "unknown"
"""Refusal code: there is no record of the asking peer."""
REFUSED = "refused"
"""Refusal code: the asking peer has spoilt rounds."""
AVOIDED = "avoided"
"""Refusal code of an invitation: the inviting peer did not come, or was to blame, twice in a row."""
FULL = "full"
"""Refusal code: all places of the group are taken."""


def check_ahead(me: PeerId, here: Position, position: Position) -> None:
    """Refuse a peer that is behind, so that it does not begin a branch of the run unknowingly.

    Raises:
        Refused: ``position`` is behind this peer's.
    """
    if position.step < here.step:
        there = f"at {_name_of(position)}" if position.group_key or here.group_key else str(position.step)
        raise Refused(me, BEHIND, f"the run is at {_name_of(here)}, not {there}")


def _name_of(position: Position) -> str:
    """A position in words: in a grid it has the number of a round."""
    return f"round {position.step} of the grid" if position.group_key else f"step {position.step}"


def strange_part(me: PeerId) -> Refused:
    """The refusal for a peer of another part of the run."""
    return Refused(me, OTHER_PART, "this peer is of another part of the run; the better one of the two goes on")


def check_join(
    me: PeerId, is_client: bool, run_fingerprint: bytes, here: Position, remote: PeerId, request: JoinRequest
) -> None:
    """Check that a peer may have a place in the group that this one leads or would lead.

    Raises:
        Refused: why not.
    """
    if request.run_fingerprint != run_fingerprint:
        raise Refused(me, OTHER_MANIFEST, "the model or the settings differ from those of this peer")
    if request.member.peer_id != remote:
        raise Refused(me, "bad_request", "a member joins for itself")
    if is_client:
        raise Refused(me, "client_mode", "this peer is in client mode, and leads no group")
    check_ahead(me, here, request.position)
    if request.position != here:
        which = f" in group {here.group_key}" if here.group_key else ", perhaps of another branch"
        raise Refused(me, OTHER_POSITION, f"this peer is at {_name_of(here)}{which}")


def fault_of(group: Group, leader: PeerId, own: Member, here: Position, codec: str) -> str | None:
    """Why a group is not a valid answer of its leader to this peer, in words; None if it is valid."""
    rank = group.rank_of(own.peer_id)
    ids = {member.peer_id for member in group.members}
    if (
        group.leader != leader
        or leader not in ids
        or group.position != here
        or rank is None
        or group.members[rank] != own
        or len(ids) != len(group.members)
        or all(member.is_client for member in group.members)
    ):
        return "the leader sent a group that is not for this peer"
    try:
        allowed_codec(codec, group.codec)
    except BadEncoding as error:
        return f"the leader chose {error}"
    return None


def is_later_round(position: Position, here: Position) -> bool:
    """Whether a peer that is ``here`` in a grid reaches ``position`` without loading a state."""
    is_same_grid = bool(here.group_key) and position.lineage == here.lineage
    return is_same_grid and here.step < position.step <= here.step + MAX_AXES
