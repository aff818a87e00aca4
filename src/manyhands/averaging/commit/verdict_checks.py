"""Whether what another peer says of a round can be: a verdict, and the order or the result in it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.averaging.messages import Group, Order, RoundManifest, SpanResult, Verdict
from manyhands.base.errors import ProtocolViolation
from manyhands.rpc.frames import readable


def checked(group: Group, verdict: Verdict) -> Verdict:
    """A verdict as it came from another peer: it must be about this group, and nothing else can have been committed.

    Raises:
        ProtocolViolation: it is not.
    """
    order = verdict.order
    adopted = order.adopted if order is not None else None
    for manifest in (verdict.manifest, adopted):
        if manifest is not None and not _is_of(group, manifest):
            raise ProtocolViolation(group.leader, "a verdict that is not about the group it was asked about")
    is_clear = not verdict.is_known or order is None
    if not is_clear or (verdict.manifest is not None and not verdict.is_known):
        raise ProtocolViolation(group.leader, "a verdict that is not about the group: it is known and open at once")
    if order is not None and not _is_possible(group, order):
        raise ProtocolViolation(group.leader, "an order that nobody could follow")
    blamed = [peer_id for peer_id in verdict.blamed if group.rank_of(peer_id) is not None]
    return Verdict(verdict.is_known, verdict.manifest, readable(verdict.reason), blamed, order, verdict.is_open)


def _is_of(group: Group, manifest: RoundManifest) -> bool:
    return manifest == group.manifest(manifest.digest, manifest.parts) and _are_whole(group, manifest.parts)


def _are_whole(group: Group, parts: Sequence[SpanResult]) -> bool:
    """Whether parts lie end to end, and speak of members."""
    num_members, at = len(group.members), 0
    for part in parts:
        ranks = [part.reducer, *part.absent]
        if part.start != at or part.stop <= at or max(ranks) >= num_members or part.absent != sorted(set(part.absent)):
            return False
        at = part.stop
    return True


def _is_possible(group: Group, order: Order) -> bool:
    ranks = order.members
    is_sound = bool(ranks) and ranks == sorted(set(ranks)) and ranks[-1] < len(group.members)
    if order.adopted is not None:
        return is_sound
    members = [group.members[rank] for rank in ranks] if is_sound else []
    can_average = any(not member.is_client for member in members) and any(member.weight > 0 for member in members)
    return can_average and order.start < order.stop
