"""What one member counts for at most, and whose values are too large; all members compute the same."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec
import pytest

from manyhands.averaging.messages import Group
from manyhands.averaging.roster import QUALIFYING, Attendance, Roster, Standing
from manyhands.averaging.round.limits import (
    CLIP_RATIO,
    OPEN_LIMITS,
    MemberLimits,
    capped_weights,
    clipping_scales,
    counted_norms,
    limited,
    outsized,
    trusted,
    usual_norm,
    what_does_not_count,
)
from manyhands.base.errors import ConfigError
from manyhands.base.identity import PeerId
from tests.unit.averaging.groups import group_of

LIMITS = MemberLimits()


@pytest.mark.parametrize(
    ("weights", "capped"),
    [
        ([], []),
        ([0.0, 0.0], [0.0, 0.0]),
        ([5.0], [5.0]),
        ([1.0, 2.0**52], [1.0, 2.0**52]),  # of two, neither is the usual one
        ([10.0, 2.0**52, 12.0], [10.0, 36.0, 12.0]),
        ([0.0, 10.0, 2.0**52, 12.0], [0.0, 10.0, 36.0, 12.0]),
        ([30.0, 1.0, 10.0], [30.0, 1.0, 10.0]),
        ([8.0, 8.0, 8.0, 8.0, 24.0], [8.0, 8.0, 8.0, 8.0, 32.0 / 3]),
        ([1.0] * 16 + [2.0**52], [1.0] * 16 + [3.0]),
    ],
)
def test_weights_count_for_three_times_the_median_and_a_quarter_of_all(
    weights: list[float], capped: list[float]
) -> None:
    assert capped_weights(weights, LIMITS) == pytest.approx(capped)


def test_capped_weights_are_within_the_limits_and_small_weights_stay() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        weights = [
            rng.choice([0.0, 1.0, rng.uniform(0.0, 100.0), 2.0 ** rng.uniform(-20, 52)])
            for _ in range(rng.randint(1, 12))
        ]
        limits = MemberLimits(max_weight_share=rng.choice([0.25, 0.3, 0.5, 1.0]))
        capped = capped_weights(weights, limits)
        given = [weight for weight in capped if weight > 0]
        cap = max(capped)
        assert capped == [min(weight, cap) for weight in weights]
        if len(given) * limits.max_weight_share > 1:
            assert cap <= limits.max_weight_share * math.fsum(given) * (1 + 1e-9)
        assert capped_weights(weights, limits) == capped


def test_a_group_within_the_limits_is_as_it_was() -> None:
    group = group_of(3, weights=[3.0, 4.0, 5.0])
    assert limited(group, LIMITS) == group


@pytest.mark.parametrize(
    ("weights", "members", "earned", "capped"),
    [
        ([10.0, 12.0, 14.0, 400.0], {0, 1, 2}, [], [10.0, 12.0, 14.0, 12.0]),  # a guest counts for the median
        ([10.0, 12.0, 400.0, 400.0], {0, 1, 2}, [], [10.0, 12.0, 36.0, 12.0]),
        ([10.0, 12.0, 14.0, 5.0], {0, 1, 2}, [], [10.0, 12.0, 14.0, 5.0]),
        ([10.0, 400.0, 400.0, 400.0, 400.0], {0}, [], [10.0] * 5),  # however many guests there are
        ([10.0] * 20 + [400.0], set(range(21)), [0.0] * 20 + [50.0], [10.0] * 20 + [50.0]),
        ([10.0] * 20 + [40.0], set(range(21)), [0.0] * 20 + [500.0], [10.0] * 20 + [40.0]),
        ([10.0] * 20 + [2.0**52], set(range(21)), [0.0] * 20 + [2.0**52], [10.0] * 20 + [100.0]),  # a third
        ([10.0] * 20 + [400.0] * 2, set(range(22)), [0.0] * 20 + [2.0**52] * 2, [10.0] * 20 + [50.0] * 2),
        ([10.0] * 3 + [400.0], set(range(4)), [0.0] * 3 + [2.0**52], [10.0] * 3 + [30.0]),
        ([10.0] * 20 + [400.0], set(range(20)), [0.0] * 21, [10.0] * 21),
        ([0.0, 12.0, 2.0**52], {0, 1}, [], [0.0, 12.0, 12.0]),  # one that gives nothing says nothing
    ],
)
def test_guests_count_for_the_median_of_members_and_members_for_what_they_have_shown(
    weights: list[float], members: set[int], earned: list[float], capped: list[float]
) -> None:
    assert capped_weights(weights, OPEN_LIMITS, members, earned) == capped


NAMES = [PeerId(f"peer {number:02}") for number in range(81)]


def group_with(weights: Sequence[float], names: Sequence[PeerId] = NAMES) -> Group:
    group = group_of(len(weights), weights=list(weights))
    members = [msgspec.structs.replace(one, peer_id=name) for one, name in zip(group.members, names, strict=False)]
    return msgspec.structs.replace(group, members=members, leader=members[0].peer_id)


def play(roster: Roster, weights: Sequence[float], num_rounds: int) -> tuple[Roster, list[float]]:
    """Rounds with these given weights; returns the weight of the last peer in each."""
    counted = []
    for _ in range(num_rounds):
        group = limited(group_with(weights), OPEN_LIMITS, roster)
        roster = roster.after(Attendance.of(group.manifest(b"digest")))
        counted.append(group.members[-1].weight)
    return roster, counted


def test_words_buy_a_stranger_no_weight() -> None:
    roster, _ = play(Roster(), [10.0] * 3, 20)
    roster, counted = play(roster, [10.0, 10.0, 10.0, 2.0**52], QUALIFYING)
    assert counted == [10.0] * QUALIFYING, "as long as it is a guest"
    roster, counted = play(roster, [10.0, 10.0, 10.0, 2.0**52], 3)
    assert counted == [30.0] * 3


def test_a_fast_peer_counts_for_more_after_some_dozens_of_rounds() -> None:
    """The figures are those of docs/adr/0045."""
    slow = [10.0] * 80
    roster, _ = play(Roster(), slow, 5)
    _, counted = play(roster, [*slow, 400.0], 45)
    assert counted[0] == 10.0
    assert counted[QUALIFYING] == 30.0
    assert counted == sorted(counted)
    assert next(number for number, weight in enumerate(counted, 1) if weight > 30.0) == 14
    assert next(number for number, weight in enumerate(counted, 1) if weight == 400.0) == 41


def test_those_that_earn_weight_can_at_most_cancel_the_others() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        weights = [2.0 ** rng.uniform(0, 40) for _ in range(rng.randint(3, 12))]
        earned = [rng.choice([0.0, 2.0 ** rng.uniform(0, 52)]) for _ in weights]
        plain = capped_weights(weights, OPEN_LIMITS)
        counted = capped_weights(weights, OPEN_LIMITS, None, earned)
        above = {rank for rank in range(len(weights)) if counted[rank] > plain[rank]}
        assert all(plain[rank] <= counted[rank] <= max(plain[rank], earned[rank]) for rank in range(len(weights)))
        others = math.fsum(counted[rank] for rank in range(len(weights)) if rank not in above)
        least = math.fsum(plain[rank] for rank in above)
        assert math.fsum(counted[rank] for rank in above) <= max(others / CLIP_RATIO, 0) + least


def test_a_fast_founder_counts_for_three_times_the_median_at_first() -> None:
    _, counted = play(Roster(), [10.0, 10.0, 10.0, 400.0], 2)
    assert counted == [30.0, 30.0]


def test_a_peer_that_is_at_fault_or_leaves_loses_its_earned_weight() -> None:
    member = Standing(QUALIFYING, is_member=True, contributed=4000.0)
    roster = Roster({NAMES[3]: member} | {one: Standing(QUALIFYING, is_member=True) for one in NAMES[:3]})
    assert roster.earned(NAMES[3]) == 400.0
    accused = Attendance(NAMES[0], dict.fromkeys(NAMES[:4], True), (), (), {NAMES[3]: NAMES[:2]})
    assert roster.after(accused).standings[NAMES[3]].contributed == 0.0
    guest = msgspec.structs.replace(member, is_member=False)
    assert Roster({NAMES[3]: guest}).earned(NAMES[3]) == 0.0
    assert Roster().earned(NAMES[3]) == 0.0


def test_without_a_roster_all_contributors_are_members() -> None:
    group = group_with([10.0, 12.0, 400.0, 11.0])
    for roster in (None, Roster(), Roster({PeerId("elsewhere"): Standing(QUALIFYING, is_member=True)})):
        assert [one.weight for one in limited(group, OPEN_LIMITS, roster).members] == [10.0, 12.0, 34.5, 11.0]


@pytest.mark.parametrize(
    ("norms", "weights", "members", "scales"),
    [
        ([1.0, 1.5, 2.0], [8.0] * 3, None, [1.0] * 3),
        ([1.0, 1.0, 4.0], [8.0] * 3, None, [1.0, 1.0, 0.5]),
        ([1.0, 1.0, 10.0, 10.0, 1.0], [8.0] * 5, None, [1.0, 1.0, 0.2, 0.2, 1.0]),
        ([1.0, 100.0], [8.0] * 2, None, [1.0, 1.0]),  # of two, neither is the usual one
        ([1.0, 100.0, 1.0], [8.0, 8.0, 0.0], None, [1.0, 1.0, 1.0]),
        ([0.0, 0.0, 1.0], [8.0] * 3, None, [1.0] * 3),
        ([1.0, 100.0, 100.0, 100.0, 1.0], [8.0] * 5, {0, 4}, [1.0, 0.02, 0.02, 0.02, 1.0]),  # members say what is usual
        ([1.0, 0.01, 0.01, 0.01, 1.0], [8.0] * 5, {0, 4}, [1.0] * 5),  # and guests cannot have them clipped
        ([1.0, 1.0, 4.0], [16.0, 16.0, 4.0], None, [1.0] * 3),  # a small batch is noisier
    ],
)
def test_values_count_for_twice_the_usual_norm_at_most(
    norms: list[float], weights: list[float], members: set[int] | None, scales: list[float]
) -> None:
    assert clipping_scales(norms, weights, LIMITS, members) == scales


def test_local_steps_may_be_as_long_as_they_are_many() -> None:
    local = MemberLimits(norm_grows=True)
    assert clipping_scales([20.0, 1.0, 1.0], [10.0, 1.0, 1.0], local) == [1.0] * 3
    assert clipping_scales([40.0, 1.0, 1.0], [10.0, 1.0, 1.0], local) == [0.5, 1.0, 1.0]


def test_a_group_has_the_scales_of_its_members_and_its_manifest_names_them() -> None:
    group = group_with([8.0] * 4)
    norms = [1.0, 1.0, 8.0, 1.0]
    members = [
        msgspec.structs.replace(one, norm=norm, scale=0.1) for one, norm in zip(group.members, norms, strict=True)
    ]
    group = msgspec.structs.replace(group, members=members)
    clipped = limited(group, LIMITS, clips=True)
    assert [one.scale for one in clipped.members] == [1.0, 1.0, 0.25, 1.0], "whatever scale they came with"
    manifest = clipped.manifest(b"digest")
    assert manifest.clipped == [NAMES[2]]
    assert manifest.weights == [8.0] * 4, "it is clipped, and weighs what it has weighed"
    plain = limited(group, LIMITS)
    assert [one.scale for one in plain.members] == [1.0] * 4
    assert plain.manifest(b"digest").clipped == []
    assert Attendance.of(manifest) == Attendance.of(plain.manifest(b"digest")), "to the roster it is no fault"


def test_values_beyond_what_their_member_has_said_are_not_counted() -> None:
    group = group_with([8.0] * 4)
    said, measured = [1.0, 1.0, 8.0, 1.0], [1.0, 1.09, 8.0, 1.2]
    members = [msgspec.structs.replace(one, norm=norm) for one, norm in zip(group.members, said, strict=True)]
    group = limited(msgspec.structs.replace(group, members=members), LIMITS, clips=True)
    norms = counted_norms(group, measured)
    assert norms == [1.0, 1.09, 2.0, math.inf]
    assert outsized(norms, [8.0] * 4, LIMITS) == {3}


def saying(weights: Sequence[float], norms: Sequence[float]) -> Group:
    """A group in which each member has said these."""
    group = group_with(weights)
    members = [msgspec.structs.replace(one, norm=norm) for one, norm in zip(group.members, norms, strict=True)]
    return msgspec.structs.replace(group, members=members)


@pytest.mark.parametrize("weight", [5e-324, 1e-300, 1.0])
@pytest.mark.parametrize("norm", [0.0, 5e-324, 1.0, 2.0**160])
def test_no_words_of_one_member_break_the_limits_of_all(weight: float, norm: float) -> None:
    group = saying([64.0, 64.0, weight], [1.0, 1.0, norm])
    for limits in (LIMITS, OPEN_LIMITS, MemberLimits(norm_grows=True)):
        counted = limited(group, limits, clips=True).members
        assert [one.weight for one in counted] == [64.0, 64.0, weight]
        assert [one.scale for one in counted[:2]] == [1.0, 1.0]
        assert 0 < counted[2].scale <= 1
        assert outsized([1.0, 1.0, norm], [one.weight for one in counted], limits) <= {2}


def test_of_two_members_of_the_roster_none_says_what_is_usual() -> None:
    group = saying([64.0, 2.0**52, 64.0, 64.0], [1.0, 2.0**100, 1.0, 1.0])
    roster = Roster({one.peer_id: Standing(is_member=True) for one in group.members[:2]})
    counted = limited(group, OPEN_LIMITS, roster, clips=True)
    weights = [one.weight for one in counted.members]
    assert weights == [64.0, 192.0, 64.0, 64.0]
    assert counted.members[1].norm * counted.members[1].scale == pytest.approx(CLIP_RATIO)
    sent = counted_norms(counted, [1.0, 2.0**120, 1.0, 1.0], trusted(group, roster))
    assert outsized(sent, weights, OPEN_LIMITS, trusted(group, roster)) == {1}


def test_guests_do_not_say_how_long_local_steps_may_be() -> None:
    weights, norms = [10.0] * 3 + [1e-9] * 5 + [10.0], [1.0] * 8 + [1e6]
    scales = clipping_scales(norms, weights, MemberLimits(norm_grows=True), {0, 1, 2})
    assert scales[-1] == pytest.approx(CLIP_RATIO / 1e6)


def test_a_norm_of_next_to_nothing_may_be_said_wrongly() -> None:
    assert counted_norms(saying([1.0] * 3, [1.0, 1.0, 0.0]), [1.0, 1.0, 1e-23]) == [1.0, 1.0, 1e-23]


def test_values_that_are_not_finite_are_left_out_and_no_others() -> None:
    assert outsized([1.0, 1.2, 1e30, 0.9], [4.0] * 4, LIMITS) == set()
    assert outsized([1.0, math.inf, 1.0], [4.0] * 3, LIMITS) == {1}
    assert outsized([1.0, math.inf, 1.0], [4.0, 0.0, 4.0], LIMITS) == set(), "it has given no values"


BEFORE = [None, 0.5]
"""In a round of values, and in a later round of a grid."""


@pytest.mark.parametrize("before", BEFORE)
def test_nobody_is_judged_where_there_is_no_majority_to_judge_by(before: float | None) -> None:
    assert outsized([1.0, math.inf], [1.0, 1.0], LIMITS, before=before) == set()
    assert outsized([0.0, 0.0, 1.0], [1.0] * 3, LIMITS, before=before) == set()
    assert outsized([math.inf, math.inf, 1.0], [1.0] * 3, LIMITS, before=before) == set()


# in the later rounds of a grid


def test_a_mean_over_ten_times_the_median_is_too_large() -> None:
    assert outsized([1.0, 1.2, 10.0, 0.9], [4.0] * 4, LIMITS, before=0.0) == set()
    assert outsized([1.0, 1.2, 12.0, 0.9], [4.0] * 4, LIMITS, before=0.0) == {2}
    assert outsized([1.0, math.inf, 1.0], [4.0] * 3, LIMITS, before=0.0) == {1}


def test_one_sample_beside_large_batches_is_not_too_large() -> None:
    """Its norm is that of noise: up to the root of the others' batch size larger."""
    assert outsized([1.0, 1.0, math.sqrt(1000.0)], [1000.0, 1000.0, 1.0], LIMITS, before=0.0) == set()
    assert outsized([1.0, 1.0, 400.0], [1000.0, 1000.0, 1.0], LIMITS, before=0.0) == {2}


def test_a_member_whose_values_never_came_says_nothing_about_those_of_others() -> None:
    assert outsized([50.0, 0.0, 2.5], [1.0] * 3, LIMITS, before=0.0) == set(), "two are left: neither has a majority"
    assert outsized([50.0, 0.0, 2.5, 2.5], [1.0] * 4, LIMITS, before=0.0) == {0}


def test_means_that_cancelled_are_compared_with_what_went_into_them() -> None:
    norms, weights = [0.01, 1.0, 0.01, 11.0], [1.0] * 4
    assert outsized(norms, weights, LIMITS, before=0.0) == {3}
    assert outsized([0.01, 1.0, 0.01], weights[:3], LIMITS, before=0.0) == {1}
    assert outsized(norms, weights, LIMITS, before=1.0) == {3}
    assert outsized(norms[:3], weights[:3], LIMITS, before=1.0) == set()
    assert outsized([math.inf, 1.0, 0.01], weights[:3], LIMITS, before=1.0) == {0}
    assert usual_norm([0.01, math.inf, 3.0, 0.0], [1.0, 0.0, 1.0, 1.0]) == pytest.approx(1.505)
    assert usual_norm([0.0], [1.0]) == 0.0


def test_norms_are_compared_with_those_before_where_means_may_cancel() -> None:
    norms = [0.01, 0.2, 0.0001, 100.0]
    assert outsized(norms, [1.0] * 4, LIMITS, before=0.0) == {3}
    assert outsized(norms, [1.0] * 4, LIMITS, before=0.5) == {3}
    assert outsized([math.inf, math.inf, 1.0], [1.0] * 3, LIMITS, before=0.5) == set(), "most have nothing to compare"


@pytest.mark.parametrize(
    "fields",
    [{"max_weight_ratio": 0.5}, {"max_weight_ratio": math.nan}, {"max_weight_share": 0.0}, {"max_weight_share": 2.0}],
)
def test_limits_that_make_no_sense_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="for example"):
        MemberLimits(**fields)


def test_a_peer_over_the_limits_is_told_what_does_not_count_and_why() -> None:
    group = saying([32.0, 32.0, 32.0, 512.0], [1.0, 4.0, 1.0, 1.0])
    plain, large_values, _, gpu = limited(group, OPEN_LIMITS, clips=True).members
    assert what_does_not_count(32.0, plain, OPEN_LIMITS) == ""
    assert what_does_not_count(512.0, gpu, OPEN_LIMITS) == (
        "81.2% of this peer's samples do not count in this round: it brings 512, which count for 96, as the others "
        "bring fewer. A peer counts for at most 3 times the median, and a new one for the median; with more rounds "
        "that may rise; see docs/explanation/rounds.md"
    )
    assert what_does_not_count(32.0, large_values, OPEN_LIMITS) == (
        "the values of this peer are more than 2 times as large as is usual in this round, so they are multiplied by "
        "0.5; see docs/explanation/rounds.md"
    )
    assert "or 25% of the group, and a new one" in what_does_not_count(512.0, gpu, LIMITS)
