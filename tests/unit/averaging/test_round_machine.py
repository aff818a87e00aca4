"""One member's round as a state machine: what it believes of the leader, whom it asks, and when it gives up."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.averaging.messages import Again, Complaint, Group, JoinResponse, SpanResult, Verdict, VerdictQuery, Vote
from manyhands.averaging.round.round_machine import (
    AskOthers,
    AwaitLast,
    BeginExchange,
    Exchanged,
    Finish,
    GaveUp,
    LastAreLate,
    Lost,
    NobodyKnows,
    Round,
    SendVote,
    State,
    StopExchange,
    Told,
    Voted,
)
from manyhands.base.identity import PeerId
from tests.unit.averaging.groups import group_of, peer

GROUP = group_of(3, weights=[1.0, 0.0, 2.5])
OTHERS = [
    group_of(2),
    group_of(3),
    msgspec.structs.replace(GROUP, nonce=b"another"),
    msgspec.structs.replace(GROUP, members=GROUP.members[::-1]),
]
HELD = Vote(b"group", 0, [b"means"] * 4)
DIGEST = HELD.digest


def member(group: Group = GROUP, rank: int = 2) -> Round:
    """A member that has voted, and waits for the leader."""
    one = Round(group, rank)
    assert one.begin() == [BeginExchange(0, tuple(range(len(group.members))))]
    assert one.on(Exchanged(HELD)) == [SendVote(HELD)]
    return one


def outcome_of(one: Round, verdict: Verdict) -> Verdict | None:
    """What a member makes of a verdict of its leader; None if it does not believe it."""
    actions = one.on(Told(0, verdict))
    if one.state is State.IN_DOUBT:
        assert actions == [StopExchange(), AskOthers()]
        return None
    (finish,) = actions
    assert isinstance(finish, Finish)
    return finish.verdict


def test_a_verdict_about_the_group_is_believed() -> None:
    committed = outcome_of(member(), Verdict(True, GROUP.manifest(DIGEST)))
    assert committed is not None
    assert committed.manifest == GROUP.manifest(DIGEST)
    assert outcome_of(member(), Verdict(True, None, "lost", [peer(1)])) == Verdict(True, None, "lost", [peer(1)])


@pytest.mark.parametrize("other", OTHERS)
def test_a_verdict_about_another_group_is_not_believed(other: Group) -> None:
    assert outcome_of(member(), Verdict(True, other.manifest(DIGEST))) is None


def test_a_verdict_in_doubt_commits_nothing() -> None:
    assert outcome_of(member(), Verdict(False, GROUP.manifest(DIGEST))) is None


@pytest.mark.parametrize(
    "parts",
    [
        [SpanResult(5, 10, 0, [])],
        [SpanResult(0, 5, 0, [1]), SpanResult(6, 10, 0, [])],
        [SpanResult(0, 5, 3, [])],
        [SpanResult(0, 5, 0, [3])],
        [SpanResult(0, 5, 0, [1, 1])],
        [SpanResult(0, 0, 0, [1])],
    ],
)
def test_a_verdict_with_impossible_parts_is_not_believed(parts: list[SpanResult]) -> None:
    assert outcome_of(member(), Verdict(True, GROUP.manifest(DIGEST, parts))) is None


def test_other_contributors_than_a_member_has_heard_are_not_believed() -> None:
    """By its word alone a leader would have honest members complain of one of them."""
    forged = GROUP.manifest(DIGEST, [SpanResult(0, 5, 0, [1]), SpanResult(5, 10, 2, [1])])
    assert outcome_of(member(), Verdict(True, forged)) is None
    other = GROUP.manifest(b"another digest", forged.parts)
    assert outcome_of(member(), Verdict(True, other)) is not None, "it may hold less than the others"


def test_a_result_of_an_exchange_with_this_member_is_not_one_without_it() -> None:
    """Else a leader could tell each member another list of those that it has left out."""
    group = group_of(4)
    assert outcome_of(member(group), Verdict(True, group.manifest(DIGEST, members=[0, 1, 3]))) is None
    another = group.manifest(b"another digest", members=[0, 1, 3])
    assert outcome_of(member(group), Verdict(True, another)) is not None


@pytest.mark.parametrize(
    "again",
    [
        Again(1, []),
        Again(1, [0, 3]),
        Again(1, [2, 0]),
        Again(1, [1, 1, 2]),
        Again(1, [0, 1]),  # without this member
        Again(0, [0, 2]),
        Again(2, [0, 2]),
        Again(1, [2]),  # no majority
    ],
)
def test_orders_that_a_member_cannot_follow_are_refused(again: Again) -> None:
    assert outcome_of(member(), Verdict(False, again=again)) is None


def test_only_clients_cannot_exchange_again() -> None:
    group = group_of(3, clients=[1, 2])
    assert outcome_of(member(group), Verdict(False, again=Again(1, [1, 2]))) is None


def test_a_member_that_has_not_voted_is_not_told_to_exchange_again() -> None:
    one = Round(GROUP, 2)
    assert one.on(Told(0, Verdict(False, again=Again(1, [0, 2])))) == [StopExchange(), AskOthers()]


def test_a_member_exchanges_again_and_votes_on_that() -> None:
    one = member()
    assert one.on(Told(0, Verdict(False, again=Again(1, [0, 2])))) == [BeginExchange(1, (0, 2))]
    assert one.on(Exchanged(HELD)) == [], "the end of the first exchange, which came late"
    vote = Vote(b"group", 1, [b"again"])
    assert one.on(Exchanged(vote)) == [SendVote(vote)]


def test_a_leader_cannot_claim_that_it_has_left_others_out() -> None:
    group = group_of(4)
    assert outcome_of(member(group), Verdict(True, group.manifest(DIGEST, members=[0, 2]))) is None
    again = Verdict(False, again=Again(1, [0, 2, 3]))
    for members, is_believed in (([0, 2, 3], True), ([0, 2], False), (None, False)):
        one = member(group)
        one.on(Told(0, again))
        verdict = Verdict(True, group.manifest(DIGEST, members=members))
        assert (outcome_of(one, verdict) is not None) == is_believed


def test_a_member_that_has_missed_an_order_believes_how_the_exchange_after_it_ended() -> None:
    """It holds no result of that exchange, so it can only fetch what the others hold, or load their state."""
    group = group_of(4)
    committed = group.manifest(b"another digest", members=[0, 2, 3])
    assert outcome_of(member(group), Verdict(True, committed)) is not None


def test_a_member_that_was_left_out_believes_a_result_of_the_others() -> None:
    group = group_of(4)
    assert outcome_of(member(group), Verdict(True, group.manifest(b"another digest", members=[0, 1]))) is not None


def test_only_members_are_blamed() -> None:
    told = outcome_of(member(), Verdict(True, None, "", [PeerId("x"), peer(2)]))
    assert told is not None
    assert told.blamed == [peer(2)]


@given(st.text(max_size=600))
def test_the_reason_is_fit_for_a_log_line(reason: str) -> None:
    told = outcome_of(member(), Verdict(True, None, reason))
    assert told is not None
    assert told.reason.isprintable()
    assert len(told.reason) <= 500


def test_a_leader_that_answers_without_news_is_not_asked_for_ever() -> None:
    assert outcome_of(member(), Verdict(False)) is None


def test_members_that_sent_nothing_have_a_last_moment_to_vote() -> None:
    stalled = Vote(b"group", 0, complaints=[Complaint(2, "it sent nothing", is_stalled=True)])
    leader = Round(GROUP, 0)
    assert leader.on(Exchanged(stalled)) == []
    assert leader.on(Voted(1, stalled)) == [AwaitLast(0)]
    assert leader.on(LastAreLate(0)) == [BeginExchange(1, (0, 1))]
    assert leader.on(LastAreLate(0)) == [], "of the exchange before"


# in doubt


def test_a_member_that_loses_its_leader_asks_the_others_and_aborts_alone() -> None:
    one = member()
    assert one.answer(1, VerdictQuery(b"group")) is None
    assert one.on(Lost(0, "killed")) == [StopExchange(), AskOthers()]
    assert one.answer(1, VerdictQuery(b"group")) == Verdict(False)
    (finish,) = one.on(NobodyKnows())
    assert isinstance(finish, Finish)
    assert finish.verdict.manifest is None
    assert finish.verdict.blamed == [peer(0)]
    assert one.verdict is None, "what it assumed is passed on to nobody"


def test_another_member_may_know_the_verdict() -> None:
    one = member()
    one.on(Lost(0, "killed"))
    assert one.on(Told(1, Verdict(False))) == [], "it has lost the leader, too"
    (finish,) = one.on(Told(1, Verdict(True, GROUP.manifest(DIGEST))))
    assert isinstance(finish, Finish)
    assert one.verdict is finish.verdict
    assert one.on(NobodyKnows()) == [], "it is over"


def test_another_member_cannot_order_anything() -> None:
    one = member()
    assert one.on(Told(1, Verdict(False, again=Again(1, [1, 2])))) == []
    assert one.on(Told(1, Verdict(True, OTHERS[2].manifest(DIGEST)))) == []
    assert one.state is State.VOTED


# a leader


def test_a_leader_that_is_left_out_goes_on_counting() -> None:
    group = group_of(4)
    leader = Round(group, 0)
    stalled = [Complaint(0, "it sent nothing", is_stalled=True)]
    for rank in (1, 2):
        assert leader.on(Voted(rank, Vote(b"group", 0, complaints=stalled))) == []
    assert leader.on(Voted(3, Vote(b"group", 0, complaints=stalled))) == [AwaitLast(0)]
    assert leader.on(LastAreLate(0)) == [StopExchange()]
    assert leader.answer(1, VerdictQuery(b"group", 0)) == Verdict(False, again=Again(1, [1, 2, 3]))
    assert leader.answer(1, VerdictQuery(b"group", 1)) is None
    for rank in (1, 2):
        leader.on(Voted(rank, Vote(b"group", 1, HELD.digests)))
    (finish,) = leader.on(Voted(3, Vote(b"group", 1, HELD.digests)))
    assert isinstance(finish, Finish)
    assert finish.verdict.manifest is not None
    assert finish.verdict.manifest.left_out == {0}
    assert leader.on(GaveUp("it leaves")) == [], "it has decided"


def test_a_leader_leaves_out_a_member_that_votes_too_early() -> None:
    leader = Round(GROUP, 0)
    leader.on(Voted(1, Vote(b"group", 1, HELD.digests)))
    assert leader.count is not None
    assert leader.count.lost == {1: f"{peer(1)} voted in an exchange that has not begun"}


MESSAGES = st.one_of(
    st.builds(
        Vote, st.binary(max_size=64), st.integers(0, 9), st.lists(st.binary(max_size=64)), reason=st.text(max_size=500)
    ),
    st.builds(
        Verdict,
        st.booleans(),
        st.none() | st.builds(GROUP.manifest, st.binary(max_size=64)),
        st.text(max_size=50),
        st.lists(st.text(max_size=64).map(PeerId), max_size=3),
    ),
    st.builds(JoinResponse, st.none() | st.sampled_from(OTHERS), st.text(max_size=64).map(PeerId)),
)


@given(MESSAGES)
def test_messages_survive_the_wire(message: msgspec.Struct) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message
