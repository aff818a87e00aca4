"""Bounds what one member can do to the mean of its group. Pure.

All members compute the limits from the same numbers, in the group and in the records sent with the means. Only in the
later rounds of a grid does a member also use a norm of its own first group (docs/adr/0018). The norms of fewer than
three members are not compared.

===========================  ===================================  ====================================================
a member                     in this round                        after it
===========================  ===================================  ====================================================
has too large a weight       its weight counts as the limit       nothing
(here, ``limited``)
sends values that are not    the reducer leaves them out, and     its samples are dropped; the manifest says
finite (``SpanReducer``)     takes its norm for infinite          ``LEFT_OUT``: one accusation, by the leader
has too large a norm (here,  all complain of it, nobody votes     the same
``outsized``)                for the result, and the members
                             exchange again without it
                             (``count.py``)
sends other sizes, or for    its streams end, and it is lost      it is absent from the parts of the reducers that
another round                                                     lacked its values: an accusation by each of them
===========================  ===================================  ====================================================

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
from collections.abc import Sequence

import msgspec

from manyhands.access.charter import Limits
from manyhands.averaging.messages import Group


class MemberLimits(Limits, frozen=True, kw_only=True):
    """Bounds for each member of a group, as in the run's charter; the same on all peers of a run.

    Attributes:
        norm_grows: whether the bound of the norm rises in proportion to the weight: each batch of local steps adds to
            the values.
    """

    norm_grows: bool = False


OPEN_LIMITS = MemberLimits(max_weight_ratio=100.0, max_weight_share=1.0)
"""For runs without an owner: a GPU beside laptops counts for all that it computes (docs/adr/0018)."""


def limited(group: Group, limits: MemberLimits) -> Group:
    """The group with weights that are within the limits."""
    weights = capped_weights([member.weight for member in group.members], limits)
    capped = zip(group.members, weights, strict=True)
    members = [msgspec.structs.replace(member, weight=weight) for member, weight in capped]
    return msgspec.structs.replace(group, members=members)


def capped_weights(weights: Sequence[float], limits: MemberLimits) -> list[float]:
    """Cap each weight; to the share only where equal weights keep to it: a share of a quarter, from five members on."""
    given = sorted(weight for weight in weights if weight > 0)
    if not given:
        return list(weights)
    cap = limits.max_weight_ratio * statistics.median(given)
    share = limits.max_weight_share
    if len(given) * share > 1.0:
        rest = [min(weight, cap) for weight in given]
        num_above = 0
        while rest[-1] > (of_share := share * math.fsum(rest) / (1.0 - num_above * share)):
            rest, num_above = rest[:-1], num_above + 1
        cap = min(cap, of_share)  # exactly this share of all, if larger weights are cut down to it
    return [min(weight, cap) for weight in weights]


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
