from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.averaging.messages import Again, Complaint, SpanResult, Verdict, Vote
from manyhands.averaging.round.count import MAX_EXCHANGES, Count, dropped
from tests.unit.averaging.groups import group_of, peer

LOST = "lost"
EVENTS = st.sampled_from([b"digest one", b"digest two", LOST])
NUMEL = 100


@st.composite
def elections(draw: st.DrawFn) -> tuple[int, list[tuple[int, bytes | str]]]:
    """A group size, and what happens to its members, in any order; some never answer, some speak twice."""
    num_members = draw(st.integers(1, 7))
    return num_members, draw(st.lists(st.tuples(st.integers(0, num_members - 1), EVENTS), max_size=14))


def vote_of(count: Count, digest: bytes, exchange: int = 0, **more: object) -> Vote:
    """Of a member that holds one result; the leader has reduced all of it."""
    others = [b""] * (len(count.group.members) - 1)
    return Vote(b"group", exchange, [digest, *others], **more)  # type: ignore[arg-type]


def holding(*digests: bytes) -> Vote:
    """The vote of a member that holds these means, by reducer."""
    return Vote(b"group", 0, list(digests))


def lacking(*lost: int, exchange: int = 0) -> Vote:
    complaints = [Complaint(rank, f"{rank} was lost") for rank in lost]
    return Vote(b"group", exchange, reason="somebody was lost", complaints=complaints)


@given(elections())
def test_a_verdict_follows_the_majority(election: tuple[int, list[tuple[int, bytes | str]]]) -> None:
    num_members, events = election
    count = Count(group_of(num_members))
    first: dict[int, bytes] = {}
    for member, event in events:
        if isinstance(event, bytes):
            count.add(member, vote_of(count, event))
            first.setdefault(member, event)
        else:
            count.lose(member, f"{member} was lost")
        decision = count.decide()
        most = max(Counter(first.values()).values(), default=0)
        if isinstance(decision, Again):
            assert len(set(first.values())) == 2, "else nobody complains"
            assert 0 not in decision.members, "it has sent different means"
            assert 2 * most <= num_members
            return
        assert (decision is not None and decision.manifest is not None) == (2 * most > num_members)
        if decision is not None:
            assert decision.manifest is not None or decision.reason
            return


def test_after_the_loss_of_a_reducer_the_others_exchange_again() -> None:
    count = Count(group_of(4))
    count.add(0, vote_of(count, b"digest"))
    count.add(1, lacking(2))
    count.lose(2, "killed")
    assert count.decide() is None, "one has not voted yet"
    count.add(3, lacking(2))
    assert count.decide() == Again(1, [0, 1, 3])
    for rank in (0, 1, 3):
        assert count.decide() is None
        count.add(rank, lacking())  # late, on the first exchange
        count.add(rank, vote_of(count, b"again", 1, parts=[SpanResult(0, 100, 0, [2])]))
    verdict = count.decide()
    assert isinstance(verdict, Verdict)
    assert verdict.manifest is not None
    assert verdict.manifest.weights == [1.0, 1.0, 0.0, 1.0]
    assert verdict.blamed == [peer(2)]
    assert "killed" in verdict.reason


def test_means_that_a_majority_holds_are_committed_though_a_member_lacks_values() -> None:
    count = Count(group_of(4))
    count.add(3, lacking(2))
    count.lose(2, "killed")
    for rank in (0, 1):
        count.add(rank, vote_of(count, b"digest"))
    assert count.decide() is not None, "two of four are no majority, and none can come"
    count = Count(group_of(5))
    count.add(3, lacking(2))
    for rank in (0, 1, 4):
        assert count.decide() is None
        count.add(rank, vote_of(count, b"digest"))
    verdict = count.decide()
    assert isinstance(verdict, Verdict)
    assert verdict.manifest is not None
    assert verdict.blamed == [peer(2)]


def test_votes_on_other_exchanges_and_of_members_left_out_do_not_count() -> None:
    count = Count(group_of(3))
    count.lose(2, "killed")
    count.add(0, lacking(2))
    count.add(1, lacking(2))
    assert isinstance(count.decide(), Again)
    count.add(2, vote_of(count, b"digest", 1))
    count.add(0, vote_of(count, b"digest"))
    assert count.votes == {}


def test_half_of_the_votes_is_no_majority() -> None:
    count = Count(group_of(2))
    count.add(0, vote_of(count, b"digest"))
    count.add(1, vote_of(count, b"another"))
    verdict = count.decide()
    assert isinstance(verdict, Verdict)
    assert verdict.manifest is None
    assert verdict.reason == f"peer {peer(0)} sent different members different means"


# reducers that send different means


def test_a_reducer_that_sends_different_means_is_left_out_and_blamed() -> None:
    count = Count(group_of(4))
    count.add(0, holding(b"0", b"1", b"2", b"3"))
    count.add(1, holding(b"0", b"1", b"2", b"3"))
    count.add(2, holding(b"0", b"other", b"2", b"3"))
    assert count.decide() is None, "the last one may hold what two hold"
    count.add(3, holding(b"0", b"other", b"2", b"3"))
    assert count.decide() == Again(1, [0, 2, 3])
    for rank in (0, 2, 3):
        count.add(rank, vote_of(count, b"again", 1))
    verdict = count.decide()
    assert isinstance(verdict, Verdict)
    assert verdict.manifest is not None
    assert verdict.manifest.left_out == {1}
    assert verdict.blamed == [peer(1)]


def test_two_reducers_that_send_different_means_are_left_out() -> None:
    count = Count(group_of(5))
    for rank in range(5):
        count.add(
            rank, holding(b"0", b"other" if rank == 0 else b"1", b"2", b"other" if rank in (2, 4) else b"3", b"4")
        )
    assert count.decide() == Again(1, [0, 2, 4])


def test_means_that_a_majority_holds_are_committed_though_a_reducer_sent_others_to_one_member() -> None:
    """Somebody is blamed, so that the others keep the means for it."""
    count = Count(group_of(5))
    count.add(4, holding(b"0", b"other", b"2", b"3", b"4"))
    for rank in range(3):
        assert count.decide() is None
        count.add(rank, holding(b"0", b"1", b"2", b"3", b"4"))
    verdict = count.decide()
    assert isinstance(verdict, Verdict)
    assert verdict.manifest is not None
    assert verdict.blamed == [peer(1)]


def test_a_reducer_that_names_other_contributors_to_some_is_left_out() -> None:
    """The means are the same."""
    count = Count(group_of(4))
    honest = SpanResult(0, 50, 0, [])
    for rank in range(4):
        vote = holding(b"0", b"", b"", b"3")
        vote.parts = [honest, SpanResult(50, 100, 3, [2])] if rank < 2 else []
        count.add(rank, vote)
    assert count.decide() == Again(1, [0, 1, 2])


@pytest.mark.parametrize("liar", [0, 1, 3])
def test_a_member_that_claims_to_hold_other_means_has_nobody_left_out(liar: int) -> None:
    """All others hold the same, so that is committed; with a lost member it is the liar that quarrels with all."""
    for lost in (False, True):
        count = Count(group_of(5))
        for rank in range(4 if lost else 5):
            count.add(rank, holding(*(b"false" if rank == liar else b"%d" % reducer for reducer in range(5))))
        if lost:
            count.lose(4, "killed")
        verdict = count.decide()
        assert isinstance(verdict, Verdict)
        assert verdict.manifest is not None
        assert verdict.manifest.digest == holding(b"0", b"1", b"2", b"3", b"4").digest
        assert set(verdict.blamed) <= {peer(liar), peer(4)}


@pytest.mark.parametrize("digests", [[b"digest"], [b"digest"] * 4])
def test_digests_of_another_number_of_spans_are_no_result(digests: list[bytes]) -> None:
    count = Count(group_of(3))
    for rank in range(3):
        count.add(rank, Vote(b"group", 0, list(digests)))
    verdict = count.decide()
    assert isinstance(verdict, Verdict)
    assert verdict.manifest is None


# members that are lost


def test_half_of_a_group_cannot_go_on_alone() -> None:
    count = Count(group_of(4))
    count.add(0, lacking(2, 3))
    count.add(1, lacking(2, 3))
    for rank in (2, 3):
        count.lose(rank, "cut off")
    verdict = count.decide()
    assert isinstance(verdict, Verdict)
    assert verdict.is_known
    assert verdict.manifest is None
    assert verdict.blamed == [peer(2), peer(3)]


def test_a_leader_whose_time_is_over_decides() -> None:
    """Something is missing, and there is no time to exchange it again."""
    count = Count(group_of(3))
    for rank in (0, 1):
        count.add(rank, lacking(2))
    assert count.decide() is None, "the third may still vote"
    count.close("no vote in time")
    verdict = count.decide()
    assert isinstance(verdict, Verdict)
    assert verdict.manifest is None
    assert verdict.blamed == [peer(2)]


@pytest.mark.parametrize("voted", [[], [0], [1, 2]])
def test_a_leader_that_gives_its_round_up_is_the_only_one_to_blame(voted: list[int]) -> None:
    """The others may still vote; they lack a verdict, not the will."""
    count = Count(group_of(5))
    for rank in voted:
        count.add(rank, vote_of(count, b"digest"))
    count.give_up("the leader leaves the run")
    verdict = count.decide()
    assert isinstance(verdict, Verdict)
    assert verdict.manifest is None
    assert verdict.blamed == [peer(0)]
    assert "the leader leaves the run" in verdict.reason


@pytest.mark.parametrize("num_members", [5, 6])
def test_a_round_ends_though_members_are_lost_in_every_exchange(num_members: int) -> None:
    """Each time the one with the highest rank, until there is no majority, or it was enough."""
    count = Count(group_of(num_members))
    decision: Verdict | Again | None = Again(0, list(range(num_members)))
    while isinstance(decision, Again):
        *others, victim = decision.members
        for rank in others:
            count.add(rank, lacking(victim, exchange=decision.exchange))
        count.lose(victim, "killed")
        decision = count.decide()
    assert isinstance(decision, Verdict)
    assert decision.manifest is None
    assert count.exchange < MAX_EXCHANGES


def test_one_member_alone_cannot_have_all_others_left_out() -> None:
    """It votes at once, and says that nobody else has sent it anything."""
    count = Count(group_of(5))
    vote = lacking()
    vote.complaints = [Complaint(rank, "it sent nothing", is_stalled=True) for rank in range(4)]
    count.add(4, vote)
    assert count.only_stalled() == set()


def test_a_vote_of_one_that_is_lost_still_counts_towards_a_majority() -> None:
    count = Count(group_of(5))
    for rank in (0, 1):
        count.add(rank, vote_of(count, b"digest"))
    for rank in (1, 3, 4):
        count.lose(rank, "killed")
    assert count.decide() is None, "the one that is left may hold it, too"
    count.add(2, vote_of(count, b"digest"))
    verdict = count.decide()
    assert isinstance(verdict, Verdict)
    assert verdict.manifest is not None


def test_an_exchange_that_failed_for_all_is_not_repeated_among_the_same() -> None:
    count = Count(group_of(3))
    for rank in range(3):
        count.add(rank, lacking())
    verdict = count.decide()
    assert isinstance(verdict, Verdict)
    assert verdict.manifest is None
    assert verdict.reason == "somebody was lost"


def test_a_member_at_fault_is_blamed_though_it_has_voted_and_complains_of_others() -> None:
    """It sent the others no values, lost them by that, and complains of them."""
    count = Count(group_of(4))
    count.add(3, lacking(0, 1, 2))
    for rank in range(3):
        vote = vote_of(count, b"digest")
        vote.complaints = [Complaint(3, "it sent nothing", is_stalled=True)]
        count.add(rank, vote)
    verdict = count.decide()
    assert isinstance(verdict, Verdict)
    assert verdict.blamed == [peer(3)]


# who must go


def say(by: int, about: int, *, is_violation: bool = False, is_stalled: bool = False) -> tuple[int, Complaint]:
    return by, Complaint(about, f"{by} of {about}", is_violation, is_stalled)


@pytest.mark.parametrize(
    ("complaints", "gone"),
    [
        ([], set()),
        ([say(0, 2), say(1, 2)], {2}),
        ([say(2, 0), say(2, 1), say(2, 3)], {2}),  # it complains of everybody
        ([say(1, 0)], {1}),  # the leader stays,
        ([say(0, 0, is_violation=True)], {0}),  # unless by its own word
        ([say(1, 2), say(2, 1)], {2}),
        ([say(2, 1, is_violation=True)], {1}),
        ([say(1, 2), say(3, 4)], {2, 4}),
        ([say(1, 0, is_stalled=True), say(0, 1)], {0}),  # it was given up, and lost its connection by that
        ([say(1, 2, is_stalled=True), say(2, 1, is_violation=True)], {1}),
        ([say(1, 0, is_stalled=True), say(0, 1, is_stalled=True)], {1}),
    ],
)
def test_complaints_decide_which_members_are_dropped(complaints: list[tuple[int, Complaint]], gone: set[int]) -> None:
    assert dropped(complaints, 0).keys() == gone


@given(st.lists(st.builds(say, st.integers(0, 6), st.integers(0, 6), is_violation=st.booleans())))
def test_of_two_members_of_which_one_complains_of_the_other_at_least_one_is_dropped(
    complaints: list[tuple[int, Complaint]],
) -> None:
    gone = dropped(complaints, 0)
    assert all(by in gone or said.about in gone for by, said in complaints)


def test_a_member_that_sent_nothing_and_does_not_vote_is_named_once_all_others_have_voted() -> None:
    count = Count(group_of(4))
    _, stalled = say(0, 3, is_stalled=True)
    for rank in range(3):
        assert count.only_stalled() == set()
        vote = lacking()
        vote.complaints = [stalled] if rank == 0 else []
        count.add(rank, vote)
        assert count.decide() is None
    assert count.only_stalled() == {3}
    count.lose(3, "it does not vote")
    assert count.decide() == Again(1, [0, 1, 2])
    assert count.left_out == {3: "0 of 3"}, "what it did says more than that it is gone"


# guests


def test_silent_guests_stop_no_round_however_many_they_are() -> None:
    count = Count(group_of(9), voters=range(3))
    count.add(0, vote_of(count, b"means"))
    assert count.decide() is None
    count.add(1, vote_of(count, b"means"))
    verdict = count.decide()
    assert isinstance(verdict, Verdict)
    assert verdict.manifest is not None


def test_votes_and_complaints_of_guests_do_not_count() -> None:
    count = Count(group_of(7), voters=range(3))
    for guest in range(3, 7):
        count.add(guest, vote_of(count, b"other means"))
        assert count.decide() is None
    count = Count(group_of(7), voters=range(3))
    for guest in range(3, 7):
        vote = lacking(1)
        count.add(guest, vote)
    for voter in range(3):
        count.add(voter, lacking(3))
    assert count.decide() == Again(1, [0, 1, 2, 4, 5, 6]), "a member complains of a guest: the guest goes"


def test_the_others_exchange_again_without_guests_that_never_came() -> None:
    count = Count(group_of(6), voters=range(3))
    for rank in range(3):
        count.add(rank, lacking(3, 4, 5))
    for guest in (3, 4, 5):
        count.lose(guest, "it does not answer")
    assert count.decide() == Again(1, [0, 1, 2])


def test_nobody_waits_for_a_guest_of_which_most_members_complain() -> None:
    """It is not in the next exchange anyway. A member is waited for: it may have sent its means to some."""
    for guests in ({3}, set[int]()):
        count = Count(group_of(4), {0, 1, 2, 3} - guests)
        for rank in (0, 1):
            assert count.decide() is None
            count.add(rank, lacking(3))
        assert count.decide() is None, "one of the others has not voted"
        count.add(2, lacking(3))
        assert count.decide() == (Again(1, [0, 1, 2]) if guests else None)


def test_a_guest_of_which_one_member_complains_is_waited_for() -> None:
    count = Count(group_of(4), {0, 1, 2})
    count.add(0, lacking(3))
    for rank in (1, 2):
        count.add(rank, lacking())
    assert count.decide() is None


@pytest.mark.parametrize("fault", [{"is_violation": True}, {"is_stalled": True}])
def test_the_word_of_guests_has_no_member_blamed_or_given_up(fault: dict[str, bool]) -> None:
    count = Count(group_of(5), voters=range(3))
    for guest in (3, 4):
        vote = lacking()
        vote.complaints = [Complaint(2, "it lies", **fault)]
        count.add(guest, vote)
    for voter in (0, 1):
        assert count.only_stalled() == set()
        count.add(voter, vote_of(count, b"means"))
    verdict = count.decide()
    assert isinstance(verdict, Verdict)
    assert verdict.manifest is not None
    assert verdict.blamed == []
