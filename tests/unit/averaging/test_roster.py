"""The roster follows from the manifests alone, and nobody moves it by what it says about itself or another peer."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.averaging.messages import Group, Late, Member, Position, RoundManifest, SpanResult
from manyhands.averaging.roster import (
    GOOD_ROUNDS,
    MAX_FAULTS,
    MAX_FORMER,
    MAX_FROZEN,
    MAX_MISSED,
    MAX_STANDINGS,
    MEMORY,
    QUALIFYING,
    Attendance,
    Roster,
    Standing,
    Trouble,
    check_roster,
    lineage_of,
    next_place,
)
from manyhands.base.identity import PeerId

A, B, C, D, E, F, G = (PeerId(name) for name in "ABCDEFG")
AT = Position(3, b"lineage")


def attendance(
    *group: PeerId,
    leader: PeerId | None = None,
    accused: dict[PeerId, Collection[PeerId]] | None = None,
    late: int = Late.NOBODY,
) -> Attendance:
    return Attendance(leader or group[0], dict.fromkeys(group, True), (), (), accused or {}, late)


def manifest_of(
    *group: PeerId,
    leader: PeerId | None = None,
    idle: Collection[PeerId] = (),
    left_out: Collection[PeerId] = (),
    clients: Collection[PeerId] = (),
    absent: dict[PeerId, Collection[PeerId]] | None = None,
    late: int = Late.NOBODY,
) -> RoundManifest:
    """A committed round; ``absent`` says who is absent from the part of a reducer."""
    members = [Member(peer_id, [], peer_id in clients, 0.0 if peer_id in idle else 1.0) for peer_id in group]
    formed = Group(b"group", leader or group[0], AT, members, late=late)
    parts = [
        SpanResult(number, number + 1, group.index(reducer), sorted(map(group.index, missing)))
        for number, (reducer, missing) in enumerate((absent or {}).items())
    ]
    return formed.manifest(b"digest", parts, [rank for rank, peer_id in enumerate(group) if peer_id not in left_out])


def founded(*founders: PeerId) -> Roster:
    return Roster().after(attendance(*founders))


def after_rounds(roster: Roster, number: int, *group: PeerId) -> Roster:
    for _ in range(number):
        roster = roster.after(attendance(*group))
    return roster


def test_all_that_give_a_weight_in_the_first_round_are_founders_whoever_accuses_them() -> None:
    assert Roster().members == frozenset()
    assert founded(A, B).members == {A, B}
    first = manifest_of(A, B, C, D, E, idle=[E], left_out=[C], absent={A: [B, D], B: [D]})
    assert Roster().after(Attendance.of(first)).members == {A, B, C, D}


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
    two = roster.after(attendance(A, B, C, D, accused={D: [A, B]}))
    assert two.members == {A, B, C}
    assert two.voters == {A, B, C, D}
    one = roster.after(attendance(A, B, C, D, accused={D: [A]}))
    assert one.members == {A, B, C, D}
    assert [one.standings[peer_id].complete for peer_id in (A, B, C, D)] == [3, 4, 4, 3]
    assert one.standings[D].doubted_by == A


def test_a_second_accuser_in_a_later_round_demotes_a_member() -> None:
    doubted = founded(A, B, C, D).after(attendance(A, B, C, D, accused={D: [A]}))
    assert doubted.after(attendance(A, B, C, D, accused={D: [A]})).members == {A, B, C, D}, "the same one again"
    later = after_rounds(doubted, QUALIFYING - 1, A, B, C, D).after(attendance(A, B, C, D, accused={D: [B]}))
    assert later.members == {A, B, C}
    assert later.standings[B].complete > doubted.standings[B].complete, "it is innocent"
    forgotten = after_rounds(doubted, QUALIFYING, A, B, C, D)
    assert forgotten.standings[D].doubted_by == ""
    assert forgotten.after(attendance(A, B, C, D, accused={D: [B]})).members == {A, B, C, D}


def test_guests_accuse_nobody_and_cost_no_member_anything() -> None:
    """Identities are free: two strangers could have each member demoted else, in turns."""
    roster = founded(A, B, C, D)
    lied = roster.after(attendance(A, B, C, D, E, F, accused={A: [E, F], B: [E]}))
    assert lied == roster.after(attendance(A, B, C, D, E, F))
    silent = roster.after(attendance(A, B, C, D, E, F, accused={E: [A], F: [A]}))
    assert silent.members == {A, B, C, D}
    assert silent.standings[A].complete == roster.standings[A].complete + 1
    assert [silent.standings[peer_id].complete for peer_id in (E, F)] == [0, 0]
    assert [silent.standings[peer_id].doubted_by for peer_id in (E, F)] == [A, A]


def test_a_leader_beside_which_several_members_die_or_lie_at_once_is_not_at_fault() -> None:
    roster, everybody = founded(A, B, C, D, E), (A, B, C, D, E)
    one = roster.after(attendance(*everybody, leader=A, accused={D: [A], E: [A]}))
    assert one.members == set(everybody)
    assert [one.standings[peer_id].doubted_by for peer_id in everybody] == ["", "", "", A, A]
    assert one.after(attendance(*everybody, leader=B, accused={D: [B], E: [B]})).members == {A, B, C}, "they lie again"


def test_more_than_half_of_the_voters_are_members_and_the_first_that_was_demoted_is_one_again() -> None:
    roster, everybody = founded(A, B, C, D, E, F, G), (A, B, C, D, E, F, G)
    roster = roster.after(attendance(*everybody, accused={G: [A, B], F: [A, B]}))
    assert roster.members == {A, B, C, D, E}
    roster = roster.after(attendance(*everybody, accused={D: [A, B], E: [A, B]}))
    assert roster.members == {A, B, C, F}
    roster = roster.after(attendance(*everybody, accused={F: [A, B]}))
    assert roster.members == {A, B, C, G}
    assert roster.voters == set(everybody)
    assert founded(A, B).after(attendance(A, B, leader=B, late=Late.MEMBERS)).members == {A, B}, "a half is too many"


def test_a_member_that_is_one_again_leads_last_if_it_had_its_turn_when_it_was_demoted() -> None:
    roster, everybody = founded(A, B, C, D), (A, B, C, D)
    order = roster.leaders()
    first, due = order[0], order[-1]
    rest = [one for one in order if one not in (first, due)]
    roster = roster.after(attendance(*everybody, leader=rest[0], late=Late.MEMBERS))
    roster = roster.after(attendance(*everybody, leader=rest[1], accused={due: rest}))
    assert roster.members == {first, *rest}
    assert roster.standings[first].led == roster.round, "it leads after those that did not just lead"
    roster = roster.after(attendance(*everybody, leader=rest[0], accused={first: rest}))
    assert roster.members == {due, *rest}
    assert roster.leaders()[0] == due, "its turn had not come"


def test_demoted_voters_are_hurried_only_where_the_others_are_enough_for_a_result() -> None:
    """A is alone with C, as B was switched off: without C there is no result, however slow its line is."""
    roster = founded(A, B, C).after(attendance(A, B, C, G, accused={C: [A, B], G: [A, B]}))
    assert roster.members == {A, B}
    assert roster.hurried([A, B, C, G]) == {C, G}
    assert roster.hurried([A, C, G]) == {G}
    assert roster.hurried([C, G]) == {G}
    assert roster.hurried([G]) == set(), "nobody here votes"
    assert roster.hurried([A, F]) == {F}, "after trouble all guests"


def test_later_faults_of_a_demoted_member_do_not_change_when_it_is_one_again() -> None:
    roster, everybody = founded(A, B, C, D, E), (A, B, C, D, E)
    for victim in (C, D, C, C):
        roster = roster.after(attendance(*everybody, accused={victim: [A, B]}))
    assert roster.members == {A, B, E}
    assert roster.standings[C].fault_round > roster.standings[D].fault_round
    assert roster.after(attendance(*everybody, accused={E: [A, B]})).members == {A, B, C}


def test_a_demoted_member_leads_last_is_not_barred_and_votes_until_it_leaves() -> None:
    roster = founded(A, B, C, D)
    for _ in range(3):
        roster = roster.after(attendance(A, B, C, D, accused={D: [A, B]}))
    assert roster.barred_rounds(D) == 0
    assert roster.leaders()[-1] == D
    roster = after_rounds(roster, MAX_MISSED, A, B, C)
    assert roster.voters == {A, B, C, D}
    roster = roster.after(attendance(A, B, C))
    assert roster.voters == {A, B, C}
    assert roster.former == (D,)


def test_a_demoted_member_is_one_again_after_three_complete_rounds_once_it_is_calm() -> None:
    roster, everybody = founded(A, B, C, D), (A, B, C, D)
    roster = after_rounds(roster.after(attendance(*everybody, accused={D: [A, B]})), QUALIFYING, *everybody)
    assert roster.members == set(everybody)
    assert not roster.standings[D].demoted
    roster = roster.after(attendance(*everybody, accused={D: [A, B]}))
    assert not roster.is_calm
    assert after_rounds(roster, MEMORY - QUALIFYING - 2, *everybody).members == {A, B, C}
    assert after_rounds(roster, MEMORY, *everybody).members == set(everybody)


@pytest.mark.parametrize("late", Late)
@pytest.mark.parametrize("is_here", [False, True])
def test_a_skipped_leader_has_had_its_turn_and_becomes_a_guest_if_it_was_late(late: Late, *, is_here: bool) -> None:
    roster = founded(A, B, C, D)
    first, second, *_ = roster.leaders()
    group = [peer_id for peer_id in (A, B, C, D) if is_here or peer_id != first]
    later = roster.after(attendance(*group, leader=second, late=late))
    assert (first in later.members) == (late != Late.MEMBERS)
    assert later.leaders()[2 if first in later.members else 3] == first, "after those whose turn has yet to come"
    assert later.standings[first].missed == (0 if is_here else 1)
    assert later.trouble == (Trouble(late),)
    assert later.waits_for_guests == (late == Late.NOBODY)


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
    turns = {one: msgspec.structs.replace(standing, led=0) for one, standing in alone.standings.items()}
    assert turns == {one: msgspec.structs.replace(standing, led=0) for one, standing in roster.standings.items()}
    again = alone.after(attendance(A, B))
    assert again.members == {A, B}
    assert set(again.former) == {C, D}


def test_trouble_is_counted_and_keeps_guests_out() -> None:
    roster = founded(A, B, C, D)
    assert roster.num_troubled == 0
    for number in range(1, 3):
        leader = next(one for one in roster.leaders() if one != D)
        roster = roster.after(attendance(A, B, C, leader=leader, late=Late.MEMBERS))
        assert roster.num_troubled == number
    roster = after_rounds(roster, QUALIFYING, A, B, C, D, E)
    assert not roster.is_calm
    assert roster.members == {A, B, C, D}
    roster = after_rounds(roster, MEMORY, A, B, C, D, E)
    assert roster.num_troubled == 0
    assert roster.members == {A, B, C, D, E}


def test_a_guest_becomes_a_member_only_in_a_round_in_which_it_did_its_part() -> None:
    """It has long had enough complete rounds, as it was not calm; now that it is, a member accuses it."""
    roster = founded(A, B, C, D)
    for _ in range(2):
        leader = next(one for one in roster.leaders() if one != D)
        roster = roster.after(attendance(A, B, C, leader=leader, late=Late.MEMBERS))
    while not roster.after(said := attendance(A, B, C, D, E)).is_calm:
        roster = roster.after(said)
    assert roster.standings[E].complete >= QUALIFYING
    assert E not in roster.after(attendance(A, B, C, D, E, accused={E: [B]})).members
    assert E in roster.after(said).members


def test_a_leader_that_says_that_all_were_late_makes_no_trouble_if_all_are_there() -> None:
    roster = founded(A, B, C, D)
    for _ in range(3):
        roster = roster.after(attendance(A, B, C, D, leader=roster.leaders()[0], late=Late.MEMBERS))
    assert roster.num_troubled == 0
    assert not roster.waits_for_guests


def test_a_demotion_shortens_the_waits_for_guests_too() -> None:
    roster = founded(A, B, C, D).after(attendance(A, B, C, D, accused={D: [A, B]}))
    assert roster.num_troubled == 1
    assert not roster.waits_for_guests
    assert after_rounds(roster, MEMORY, A, B, C, D).waits_for_guests


def test_a_leader_that_is_passed_over_in_a_frozen_round_has_had_its_turn() -> None:
    """Of two members one does not lead: its waits become shorter, and the other one leads."""
    roster = founded(A, B)
    first = roster.leaders()[0]
    other = B if first == A else A
    roster = roster.after(attendance(other, leader=other, late=Late.MEMBERS))
    assert roster.frozen == 1
    assert roster.num_troubled == 1
    assert roster.standings[first].led == roster.standings[other].led == roster.round


# what a manifest says


def test_reducers_accuse_members_absent_from_their_parts_and_leaders_those_left_out() -> None:
    absent = {A: [C, D], B: [B, D], C: [C, F], D: [D]}
    said = Attendance.of(manifest_of(A, B, C, D, E, F, leader=B, left_out=[B, D], idle=[F], clients=[E], absent=absent))
    assert said.leader == B
    assert said.group == {A: True, B: True, C: True, D: True, E: False, F: True}
    assert (said.left_out, said.idle) == ({B, D}, {F})
    assert said.accused == {C: {A}, D: {B}}


def test_a_member_without_weight_is_neither_complete_nor_accused_and_a_stranger_gains_nothing() -> None:
    roster = founded(A, B, C, D)
    later = roster.after(Attendance.of(manifest_of(A, B, C, D, E, idle=[D, E], absent={A: [D, E], B: [D, E]})))
    assert later.members == {A, B, C, D}
    assert later.standings[D].complete == roster.standings[D].complete
    assert E not in later.standings


def test_a_leader_doubts_the_members_that_it_leaves_out_but_guests_may_vanish() -> None:
    roster = founded(A, B, C, D, E, F, G)
    group = (A, B, C, D, E, F, G)
    one = roster.after(Attendance.of(manifest_of(*group, left_out=[B])))
    assert one.members == set(group)
    assert one.standings[B].doubted_by == A
    guests = [PeerId("H"), PeerId("I"), PeerId("J")]
    vanished = roster.after(Attendance.of(manifest_of(*group, *guests, left_out=guests)))
    assert vanished.members == set(group)
    assert vanished.standings[A].complete == roster.standings[A].complete + 1


def test_a_step_alone_is_a_round_of_one() -> None:
    alone = Roster().after(Attendance.alone(A, can_lead=False))
    assert alone.members == {A}
    assert alone.leaders() == []
    assert founded(A).after(Attendance.alone(A, can_lead=True)).leaders() == [A]


# faults


def faulty(roster: Roster, times: int) -> Roster:
    for _ in range(times):
        roster = roster.after(attendance(A, B, C, G, accused={G: [A, B]}))
    return roster


@pytest.mark.parametrize(("times", "barred"), [(0, 0), (1, 0), (2, 3), (9, 3)])
def test_each_fault_after_the_first_bars_a_peer_from_some_rounds(times: int, barred: int) -> None:
    roster = faulty(founded(A, B, C), times)
    assert roster.barred_rounds(G) == barred
    assert (G in roster.leaders()) == (times == 1)
    later = after_rounds(roster, 2, A, B, C)
    assert later.barred_rounds(G) == max(0, barred - 2)
    assert roster.barred_rounds(PeerId("nobody")) == 0


@pytest.mark.parametrize("times", [1, 2, 3, 5])
def test_a_barred_peer_keeps_its_faults_until_it_is_no_longer_barred(times: int) -> None:
    roster = faulty(founded(A, B, C), times)
    num_rounds = max(MAX_MISSED, roster.barred_rounds(G) - 1)
    roster = after_rounds(roster, num_rounds, A, B, C)
    assert roster.standings[G].faults == min(times, MAX_FAULTS)
    assert G not in after_rounds(roster, 2, A, B, C).standings


def test_ten_good_rounds_take_one_fault_away() -> None:
    roster = faulty(founded(A, B, C), 2)
    roster = after_rounds(roster, GOOD_ROUNDS - 1, A, B, C, G)
    assert roster.standings[G].faults == 2
    roster = roster.after(attendance(A, B, C, G))
    assert (roster.standings[G].faults, roster.standings[G].complete) == (1, QUALIFYING)
    assert G in roster.members


def test_a_roster_that_is_founded_anew_has_the_old_faults() -> None:
    roster = founded(A, B, C, D, E, F).after(attendance(A, B, C, D, E, F, G, accused={F: [A, B], G: [A, B]}))
    roster = roster.after(attendance(A, B, C, D, E, G, accused={G: [A, B]}))
    roster = roster.after(attendance(A, B, C, D, E, G, accused={G: [A, B]}))
    roster = after_rounds(roster, MAX_FROZEN, A, F)
    assert roster.members == {A, F}
    assert [roster.standings[peer_id].faults for peer_id in (A, F)] == [0, 1]
    assert G not in roster.standings, "its time is over"


def test_a_roster_has_bounds_and_its_members_come_first() -> None:
    crowd = [PeerId(f"guest {number:04}") for number in range(MAX_STANDINGS)]
    roster = founded(A, B, C).after(attendance(A, B, C, *crowd))
    assert len(roster.standings) == MAX_STANDINGS
    assert roster.members == {A, B, C}
    later = roster.after(attendance(A, B, C, D))
    assert D in later.standings, "before those that were not here"
    check_roster(later)


# with a state


def test_the_digest_depends_on_the_values_alone() -> None:
    one = Roster({A: Standing(1), B: Standing(2)})
    assert one.digest() == Roster({B: Standing(2), A: Standing(1)}).digest()
    assert one.digest() != Roster({A: Standing(1), B: Standing(1)}).digest()
    assert lineage_of(b"seal", one) != lineage_of(b"another", one)


@pytest.mark.parametrize(
    "roster",
    [
        Roster({PeerId(f"{number}"): Standing() for number in range(MAX_STANDINGS + 1)}),
        Roster(trouble=(Trouble.NONE,) * (MEMORY + 1)),
        Roster(former=(A,) * (MAX_FORMER + 1)),
        Roster(frozen=MAX_FROZEN + 1),
        Roster({A: Standing(complete=GOOD_ROUNDS + 1)}),
        Roster({A: Standing(missed=MAX_MISSED + 2)}),
        Roster({A: Standing(faults=MAX_FAULTS + 1)}),
        Roster({A: Standing(cleared=QUALIFYING + 1)}),
        Roster({A: Standing(led=2)}, round=1),
        Roster({A: Standing(fault_round=2)}, round=1),
        Roster({A: Standing(demoted=2)}, round=1),
        Roster({A: Standing(is_member=True, demoted=1)}, round=1),
        Roster({A: Standing(complete=-1)}),
        Roster({A: Standing(contributed=2.0**53)}),
        Roster({A: Standing(contributed=float("nan"))}),
    ],
)
def test_a_roster_that_no_rounds_lead_to_is_refused(roster: Roster) -> None:
    with pytest.raises(ValueError, match="its roster has"):
        check_roster(roster)


def test_a_committed_round_leads_to_a_place_that_its_roster_is_part_of() -> None:
    roster, manifest = founded(A, B), manifest_of(A, B, C)
    position, after, seal = next_place(AT, roster, manifest)
    assert after == roster.after(Attendance.of(manifest))
    assert position == Position(AT.step + 1, lineage_of(seal, after))
    assert next_place(AT, founded(A, C), manifest)[2] == seal
    assert next_place(AT, founded(A, C), manifest)[0] != position
    assert next_place(Position(AT.step, b"another"), roster, manifest)[2] != seal


# whatever happens

PEERS = [PeerId(f"peer {number}") for number in range(7)]
LIAR = PEERS[0]


@st.composite
def manifests(draw: st.DrawFn) -> RoundManifest:
    group = draw(st.lists(st.sampled_from(PEERS), min_size=1, unique=True))
    some = st.lists(st.sampled_from(group), max_size=3, unique=True)
    return manifest_of(
        *group,
        leader=draw(st.sampled_from(group)),
        idle=draw(some),
        left_out=draw(some),
        clients=draw(some),
        absent=draw(st.dictionaries(st.sampled_from(group), some, max_size=3)),
        late=draw(st.sampled_from(Late)),
    )


def roster_after(rounds: list[RoundManifest]) -> Roster:
    roster = Roster()
    for manifest in rounds:
        roster = roster.after(Attendance.of(manifest))
    return roster


@given(st.lists(manifests(), max_size=40))
def test_every_roster_can_be_led_counts_to_its_limits_and_is_the_same_for_all(rounds: list[RoundManifest]) -> None:
    one, other = Roster(), Roster()
    for manifest in rounds:
        before, said = one, Attendance.of(manifest)
        one, other = one.after(said), other.after(said)
        assert one == other
        assert one.digest() == other.digest()
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=Roster) == one
        check_roster(one)
        assert set(one.leaders(PEERS)) >= {peer_id for peer_id in PEERS if peer_id not in one.standings}
        assert not set(one.former) & one.voters
        assert 2 * len(one.members) > len(one.voters) or not one.voters
        complete = before.judged(said).complete
        if not before.voters or (one.frozen == 0 and before.frozen == MAX_FROZEN - 1):
            continue  # it may be founded anew, whoever accuses its founders
        for peer_id in one.members - before.voters:
            assert peer_id in complete, "nobody becomes a member in a round in which it did not do its part"
        for peer_id, standing in one.standings.items():
            earlier = before.standings.get(peer_id, Standing())
            assert peer_id in complete or standing.complete <= earlier.complete
            most = earlier.contributed + said.weights.get(peer_id, 0.0) * (peer_id in complete)
            assert standing.contributed <= most, "nobody raises its own cap without a complete round"
            assert standing.faults >= earlier.faults or peer_id in complete


@given(st.lists(manifests(), max_size=20), manifests(), st.data())
def test_no_peer_alone_demotes_another_one(
    rounds: list[RoundManifest], said: RoundManifest, data: st.DataObject
) -> None:
    """Whatever it sends as a leader or as a reducer, unless it was doubted already by another one.

    The others follow no leader whose turn it is not, so it does not decide who leads, or who was skipped.
    """
    roster = roster_after(rounds)
    group = list(dict.fromkeys([*said.members, LIAR]))
    some = st.lists(st.sampled_from(group), unique=True)
    first = next(iter(roster.leaders()), LIAR)
    is_leader = first == LIAR and data.draw(st.booleans())
    leader = LIAR if is_leader else first
    lie = manifest_of(
        *dict.fromkeys([*group, leader]),
        leader=leader,
        left_out=data.draw(some) if is_leader else [],
        absent={LIAR: data.draw(some)},
        late=data.draw(st.sampled_from(Late)) if is_leader else Late.NOBODY,
    )
    told = roster.after(Attendance.of(lie))
    if told.round == 1 or told.frozen or roster.frozen == MAX_FROZEN - 1 or not roster.members:
        return
    for peer_id in roster.members - {LIAR}:
        before = roster.standings[peer_id]
        if peer_id not in group or before.doubted_by not in ("", LIAR):
            continue
        assert peer_id in told.members
        assert told.standings[peer_id].complete >= min(before.complete, QUALIFYING)
        assert told.standings[peer_id].faults <= before.faults


FEW = PEERS[:3]
MANY = [*PEERS, PeerId("peer 7")]


@given(st.data())
def test_three_of_eight_that_accuse_together_take_nobodys_vote_and_others_still_lead(data: st.DataObject) -> None:
    """Honest leaders leave out whom others accuse, too, so anybody may be accused by an honest one."""
    roster, since_honest = founded(*MANY), 0
    for _ in range(data.draw(st.integers(1, 30))):
        leader = roster.leaders()[0]
        some = st.lists(st.sampled_from(MANY), max_size=3, unique=True)
        absent = data.draw(some) if leader in FEW else []
        group = [peer_id for peer_id in MANY if peer_id == leader or peer_id not in absent]
        accusers = st.sampled_from([FEW, FEW[:2], [FEW[0], leader]])
        accused = {one: data.draw(accusers) for one in data.draw(some) if one in group}
        late = data.draw(st.sampled_from(Late)) if leader in FEW else Late.NOBODY
        roster = roster.after(attendance(*group, leader=leader, accused=accused, late=late))
        assert roster.voters >= set(MANY)
        since_honest = since_honest + 1 if leader in FEW else 0
        assert since_honest <= 3 * len(FEW), "each of them led before the turn of three honest ones came"


@pytest.mark.parametrize("num_members", [1, 2, 3, 5, 30])
def test_a_run_of_which_only_guests_are_left_goes_on(num_members: int) -> None:
    members = [PeerId(f"member {number}") for number in range(num_members)]
    roster = after_rounds(founded(*members), 2, *members, A, B)
    for _ in range(MAX_FROZEN):
        leader = next(peer_id for peer_id in roster.leaders() if peer_id in (A, B))
        roster = roster.after(attendance(A, B, leader=leader))
    assert roster.members == {A, B}
