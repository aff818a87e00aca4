"""Bounds what one member can do to the mean of its group. Pure.

All members compute the limits from the same numbers, in the group and in the records sent with the means. The norms of
fewer than three members are not compared, and nobody is clipped.

===========================  ===================================  ====================================================
a member                     in this round                        after it
===========================  ===================================  ====================================================
has too large a weight       its weight counts as the limit       nothing; the manifest has the weight that counts
(here, ``limited``)          below
says, when it asks for a     they count scaled down to that, if   nothing; the manifest says ``CLIPPED``
place, that its values are   ``aggregate="clip"``; its weight
above ``CLIP_RATIO`` times   counts in full
the usual norm (``limited``)
sends values that are not    the reducer leaves them out, and     its samples are dropped; the manifest says
finite (``SpanReducer``)     takes its norm for infinite          ``LEFT_OUT``: one accusation, by the leader
sends values beyond what it  all complain of it, nobody votes     the same
has said (here,              for the result, and the members
``counted_norms``)           exchange again without it
brings too large a mean to   (``count.py``)
a later round of a grid
(here, ``outsized``)
as a reducer, sends means    those that find it complain, and do  the same, if the members exchange again; else
that do not fit what it      not vote for the result; unless the  nothing: the verdict blames it
tells of members' values     others hold it, the members
(``allreduce/checks.py``)    exchange again without it
sends other sizes, or for    its streams end, and it is lost      it is absent from the parts of the reducers that
another round                                                     lacked its values: an accusation by each of them
===========================  ===================================  ====================================================

The limit of a weight, where the *median* is that of the weights that voters of the roster give in this round:

=====================  =============================================================================================
a guest                the median
a voter                three times the median; a member also a tenth of what it has contributed in complete rounds
                       (:meth:`Roster.earned <manyhands.averaging.roster.Roster.earned>`); all that count for more than
                       three times the median are together at most a third of the group
fewer than 3 voters    all contributors count as voters: in the first round of a run, in a grid, without a roster
=====================  =============================================================================================

The *usual* norm is the median of those of the same peers. So words buy no weight (docs/adr/0045): a stranger counts
as an ordinary member at most, and among many peers a fast member for all that it computes, once it has shown for some
dozens of rounds that it does. And one member moves a mean no further than two ordinary ones of its weight
(docs/adr/0046).

In the later rounds of a grid members bring means of groups. Nobody is clipped there, and a mean is too large above
``MAX_RATIO`` times the usual norm, or that of the values in this member's own first group if that is larger
(docs/adr/0018). With ``aggregate="mean"`` sizes are not compared in any round.

What accusations cost it in the next rounds (:mod:`manyhands.averaging.roster`):

==================================================  ==================================================================
accused                                             then
==================================================  ==================================================================
by one member                                       it is doubted: a guest comes no nearer to being a member; nothing
                                                    else, until another member accuses it, too
by two members, in one round or in several          it is at fault: it is a guest, and its complete rounds count from 0;
                                                    if it was a member, it still votes
the same, once more                                 the same, and unless it votes, it gets no place for
                                                    ``BARRED_ROUNDS``
==================================================  ==================================================================
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence

import msgspec

from manyhands.access.charter import Limits
from manyhands.averaging.messages import Group, Member
from manyhands.averaging.roster import Roster


class MemberLimits(Limits, frozen=True, kw_only=True):
    """Bounds for each member of a group, as in the run's charter; the same on all peers of a run.

    Attributes:
        norm_grows: whether the bound of the norm rises in proportion to the weight: each batch of local steps adds to
            the values.
    """

    norm_grows: bool = False


OPEN_LIMITS = MemberLimits(max_weight_share=1.0)
"""For runs without an owner (docs/adr/0045)."""
CLIP_RATIO = 2.0
"""Values count for at most this multiple of the usual norm: in ordinary steps of honest peers nobody is over it
(``benchmarks/unlike_data.py``, docs/adr/0046)."""
MAX_RATIO = 10.0
"""Limit of the norm of a group's mean in a later round of a grid, in multiples of the usual norm. These norms
differ widely: where the values of a group cancel, its mean is nearly 0."""
MAX_BEYOND = 1.1
"""Limit of the norm that reducers measure, in multiples of the norm that the member has said: codecs change
values a little."""
LEAST_RATIO = 2.0**-64
"""The least ratio of a weight to the median. Smaller ratios count as this one, as their inverse may be
infinite."""
LEAST_SCALE = 2.0**-400
"""The least factor by which values are scaled down, so that none is 0. It leaves next to nothing of any norm
that a member can say."""
ENOUGH = 3
"""The fewest members that say what is usual. The median of two is their mean, which one of them can move at
will."""


def limited(group: Group, limits: MemberLimits, roster: Roster | None = None, *, clips: bool = False) -> Group:
    """The group with the weights that count, and the scale of each member's values.

    Args:
        roster: at the position of the group; None where peers do not share one.
        clips: whether values that are too large count scaled down.
    """
    members = group.members
    usual = trusted(group, roster)
    # a member with a large weight may have large values where these grow with it: then three times is all
    may_earn = roster is not None and not limits.norm_grows
    earned = [roster.earned(member.peer_id) if roster is not None and may_earn else 0.0 for member in members]
    weights = capped_weights([member.weight for member in members], limits, usual, earned)
    norms = [member.norm for member in members]
    scales = clipping_scales(norms, weights, limits, usual) if clips else [1.0] * len(members)
    counted = [
        msgspec.structs.replace(member, weight=weight, scale=scale)
        for member, weight, scale in zip(members, weights, scales, strict=True)
    ]
    return msgspec.structs.replace(group, members=counted)


def what_does_not_count(weight: float, counted: Member, limits: MemberLimits) -> str:
    """What of a member's contribution a round does not count, and why, for its log; empty if all of it counts.

    Args:
        weight: what the member brings.
        counted: the member with the weight and the scale that count, of :func:`limited`.
    """
    lines = []
    if counted.weight < weight:
        most = f"{limits.max_weight_ratio:g} times the median"
        if limits.max_weight_share < 1:
            most += f", or {limits.max_weight_share:.0%} of the group"
        lines.append(
            f"{100 * (1 - counted.weight / weight):.3g}% of this peer's samples do not count in this round: it brings "
            f"{weight:g}, which count for {counted.weight:g}, as the others bring fewer. A peer counts for at most "
            f"{most}, and a new one for the median; with more rounds that may rise"
        )
    if counted.scale < 1:
        lines.append(
            f"the values of this peer are more than {CLIP_RATIO:g} times as large as is usual in this round, so they "
            f"are multiplied by {counted.scale:.3g}"
        )
    return "; ".join([*lines, "see docs/explanation/rounds.md"]) if lines else ""


def trusted(group: Group, roster: Roster | None) -> set[int]:
    """The ranks whose weights and norms say what is usual.

    They are the voters of the roster that give a weight, if these are at least ``ENOUGH``; else all.
    """
    voters = roster.voters if roster is not None else frozenset()
    ranks = {rank for rank, one in enumerate(group.members) if one.weight > 0 and one.peer_id in voters}
    return ranks if len(ranks) >= ENOUGH else set(range(len(group.members)))


def capped_weights(
    weights: Sequence[float],
    limits: MemberLimits,
    members: Collection[int] | None = None,
    earned: Sequence[float] = (),
) -> list[float]:
    """Cap each weight; to the share only where equal weights keep to it: a share of a quarter, from five members on.

    Args:
        members: ranks whose weights say what is usual; the others are guests. Default: all.
        earned: by rank, the weight that a member may have however much the others give; default: none.
    """
    ranks = range(len(weights)) if members is None else members
    given = [weights[rank] for rank in ranks if weights[rank] > 0]
    if not given:
        return list(weights)
    usual = statistics.median(given)
    caps = [limits.max_weight_ratio * usual if rank in ranks else usual for rank in range(len(weights))]
    counted = [min(weight, cap) for weight, cap in zip(weights, caps, strict=True)]
    for rank, weight in _earned_weights(weights, counted, earned).items():
        counted[rank] = max(counted[rank], weight)
    return _within_share(counted, limits.max_weight_share)


def _earned_weights(weights: Sequence[float], counted: Sequence[float], earned: Sequence[float]) -> dict[int, float]:
    """By rank, the weights of members that have earned more than their cap: together at most a third of the group.

    Nobody checks that a member has computed what it says, so a patient liar earns weight, too. The third bounds what it
    can do: values that are reversed and ``CLIP_RATIO`` times as large can at most cancel those of the others.
    """
    given = {rank: min(weights[rank], most) for rank, most in enumerate(earned) if weights[rank] > counted[rank]}
    above = {rank: weight for rank, weight in given.items() if weight > counted[rank]}
    others = math.fsum(weight for rank, weight in enumerate(counted) if rank not in above)
    share = min(1.0, others / CLIP_RATIO / math.fsum(above.values())) if above else 1.0
    return {rank: weight * share for rank, weight in above.items()}


def _within_share(weights: Sequence[float], share: float) -> list[float]:
    """Cut the largest weights down to a share of all, exactly."""
    rest = sorted(weight for weight in weights if weight > 0)
    if len(rest) * share <= 1.0:
        return list(weights)
    num_above = 0
    while rest[-1] > (of_share := share * math.fsum(rest) / (1.0 - num_above * share)):
        rest, num_above = rest[:-1], num_above + 1
    return [min(weight, of_share) for weight in weights]


def usual_norm(norms: Sequence[float], weights: Sequence[float], members: Collection[int] | None = None) -> float:
    """The median norm of the members whose values have come, of all if none of these has come, or 0.

    Args:
        members: ranks whose norms say what is usual; by default all.
    """
    given = {rank: norm for rank, norm in enumerate(norms) if weights[rank] > 0 and norm > 0}
    of_members = [norm for rank, norm in given.items() if members is None or rank in members]
    return statistics.median(of_members or given.values()) if given else 0.0


def clipping_scales(
    norms: Sequence[float], weights: Sequence[float], limits: MemberLimits, members: Collection[int] | None = None
) -> list[float]:
    """The factor with which each member's values count, so that none is beyond ``CLIP_RATIO`` times the usual norm.

    Args:
        norms: of each member's values, as it says.
        members: as for :func:`usual_norm`.
    """
    ranks = [rank for rank, weight in enumerate(weights) if weight > 0 and norms[rank] > 0]
    usual = usual_norm(norms, weights, members)
    if len(ranks) < ENOUGH:
        return [1.0] * len(norms)
    radius = {rank: CLIP_RATIO * usual * _allowed(rank, ranks, weights, limits, members) for rank in ranks}
    return [
        max(min(1.0, radius[rank] / norm), LEAST_SCALE) if rank in radius else 1.0 for rank, norm in enumerate(norms)
    ]


def counted_norms(group: Group, measured: Sequence[float], members: Collection[int] | None = None) -> list[float]:
    """The norms with which the members' values count; infinite for a member that has sent more than it has said.

    A member may send as much as is usual, whatever it has said: it may have rounded a norm of next to nothing.

    Args:
        measured: norm of each member's values as they came, over all spans.
        members: as for :func:`usual_norm`.
    """
    usual = usual_norm([one.norm for one in group.members], [one.weight for one in group.members], members)
    return [
        norm * member.scale if norm <= MAX_BEYOND * max(member.norm, usual) else math.inf
        for member, norm in zip(group.members, measured, strict=True)
    ]


def outsized(
    norms: Sequence[float],
    weights: Sequence[float],
    limits: MemberLimits,
    members: Collection[int] | None = None,
    *,
    before: float | None = None,
) -> set[int]:
    """Ranks whose values are not finite, or more than was said; in a later round of a grid, also too large ones.

    Args:
        norms: norm of each member's values, of :func:`counted_norms` where members are clipped: infinite if they are
            not finite, 0 if they have not come.
        members: as for :func:`usual_norm`.
        before: in a later round of a grid, the smallest norm that is taken for the usual one; else None.
    """
    ranks = [rank for rank, weight in enumerate(weights) if weight > 0 and norms[rank] > 0]
    usual = usual_norm(norms, weights, members)
    if len(ranks) < ENOUGH or usual == math.inf:  # most values are not finite: there is nothing to compare with
        return set()
    if before is None:
        return {rank for rank in ranks if norms[rank] == math.inf}
    most = MAX_RATIO * max(usual, before)
    return {rank for rank in ranks if norms[rank] > most * _allowed(rank, ranks, weights, limits, members)}


def _allowed(
    rank: int,
    ranks: Sequence[int],
    weights: Sequence[float],
    limits: MemberLimits,
    members: Collection[int] | None,
) -> float:
    """The factor of a member's limit of norms, by its weight among those of the members with these ranks.

    The gradient of a small batch is noisier: its norm is larger by up to the root of the ratio of the weights. Below
    the median weight the bound is raised by that factor; such values weigh less.
    """
    of_members = [weights[one] for one in ranks if members is None or one in members]
    ratio = max(weights[rank] / statistics.median(of_members or [weights[one] for one in ranks]), LEAST_RATIO)
    return math.sqrt(max(1.0, 1 / ratio)) * (max(1.0, ratio) if limits.norm_grows else 1.0)


def joined(told: Sequence[Sequence[float]], of: Sequence[int]) -> list[float]:
    """Each member's norm over several spans.

    Args:
        told: for each span, the norms by rank.
        of: indices of the spans to join.
    """
    return [math.hypot(*(told[number][rank] for number in of)) for rank in range(len(told[0]) if told else 0)]
