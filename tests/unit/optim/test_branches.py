"""Which branch a peer believes in, by what the others say."""

from __future__ import annotations

import msgspec
import pytest

from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PeerRecord
from manyhands.averaging.roster import Roster, Standing
from manyhands.averaging.timing import DIAL_S, SHUN_S, STALL_S
from manyhands.base.identity import PeerId
from manyhands.optim.run.belief import (
    FOUNDING_ROUNDS,
    Belief,
    believed_by_a_newcomer,
    held_by_most,
    voter_of,
    voters_by_claims,
)
from manyhands.optim.run.branches import BranchChoice
from manyhands.optim.run.progress import Claim
from manyhands.optim.run.reached_networks import vote_from

ANN, BOB, CAROL, DAVE, EVE = (PeerId(name) for name in ("ann", "bob", "carol", "dave", "eve"))
LONG = FOUNDING_ROUNDS + 1  # a step at which the roster alone decides


def at(step: int, lineage: bytes = b"run", host: str = "192.168.0.1") -> PeerRecord:
    addresses = [f"/ip4/{host}/tcp/1"] if host else []
    position = Position(step, lineage + b" %d" % step if step else b"")
    return PeerRecord(position, not host, addresses, 30.0, samples_per_second=1.0, lineage_samples=8 * step)


HONEST = {ANN: at(10, host="45.2.1.1"), BOB: at(10, host="45.3.1.1")}
SYBILS = {PeerId(f"eve {number}"): at(60, b"eve", f"46.{number}.1.1") for number in range(20)}


def with_roster(*members: PeerId, former: tuple[PeerId, ...] = (), guests: tuple[PeerId, ...] = ()) -> Belief:
    belief = member_of(*members, own_id=DAVE)
    standings = {one: Standing(is_member=one not in guests) for one in (DAVE, *members, *guests)}
    belief.roster = lambda: Roster(standings, former=former)
    return belief


def test_peers_that_were_in_rounds_but_are_no_members_do_not_decide() -> None:
    """Four identities that have joined a round each say that the run is elsewhere."""
    eves = {PeerId(f"eve {number}"): at(60, b"eve", f"46.{number}.1.1") for number in range(4)}
    others = {ANN: at(LONG), BOB: at(LONG), **eves}
    assert with_roster(ANN, BOB, guests=tuple(eves)).judge(at(LONG), others).unbelieved == eves.keys()
    assert with_roster(ANN, BOB, *eves).judge(at(LONG), others).unbelieved == frozenset(), "as members"


def test_members_that_left_in_a_split_still_decide_where_the_run_is() -> None:
    others = {BOB: at(LONG, b"few"), **{one: at(LONG + 2) for one in (ANN, CAROL, EVE)}}
    assert with_roster(BOB).judge(at(LONG, b"few"), others).unbelieved == {ANN, CAROL, EVE}
    assert with_roster(BOB, former=(ANN, CAROL, EVE)).judge(at(LONG, b"few"), others).unbelieved == frozenset()


def test_a_run_that_was_begun_twice_becomes_one_in_its_first_rounds() -> None:
    """No member of one side is known on the other; the smaller side follows, or the lower one of two halves."""
    others = {BOB: at(10, b"few"), ANN: at(12), CAROL: at(12)}
    assert with_roster(BOB).judge(at(10, b"few"), others).unbelieved == frozenset()
    assert with_roster(BOB).judge(at(10, b"few"), {**others, EVE: at(10, b"few")}).unbelieved == {ANN, CAROL}
    own = at(LONG, b"few")
    assert with_roster(BOB).judge(own, {BOB: own, ANN: at(30), CAROL: at(30)}).unbelieved == {ANN, CAROL}, "too late"


def test_the_smaller_side_of_a_run_that_was_begun_twice_follows_though_it_gets_on_while_it_makes_sure() -> None:
    belief, others = with_roster(BOB), {ANN: at(3), CAROL: at(3), EVE: at(3)}
    assert belief.other_majority(at(8, b"few"), {BOB: at(8, b"few"), **others}, 0.0) is None
    own = at(LONG, b"few")
    assert belief.other_majority(own, {BOB: own, **others}, 0.9 * STALL_S) is None
    assert belief.other_majority(own, {BOB: own, **others}, STALL_S) == at(3).position


def test_a_peer_whose_members_are_gone_follows_its_initial_peers() -> None:
    belief = with_roster(ANN)
    belief.initial_peers = lambda: frozenset({BOB})
    assert belief.judge(at(LONG), {ANN: at(LONG), BOB: at(30)}).unbelieved == {BOB}, "a member is there"
    assert belief.judge(at(LONG), {BOB: at(30), **SYBILS}).unbelieved == SYBILS.keys()


def test_a_peer_whose_members_are_gone_does_not_follow_one_initial_peer_back_to_an_old_checkpoint() -> None:
    """Its own step counts as much as that of the initial peer; two of them outvote it."""
    belief, own, old = with_roster(ANN), at(30, b"own"), at(10, b"old")
    belief.initial_peers = lambda: frozenset({BOB})
    for now in (0.0, STALL_S, 2 * STALL_S):
        assert belief.other_majority(own, {BOB: old}, now) is None
    belief.initial_peers = lambda: frozenset({BOB, CAROL})
    assert belief.other_majority(own, {BOB: old, CAROL: old}, 3 * STALL_S) is None, "for a while"
    assert belief.other_majority(own, {BOB: old, CAROL: old}, 4 * STALL_S) == old.position


def test_a_run_that_was_begun_twice_is_told_in_one_line_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    own, choice = at(LONG, b"few"), BranchChoice(DAVE, at(LONG, b"few"), lambda peer_id: True)
    choice.belief = with_roster(BOB)
    for now in (0.0, DIAL_S, 2 * DIAL_S):
        choice.look(own, {BOB: own, ANN: at(30), CAROL: at(31)}, now)
    assert caplog.text.count("WARNING") == 1
    assert "2 peers, ann among them, claim that the run is at step 31" in caplog.text
    assert "restart the peers on this side" in caplog.text


def member_of(*members: PeerId, step: int = 10, own_id: PeerId = EVE) -> Belief:
    """A member of a roster with these others, if there are any."""
    belief = Belief(own_id)
    standings = {one: Standing(is_member=True) for one in (own_id, *members) if members}
    belief.roster = lambda: Roster(standings)
    for number in range(max(step - 5, 0), step + 1):
        belief.been_at.append(at(number).position)
    belief.has_stepped = True
    return belief


def test_one_that_is_ahead_alone_is_not_believed() -> None:
    belief = member_of(ANN, BOB)
    for step in (11, 60):
        others = {ANN: at(10), BOB: at(10), EVE: at(step, b"eve")}
        assert belief.judge(at(10), others).unbelieved == {EVE}
    assert member_of(ANN, BOB, EVE).judge(at(10), {ANN: at(10), BOB: at(10), EVE: at(11, b"eve")}).unbelieved == {EVE}


def test_a_peer_follows_the_majority_of_the_members() -> None:
    belief = member_of(ANN, BOB)
    assert belief.judge(at(10), {ANN: at(11), BOB: at(11)}).unbelieved == frozenset()
    assert belief.judge(at(10), {ANN: at(11), BOB: at(11), EVE: at(60, b"eve")}).unbelieved == {EVE}
    assert belief.judge(at(10), {ANN: at(31), BOB: at(30), EVE: at(32, b"eve")}).unbelieved == {ANN, EVE}, (
        "the lowest at first"
    )
    assert belief.judge(at(10), {ANN: at(11), BOB: at(10)}).unbelieved == {ANN}, "the other record is perhaps late"


def test_peers_that_have_gone_do_not_vote() -> None:
    assert member_of(ANN, BOB).judge(at(10), {ANN: at(12)}).unbelieved == frozenset()


def test_a_newcomer_follows_the_majority_of_peers_that_have_made_steps() -> None:
    records = {ANN: at(10), BOB: at(10), CAROL: at(11), DAVE: at(0), EVE: at(60, b"eve")}
    assert believed_by_a_newcomer(records, frozenset(), voters_by_claims).keys() == {ANN, BOB, DAVE}
    assert Belief(DAVE).judge(at(0), {ANN: at(3), DAVE: at(0)}).unbelieved == frozenset(), (
        "one that has learnt nothing does not vote"
    )


def test_an_onlooker_believes_the_position_that_more_than_half_hold() -> None:
    liar, ten, eleven = at(10**6, b"eve"), at(10).position, at(11).position
    assert held_by_most({ANN: at(10), EVE: liar}) == ten
    assert held_by_most({ANN: at(10), BOB: at(10), CAROL: at(0), EVE: liar}) == ten
    assert held_by_most({ANN: at(10), BOB: at(11), CAROL: at(11), EVE: liar}) == eleven
    assert held_by_most({ANN: at(10), BOB: at(11)}) == ten, "the other record is perhaps late"
    assert held_by_most({ANN: at(3), BOB: at(11), CAROL: at(11)}) == eleven
    assert held_by_most({ANN: at(0), BOB: at(0)}) == at(0).position
    assert held_by_most({ANN: at(10, host=""), EVE: liar}) == liar.position, "of those that can be dialled"


def test_one_network_has_one_vote() -> None:
    sybils = {PeerId(f"eve {number}"): at(60, b"eve", f"45.1.1.{number}") for number in range(20)}
    honest = {ANN: at(10, host="45.2.1.1"), BOB: at(10, host="45.3.1.1")}
    assert Belief(DAVE).judge(at(0), honest | sybils).unbelieved == sybils.keys()
    assert voter_of(EVE, at(1, host="45.1.1.7").addresses) == "45.1.1.0/24"
    assert voter_of(EVE, at(1).addresses) == EVE, "in a private network each is one"


def test_peers_without_an_address_vote_only_among_themselves() -> None:
    clients = {PeerId(f"eve {number}"): at(60, b"eve", "") for number in range(20)}
    assert Belief(DAVE).judge(at(0), {ANN: at(10), **clients}).unbelieved == clients.keys()
    assert Belief(DAVE).judge(at(0), clients).unbelieved == frozenset()


# which peers vote


def test_a_peer_that_was_reached_votes_for_its_network() -> None:
    assert vote_from("45.1.1.7", EVE) == vote_from("::ffff:45.1.1.8", ANN) == "45.1.1.0/24"
    assert vote_from("2a00:1:2:3::4", EVE) == "2a00:1:2::/48"
    assert vote_from("192.168.0.7", EVE) == "192.168.0.7", "a machine of the local network"
    assert vote_from("100.64.3.4", EVE) == "100.64.3.4", "of a provider's"
    assert vote_from("127.0.0.1", EVE) == vote_from("::1", EVE) == EVE, "on one machine each is one"
    assert vote_from("", EVE) == vote_from("no address", EVE) == ""


def test_members_or_one_peer_of_each_network_judge_which_parameters_are_right() -> None:
    sybils = {PeerId(f"eve {number}"): at(10, host="46.1.1.1") for number in range(4)}
    records = HONEST | sybils
    assert member_of(ANN, BOB, CAROL).judges(at(10), records) == {ANN, BOB}
    told = Belief(DAVE).judges(at(0), records)
    assert told >= {ANN, BOB}
    assert len(told) == 3


def test_while_a_peer_cannot_tell_it_loads_no_state_and_begins_no_run() -> None:
    choice = BranchChoice(EVE, at(0), lambda _: True)
    choice.belief.poll = lambda records: {}
    choice.look(at(0), HONEST, now=0.0)
    assert choice.leading(()).position == at(0).position
    assert choice.best().position == at(10).position
    choice.belief.poll = voters_by_claims
    choice.look(at(0), HONEST, now=1.0)
    assert choice.leading(()).position == choice.best().position == at(10).position


def test_a_peer_that_has_made_steps_does_not_wait_for_a_claim_that_nobody_can_judge() -> None:
    """A stranger that nobody can reach cannot stop a trainer whose members have gone; a restarted one is careful."""
    own, claims = at(10, b"own"), {BOB: at(900)}
    for belief, followed in ((member_of(ANN, own_id=DAVE), own), (Belief(DAVE), at(900))):
        belief.poll = lambda records: {}
        choice = BranchChoice(DAVE, own, lambda peer_id: True)
        choice.belief = belief
        choice.look(own, claims, 0.0)
        assert choice.best().position == followed.position
        assert choice.leading(()).position == own.position


def test_a_moment_without_voters_does_not_keep_a_peer_from_the_majority() -> None:
    belief, own, others = member_of(), at(12, b"other"), {ANN: at(11), BOB: at(11)}
    assert belief.other_majority(own, others, 100.0) is None
    belief.poll = lambda records: {}
    assert belief.other_majority(own, others, 100.0 + STALL_S) is None
    belief.poll = voters_by_claims
    assert belief.other_majority(own, others, 100.0 + STALL_S) == at(11).position


def test_parts_that_have_never_met_come_together_on_the_higher_branch() -> None:
    lower, higher = member_of(BOB), member_of(DAVE)
    assert lower.judge(at(10), {BOB: at(10), CAROL: at(12, b"other"), DAVE: at(12, b"other")}).unbelieved == frozenset()
    others = {ANN: at(10), BOB: at(10), DAVE: at(12, b"other")}
    assert higher.judge(at(12, b"other"), others).unbelieved == frozenset()
    assert higher.other_majority(at(12, b"other"), others, 1e9) is None, "half is not most"


def test_a_smaller_part_that_is_ahead_goes_back_after_a_while() -> None:
    belief = member_of(ANN, BOB, CAROL, DAVE)
    own = at(12, b"other")
    others = {ANN: at(11), BOB: at(11), CAROL: at(11), DAVE: at(12, b"other")}
    assert belief.other_majority(own, others, 100.0) is None
    assert belief.other_majority(own, others, 99.0 + STALL_S) is None
    assert belief.other_majority(own, others, 100.0 + STALL_S) == at(11).position
    assert belief.other_majority(own, others | {ANN: own}, 101.0 + STALL_S) is None
    assert belief.other_majority(own, others, 102.0 + STALL_S) is None, "it begins anew"


def test_peers_that_lag_behind_are_no_other_majority() -> None:
    belief = member_of(ANN, BOB)
    assert belief.other_majority(at(10), {ANN: at(8), BOB: at(9)}, 1e9) is None


def test_a_peer_does_not_go_back_to_where_it_has_been() -> None:
    """However long the others stay there: it may make steps without them, as with ``allow_solo``."""
    choice = BranchChoice(EVE, at(5), lambda _: True)
    choice.belief.has_stepped = True
    choice.belief.roster = lambda: Roster({one: Standing(is_member=True) for one in (EVE, ANN, BOB)})
    for step in range(5, 20):
        others = at(min(step, 9))
        choice.look(at(step), {ANN: others, BOB: others}, now=STALL_S * step)
        assert choice.leading(()).position == at(step).position


# initial peers


def test_a_newcomer_follows_the_peers_that_it_was_given_and_no_number_of_networks() -> None:
    assert Belief(DAVE).judge(at(0), HONEST | SYBILS).unbelieved == HONEST.keys(), "so it is without"
    newcomer = Belief(DAVE, lambda: frozenset({ANN, BOB, CAROL}))
    assert newcomer.judge(at(0), HONEST | SYBILS).unbelieved == SYBILS.keys()
    assert newcomer.judge(at(0), HONEST | {BOB: at(0)} | SYBILS).unbelieved == SYBILS.keys(), "one is enough"
    assert newcomer.judge(at(0), {BOB: at(0)} | SYBILS).unbelieved == frozenset(), "none has learnt anything"
    assert newcomer.judge(at(0), SYBILS).unbelieved == frozenset(), "none of them is there"
    assert believed_by_a_newcomer(HONEST | SYBILS, frozenset({ANN}), voters_by_claims).keys() == HONEST.keys()


def test_a_newcomer_at_the_step_of_its_initial_peers_believes_no_others_that_are_ahead() -> None:
    newcomer = Belief(DAVE, lambda: frozenset({ANN, BOB}))
    assert newcomer.judge(at(10), HONEST | SYBILS).unbelieved == SYBILS.keys()


def test_of_initial_peers_that_are_apart_the_highest_step_counts_that_more_than_half_have_reached() -> None:
    newcomer = Belief(DAVE, lambda: frozenset({ANN, BOB, CAROL}))
    apart = {ANN: at(10), BOB: at(50, b"other"), CAROL: at(50, b"other")}
    assert newcomer.judge(at(0), apart).unbelieved == {ANN}
    del apart[CAROL]
    assert newcomer.judge(at(0), apart).unbelieved == {BOB}


def test_after_its_first_step_a_peer_no_longer_follows_the_peers_that_it_was_given() -> None:
    member = member_of(ANN, BOB)
    member.initial_peers = lambda: frozenset({CAROL})
    assert member.judge(at(10), {**HONEST, CAROL: at(60, b"other")}).unbelieved == {CAROL}


# what a peer at step 0 has seen of the run


def beginner(*, has_begun_run: bool = False, claim: Claim = Claim.JOINED) -> tuple[BranchChoice, PeerRecord]:
    own = msgspec.structs.replace(at(0), claim=claim)
    choice = BranchChoice(EVE, own, lambda _: True)
    choice.has_begun_run = has_begun_run
    choice.belief.poll = voters_by_claims
    return choice, own


def test_a_newcomer_that_refused_a_state_begins_no_branch_and_knows_why() -> None:
    choice, own = beginner()
    choice.look(own, {ANN: at(50), BOB: at(50)}, 0.0)
    assert not choice.lacks_state(), "there is a state to load"
    choice.shun(ANN, 1.0, "it cannot be used")
    choice.look(own, {ANN: at(50), BOB: at(50)}, 1.0)
    assert not choice.lacks_state(), "there is another one"
    for records in ({ANN: at(50)}, {}):
        choice.look(own, records, 2.0)
        assert choice.lacks_state()
        assert choice.refusal() == "it cannot be used"
    choice.look(own, {ANN: at(50)}, 2.0 + SHUN_S)
    assert not choice.lacks_state(), "it asks again after a while"


def test_a_newcomer_goes_on_with_a_trainer_at_its_own_position_and_not_with_a_helper() -> None:
    choice, own = beginner()
    choice.look(own, {ANN: at(50)}, 0.0)
    helper = msgspec.structs.replace(own, is_auxiliary=True)
    for mate, lacks_state in ((helper, True), (own, False)):
        choice.look(own, {BOB: mate}, 1.0)
        assert choice.lacks_state() == lacks_state


def test_a_liar_with_a_bad_state_does_not_stop_the_peer_that_began_the_run() -> None:
    for claim in (Claim.JOINED, Claim.TOLD):
        choice, own = beginner(has_begun_run=True, claim=claim)
        choice.look(own, {ANN: at(5)}, 0.0)
        choice.shun(ANN, 1.0, "it cannot be used")
        choice.look(own, {ANN: at(5)}, 2.0)
        assert not choice.lacks_state()
        assert choice.refusal() == ""


def test_a_liar_with_a_bad_state_does_not_make_a_peer_forget_the_others_that_are_there() -> None:
    choice, own = beginner(has_begun_run=True, claim=Claim.TOLD)
    choice.look(own, {ANN: at(50), BOB: at(50)}, 0.0)
    choice.shun(ANN, 1.0, "it cannot be used")
    choice.look(own, {ANN: at(50), BOB: at(50)}, 2.0)
    choice.look(own, {}, 3.0)
    assert choice.lacks_state()


def test_a_training_peer_at_step_0_remembers_how_far_the_others_went() -> None:
    """It computes its first batch while they make 50 steps and are gone."""
    for has_begun_run in (False, True):  # one that began the run goes on alone
        choice, own = beginner(has_begun_run=has_begun_run)
        choice.is_joining = False
        training = msgspec.structs.replace(own, samples=16)
        choice.look(training, {ANN: at(50), BOB: at(50)}, 0.0)
        choice.look(training, {}, 60.0)
        assert choice.lacks_state() == (not has_begun_run)
        assert choice.run_step == (0 if has_begun_run else 50)


def test_a_peer_told_to_begin_the_run_does_not_wait_for_peers_that_it_cannot_reach() -> None:
    """A stranger with a dead address would have it wait for ever."""
    for claim in (Claim.JOINED, Claim.TOLD):
        choice, own = beginner(has_begun_run=claim == Claim.TOLD, claim=claim)
        choice.belief.poll = lambda _: {}
        choice.look(own, {ANN: at(60)}, 0.0)
        choice.look(own, {}, 60.0)
        assert choice.lacks_state() == (claim != Claim.TOLD)
