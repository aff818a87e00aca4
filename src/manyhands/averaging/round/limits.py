"""Bounds what one member can do to the mean of its group. Pure.

All members compute the limits from the same numbers, in the group and in the records sent with the means. Only in the
later rounds of a grid does a member also use a norm of its own first group (docs/adr/0018). The norms of fewer than
three members are not compared.

===========================  ===================================  ====================================================
a member                     in this round                        after it
===========================  ===================================  ====================================================
has too large a weight       its weight counts as the limit,      nothing; the manifest has the weight that counts
(here, ``limited``)          below
sends values that are not    the reducer leaves them out, and     its samples are dropped; the manifest says
finite (``SpanReducer``)     takes its norm for infinite          ``LEFT_OUT``: one accusation, by the leader
has too large a norm (here,  all complain of it, nobody votes     the same
``outsized``)                for the result, and the members
                             exchange again without it
                             (``count.py``)
sends other sizes, or for    its streams end, and it is lost      it is absent from the parts of the reducers that
another round                                                     lacked its values: an accusation by each of them
===========================  ===================================  ====================================================

The limit of a weight, where the *median* is that of the weights that members of the roster give in this round:

=====================  =============================================================================================
a guest                the median
a member               three times the median, or a tenth of what it has contributed in complete rounds
                       (:meth:`Roster.earned <manyhands.averaging.roster.Roster.earned>`), but at most
                       ``MAX_EARNED_RATIO`` times the median
no member gives any    all contributors count as members: in the first round of a run, in a grid, without a roster
=====================  =============================================================================================

So words buy no weight (docs/adr/0045): a stranger counts as an ordinary member at most, and a fast member for all that
it computes once it has shown for some dozens of rounds that it does.

What accusations cost it in the next rounds (:mod:`manyhands.averaging.roster`):

==================================================  ==================================================================
accused                                             then
==================================================  ==================================================================
by one member                                       it is doubted: a guest comes no nearer to being a member; nothing
                                                    else, until another member accuses it, too
by two members, in one round or in several          it is at fault: it is a guest, and its complete rounds count from 0
the same, once more                                 the same, and it gets no place for ``BARRED_ROUNDS``
==================================================  ==================================================================
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence

import msgspec

from manyhands.access.charter import Limits
from manyhands.averaging.messages import Group
from manyhands.averaging.roster import Roster


class MemberLimits(Limits, frozen=True, kw_only=True):
    """Bounds for each member of a group, as in the run's charter; the same on all peers of a run.

    Attributes:
        norm_grows: whether the bound of the norm rises in proportion to the weight: each batch of local steps adds to
            the values.
    """

    norm_grows: bool = False


OPEN_LIMITS = MemberLimits(max_weight_share=1.0)
"""For runs without an owner: a GPU beside laptops may count for nearly all, once it has earned it (docs/adr/0045)."""
MAX_EARNED_RATIO = 100.0
"""Limit of the weight that a member can earn, as a multiple of the median: a GPU has computed so much more than laptops
(docs/adr/0018). Nobody checks that a member has computed what it says, so without a limit a patient liar would decide
all rounds in the end."""


def limited(group: Group, limits: MemberLimits, roster: Roster | None = None) -> Group:
    """The group with weights that are within the limits.

    Args:
        roster: at the position of the group; None where peers do not share one.
    """
    weights = [member.weight for member in group.members]
    earned = [roster.earned(member.peer_id) if roster is not None else 0.0 for member in group.members]
    weights = capped_weights(weights, limits, trusted(group, roster), earned)
    capped = zip(group.members, weights, strict=True)
    members = [msgspec.structs.replace(member, weight=weight) for member, weight in capped]
    return msgspec.structs.replace(group, members=members)


def trusted(group: Group, roster: Roster | None) -> set[int]:
    """The ranks whose weights say what is usual: the members of the roster that give one; all, if there are none."""
    members = roster.members if roster is not None else frozenset()
    ranks = {rank for rank, one in enumerate(group.members) if one.weight > 0 and one.peer_id in members}
    return ranks or set(range(len(group.members)))


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

    def cap(rank: int) -> float:
        if rank not in ranks:
            return usual
        return max(limits.max_weight_ratio * usual, min(earned[rank], MAX_EARNED_RATIO * usual) if earned else 0.0)

    return _within_share([min(weight, cap(rank)) for rank, weight in enumerate(weights)], limits.max_weight_share)


def _within_share(weights: Sequence[float], share: float) -> list[float]:
    """Cut the largest weights down to a share of all, exactly."""
    rest = sorted(weight for weight in weights if weight > 0)
    if len(rest) * share <= 1.0:
        return list(weights)
    num_above = 0
    while rest[-1] > (of_share := share * math.fsum(rest) / (1.0 - num_above * share)):
        rest, num_above = rest[:-1], num_above + 1
    return [min(weight, of_share) for weight in weights]


def usual_norm(norms: Sequence[float], weights: Sequence[float]) -> float:
    """The median norm of the members whose values have come; 0 if there are none."""
    given = [norm for norm, weight in zip(norms, weights, strict=True) if weight > 0 and norm > 0]
    return statistics.median(given) if given else 0.0


def outsized(
    norms: Sequence[float], weights: Sequence[float], limits: MemberLimits, *, at_least: float = 0.0
) -> set[int]:
    """Ranks whose values are not finite, or too large beside those of the others.

    The gradient of a small batch is noisier: its norm is larger by up to the root of the ratio of the weights. Below
    the median weight the bound is raised by that factor; such values weigh less.

    Args:
        norms: norm of each member's values: infinite if they are not finite, 0 if they have not come.
        at_least: the smallest norm that is taken for the usual one.
    """
    ranks = [rank for rank, weight in enumerate(weights) if weight > 0 and norms[rank] > 0]
    if len(ranks) < 3:
        return set()
    usual = max(usual_norm(norms, weights), at_least)
    usual_weight = statistics.median(weights[rank] for rank in ranks)
    if usual == math.inf:  # most values are not finite: there is nothing to compare with
        return set()

    def allowed(rank: int) -> float:
        ratio = weights[rank] / usual_weight
        return math.sqrt(max(1.0, 1 / ratio)) * (max(1.0, ratio) if limits.norm_grows else 1.0)

    return {rank for rank in ranks if norms[rank] > limits.max_norm_ratio * usual * allowed(rank)}


def joined(told: Sequence[Sequence[float]], of: Sequence[int]) -> list[float]:
    """Each member's norm over several spans.

    Args:
        told: for each span, the norms by rank.
        of: indices of the spans to join.
    """
    return [math.hypot(*(told[number][rank] for number in of)) for rank in range(len(told[0]) if told else 0)]
