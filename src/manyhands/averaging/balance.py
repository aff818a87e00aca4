"""What fraction of the vector each member reduces, so that the slowest one is done as early as possible. Pure.

Let n members average a vector, of which member i reduces the fraction w_i, and count in vectors. In the reduce-scatter
member i sends its values of all spans but its own, ``1 - w_i``, and receives those of the n - 1 others for its own,
``(n - 1) w_i``. In the all-gather it is the other way round. So it sends ``(1 - w_i) + (n - 1) w_i = 1 + (n - 2) w_i``,
and receives as much; with bandwidth b_i in each direction that takes

    t_i = (1 + (n - 2) w_i) / b_i.

The best w minimises max t_i over w >= 0, sum w = 1. Who reduces is done at one time, 1 / x: were one of them later than
another, it would do better to hand a part over. So ``w_i = (x b_i - 1) / (n - 2)``, and 0 for whoever sends its own
values for longer than that, x b_i <= 1. These are the slowest members. When the k fastest reduce, and S is the sum of
their bandwidths, ``sum w = 1`` gives ``x = (n - 2 + k) / S``; the right k is the largest for which all k fractions are
positive. (If a member that reduces nothing needs longer than 1 / x, other w are as good; this one lets all others be
done first.) With n = 2 both send one vector, whoever reduces it: each takes a half, as the adding is work too.

A client cannot be dialled, so it reduces nothing; it counts in n. A member without samples sends less than this says.

Everything is counted in whole numbers, so all members find the same fractions, on whatever machine.

Source: Ryabinin et al., Moshpit SGD, arXiv:2103.03239, and Diskin et al., Distributed Deep Learning in Open
Collaborations, arXiv:2106.10207, which solve a linear program for the same minimum.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

NO_MINIMUM = Fraction(0)

SAME = Fraction(1, 4)
"""Who is faster than another member by no more than this counts as no faster."""


def leveled(bandwidths: Sequence[int]) -> list[int]:
    """Bandwidths of which those that hardly differ are the same, by rank: measurements differ by as much.

    Members get on together, so one that was taken for somewhat slower than it is and has less to send cannot show
    that it is faster; and what a few percent of difference would save is less than what as much of an error costs.
    """
    levels = list(bandwidths)
    ascending = sorted((rank for rank, bandwidth in enumerate(bandwidths) if bandwidth > 0), key=bandwidths.__getitem__)
    while ascending:
        most = bandwidths[ascending[0]] * (1 + SAME)
        same = list(itertools.takewhile(lambda rank: bandwidths[rank] <= most, ascending))  # noqa: B023 (used at once)
        for rank in same:
            levels[rank] = sum(bandwidths[other] for other in same) // len(same)
        ascending = ascending[len(same) :]
    return levels


def balanced_shares(
    bandwidths: Sequence[int], candidates: Sequence[int], min_fraction: Fraction = NO_MINIMUM
) -> list[int]:
    """Relative sizes of the spans, by rank; O(n log n).

    Args:
        bandwidths: of all members, shape [P], in any unit.
        candidates: ranks of those that may reduce, at least one; their bandwidths are > 0.
        min_fraction: of the vector. Nobody reduces less: the slowest leave it to the others. One always reduces.
    """
    num_others = len(bandwidths) - 2
    if num_others < 1:  # all send the same, whoever reduces
        bandwidths, num_others = [1] * len(bandwidths), 1
    fastest = sorted(candidates, key=lambda rank: (-bandwidths[rank], rank))
    sums = list(itertools.accumulate(bandwidths[rank] for rank in fastest))
    num_reducers = len(fastest)
    while num_reducers > 1:
        total = sums[num_reducers - 1]
        least = (num_others + num_reducers) * bandwidths[fastest[num_reducers - 1]] - total
        if least > 0 and least * min_fraction.denominator >= min_fraction.numerator * num_others * total:
            break
        num_reducers -= 1
    shares = [0] * len(bandwidths)
    for rank in fastest[:num_reducers]:
        shares[rank] = (num_others + num_reducers) * bandwidths[rank] - sums[num_reducers - 1]
    return shares
