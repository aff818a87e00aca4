"""The roster follows from the manifests alone, and nobody moves it by what it says about itself or another peer."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.averaging.roster import (
    MAX_FROZEN,
    MAX_HALVINGS,
    MAX_MISSED,
    MEMORY,
    QUALIFYING,
    Attendance,
    Roster,
    judged,
)
from manyhands.base.identity import PeerId

A, B, C, D, E, F, G = (PeerId(name) for name in "ABCDEFG")


def attendance(
    *group: PeerId,
    leader: PeerId | None = None,
    attempt: int = 0,
    accused: dict[PeerId, Collection[PeerId]] | None = None,
    is_late: bool = False,
) -> Attendance:
    return Attendance(leader or group[0], attempt, dict.fromkeys(group, True), accused or {}, is_late)


def founded(*founders: PeerId) -> Roster:
    return Roster().after(attendance(*founders))


def after_rounds(roster: Roster, number: int, *group: PeerId) -> Roster:
    for _ in range(number):
        roster = roster.after(attendance(*group))
    return roster


def test_the_contributors_of_the_first_round_are_its_founders() -> None:
    assert Roster().members == frozenset()
    assert founded(A, B).members == {A, B}


def test_a_guest_is_a_member_after_three_complete_rounds() -> None:
    roster = after_rounds(founded(A, B), QUALIFYING - 1, A, B, C)
    assert roster.members == {A, B}
    assert roster.after(attendance(A, B, C)).members == {A, B, C}


def test_a_miss_costs_a_guest_nothing_but_a_fault_costs_it_all() -> None:
    roster = after_rounds(founded(A, B, D), QUALIFYING - 1, A, B, C, D)
    assert roster.after(attendance(A, B, D)).after(attendance(A, B, C, D)).members == {A, B, C, D}
    faulty = roster.after(attendance(A, B, C, D, accused={C: [A, B]}))
    assert faulty.standings[C].complete == 0
    assert not faulty.standings[C].is_member


def test_a_member_leaves_after_it_has_missed_some_rounds_in_a_row_and_is_remembered() -> None:
    roster = after_rounds(founded(A, B, C), MAX_MISSED, A, B)
    assert roster.members == {A, B, C}
    roster = roster.after(attendance(A, B))
    assert roster.members == {A, B}
    assert roster.former == (C,)
    assert roster.after(attendance(A, B, C)).former == (), "it is here again, as a guest"


def test_two_accusers_demote_a_member_and_one_does_not() -> None:
    roster = founded(A, B, C, D)
    assert roster.after(attendance(A, B, C, D, accused={D: [A, B]})).members == {A, B, C}
    one = roster.after(attendance(A, B, C, D, accused={D: [A]}))
    assert one.members == {A, B, C, D}
    assert judged(attendance(A, B, C, D, accused={D: [A]})).complete == {B, C}


def test_a_member_that_alone_accuses_several_is_the_one_at_fault() -> None:
    roster = founded(A, B, C, D).after(attendance(A, B, C, D, accused={B: [A], C: [A]}))
    assert roster.members == {B, C, D}


def test_no_round_demotes_more_than_a_third_of_the_members() -> None:
    roster = founded(A, B, C, D, E, F, G)
    many = {C: [A, B], D: [A, B], E: [A, B]}
    assert roster.after(attendance(A, B, C, D, E, F, G, accused=many)).members == {A, B, E, F, G}


def test_a_leader_that_fails_is_a_guest_and_the_next_one_led() -> None:
    roster = founded(A, B, C, D)
    first, second, *_ = roster.leaders()
    others = [peer_id for peer_id in (A, B, C, D) if peer_id != first]
    later = roster.after(attendance(*others, leader=second, attempt=1))
    assert first not in later.members
    assert later.leaders()[-1] == first, "after all members"


def test_each_member_leads_in_turn() -> None:
    roster, led = founded(A, B, C), []
    for _ in range(6):
        leader = roster.leaders()[0]
        led.append(leader)
        roster = roster.after(attendance(A, B, C, leader=leader))
    assert led[:3] == led[3:]
    assert set(led) == {A, B, C}


def test_strangers_lead_last_and_without_members_the_lowest_id_does() -> None:
    assert founded(C).after(attendance(C, B)).leaders([A]) == [C, B, A]
    assert Roster().leaders([B, A]) == [A, B]


def test_a_round_without_most_members_changes_no_standing_until_it_lasts() -> None:
    roster = founded(A, B, C, D)
    alone = after_rounds(roster, MAX_FROZEN - 1, A, B)
    assert alone.standings == roster.standings
    again = alone.after(attendance(A, B))
    assert again.members == {A, B}
    assert set(again.former) == {C, D}


def test_after_a_split_the_smaller_part_is_outvoted_on_both_sides() -> None:
    whole = founded(A, B, C, D, E)
    most, few = after_rounds(whole, 40, A, B, C), after_rounds(whole, 40, D, E)
    at = dict.fromkeys((A, B, C), "most") | dict.fromkeys((D, E), "few")
    for own, theirs in ((most, few), (few, most)):
        votes = [at[peer_id] for peer_id in own.electorate(theirs)]
        assert 2 * votes.count("most") > len(votes), own


def test_trouble_halves_the_patience_and_keeps_guests_out() -> None:
    roster = founded(A, B, C, D)
    assert roster.patience() == 1.0
    for number in range(1, 6):
        roster = roster.after(attendance(A, B, C, D, is_late=True))
        assert roster.patience() == 0.5 ** min(number, MAX_HALVINGS)
    roster = after_rounds(roster, QUALIFYING, A, B, C, D, E)
    assert not roster.is_calm
    assert roster.members == {A, B, C, D}
    roster = after_rounds(roster, MEMORY, A, B, C, D, E)
    assert roster.patience() == 1.0
    assert roster.members == {A, B, C, D, E}


# whatever happens

PEERS = [PeerId(f"peer {number}") for number in range(7)]
LIAR = PEERS[0]


@st.composite
def attendances(draw: st.DrawFn) -> Attendance:
    group = draw(st.lists(st.sampled_from(PEERS), min_size=1, unique=True))
    accusers = st.lists(st.sampled_from(group), max_size=3, unique=True)
    accused = draw(st.dictionaries(st.sampled_from(group), accusers, max_size=3))
    hosts = {peer_id: draw(st.booleans()) for peer_id in group}
    return Attendance(draw(st.sampled_from(group)), draw(st.integers(0, 3)), hosts, accused, draw(st.booleans()))


@given(st.lists(attendances(), max_size=40))
def test_every_roster_can_be_led_counts_to_its_limits_and_is_the_same_for_all(rounds: list[Attendance]) -> None:
    one, other = Roster(), Roster()
    for said in rounds:
        before = one.members
        one, other = one.after(said), other.after(said)
        assert one == other
        assert set(one.leaders(PEERS)) >= {peer_id for peer_id in PEERS if peer_id not in one.standings}
        assert len(one.troubled) <= MEMORY
        assert not set(one.former) & one.members
        complete = judged(said).complete
        for peer_id in one.members - before:
            assert peer_id in complete, "nobody becomes a member in a round in which it did not do its part"


@given(st.lists(attendances(), max_size=20), attendances())
def test_no_peer_alone_lowers_another_ones_standing(rounds: list[Attendance], said: Attendance) -> None:
    """Of two equal rounds, one has an accusation more, by one peer: no other peer is worse off."""
    roster = Roster()
    for earlier in rounds:
        roster = roster.after(earlier)
    group = {**said.group, LIAR: True}
    honest = Attendance(LIAR, 0, group)
    for accused in group.keys() - {LIAR}:
        lie = Attendance(LIAR, 0, group, {accused: [LIAR]})
        told, silent = roster.after(lie), roster.after(honest)
        before, now = roster.standings.get(accused), told.standings.get(accused)
        if before is not None and now is not None and roster.members:
            assert now.is_member or not before.is_member
            assert now.complete >= before.complete
        assert LIAR not in told.members or LIAR in silent.members


@pytest.mark.parametrize("num_members", [1, 2, 3, 5, 30])
def test_a_run_of_which_only_guests_are_left_goes_on(num_members: int) -> None:
    members = [PeerId(f"member {number}") for number in range(num_members)]
    roster = after_rounds(founded(*members), 2, *members, A, B)
    for _ in range(MAX_FROZEN):
        leader = next(peer_id for peer_id in roster.leaders() if peer_id in (A, B))
        roster = roster.after(attendance(A, B, leader=leader, attempt=roster.leaders().index(leader)))
    assert roster.members == {A, B}
