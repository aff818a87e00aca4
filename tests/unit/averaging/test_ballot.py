from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.averaging.commit.votes import MAX_BALLOTS, VoteCount, dropped
from manyhands.averaging.messages import Accusation, Order, SpanResult, Verdict, Vote
from tests.unit.averaging.groups import group_of, peer

LOST = "lost"
EVENTS = st.sampled_from([b"digest one", b"digest two", LOST])
NUMEL = 100


@st.composite
def elections(draw: st.DrawFn) -> tuple[int, list[tuple[int, bytes | str]]]:
    """A group size, and what happens to its members, in any order; some never answer, some speak twice."""
    num_members = draw(st.integers(1, 7))
    return num_members, draw(st.lists(st.tuples(st.integers(0, num_members - 1), EVENTS), max_size=14))


def vote_of(digest: bytes, **more: object) -> Vote:
    return Vote(b"group", digest, numel=NUMEL, **more)  # type: ignore[arg-type]


def lacking(start: int, stop: int, *accused: int, ballot: int = 0) -> Vote:
    accusations = [Accusation(rank, f"{rank} was lost") for rank in accused]
    reason = "somebody was lost"
    return Vote(b"group", b"", reason, ballot, missing=(start, stop), accusations=accusations, numel=NUMEL)


@given(elections())
def test_a_verdict_never_changes_and_follows_the_majority(election: tuple[int, list[tuple[int, bytes | str]]]) -> None:
    num_members, events = election
    count = VoteCount(group_of(num_members))
    first: dict[int, bytes] = {}
    verdict: Verdict | None = None
    for member, event in events:
        if isinstance(event, bytes):
            count.add(member, vote_of(event))
            first.setdefault(member, event)
        else:
            count.lose(member, f"{member} was lost")
        most = max(Counter(first.values()).values(), default=0)
        before, decision = verdict, count.decide()
        assert not isinstance(decision, Order), "nobody lacks anything"
        verdict = decision
        if before is not None:
            assert verdict == before, "two verdicts in one round"
            return
        if verdict is not None and verdict.manifest is not None:
            held = [digest for digest in first.values() if digest == verdict.manifest.digest]
            assert 2 * len(held) > num_members
        elif verdict is not None:
            assert 2 * most <= num_members
            assert verdict.reason


def test_what_a_lost_reducer_owned_is_ordered_from_the_others() -> None:
    count = VoteCount(group_of(4))
    count.add(0, vote_of(b"digest"))
    count.add(1, lacking(50, 75, 2))
    count.lose(2, "killed")
    assert count.decide() is None, "one has not voted yet"
    count.add(3, lacking(50, 75, 2))
    order = count.decide()
    assert order == Order(1, [0, 1, 3], 50, 75)
    for rank in (0, 1, 3):
        assert count.decide() is None
        count.add(rank, lacking(0, 1))
        count.add(rank, vote_of(b"repaired", ballot=1, parts=[SpanResult(0, NUMEL, 0, [2])]))
    verdict = count.decide()
    assert isinstance(verdict, Verdict)
    assert verdict.manifest is not None
    assert verdict.manifest.weights == [1.0, 1.0, 0.0, 1.0]
    assert verdict.blamed == [peer(2)]
    assert "killed" in verdict.reason


def test_votes_of_other_ballots_and_of_those_who_were_left_out_count_nothing() -> None:
    count = VoteCount(group_of(3))
    count.lose(2, "killed")
    count.add(0, lacking(0, 10, 2))
    count.add(1, lacking(0, 10, 2))
    assert isinstance(count.decide(), Order)
    count.add(2, vote_of(b"digest", ballot=1))
    count.add(0, vote_of(b"digest"))
    assert count.votes == {}


def test_half_is_not_enough() -> None:
    count = VoteCount(group_of(4))
    for member in range(2):
        count.add(member, vote_of(b"digest"))
        count.add(2 + member, vote_of(b"another"))
    verdict = count.decide()
    assert isinstance(verdict, Verdict)
    assert verdict.manifest is None
    assert verdict.reason == "the members hold different results"


def test_half_of_a_group_cannot_go_on_alone() -> None:
    count = VoteCount(group_of(4))
    count.add(0, lacking(0, 50, 2, 3))
    count.add(1, lacking(0, 50, 2, 3))
    for rank in (2, 3):
        count.lose(rank, "cut off")
    verdict = count.decide()
    assert isinstance(verdict, Verdict)
    assert verdict.is_known
    assert verdict.manifest is None
    assert verdict.blamed == [peer(2), peer(3)]


def test_a_leader_whose_time_is_over_decides() -> None:
    """Something is missing, and there is no time to reduce it again."""
    count = VoteCount(group_of(3))
    for rank in (0, 1):
        count.add(rank, lacking(0, 40))
    assert count.decide() is None, "the third may still vote"
    count.close("no vote in time")
    verdict = count.decide()
    assert isinstance(verdict, Verdict)
    assert verdict.manifest is None
    assert verdict.blamed == [peer(2)]


@pytest.mark.parametrize("voted", [[], [0], [1, 2]])
def test_a_leader_that_gives_its_round_up_is_the_only_one_to_blame(voted: list[int]) -> None:
    """The others may still vote; they lack a verdict, not the will."""
    count = VoteCount(group_of(5))
    for rank in voted:
        count.add(rank, vote_of(b"digest"))
    count.give_up("the leader leaves the run")
    verdict = count.decide()
    assert isinstance(verdict, Verdict)
    assert verdict.manifest is None
    assert verdict.blamed == [peer(0)]
    assert "the leader leaves the run" in verdict.reason


@pytest.mark.parametrize("voted", [[0, 1, 2], [1, 2, 3]])
def test_a_leader_that_gives_its_round_up_commits_what_a_majority_holds(voted: list[int]) -> None:
    count = VoteCount(group_of(5))
    for rank in voted:
        count.add(rank, vote_of(b"digest"))
    count.lose(4, "killed")
    assert count.decide() is None, "one may lack what was lost"
    count.give_up("the leader leaves the run")
    verdict = count.decide()
    assert isinstance(verdict, Verdict)
    assert verdict.manifest is not None
    assert verdict.blamed == [peer(0), peer(4)]


def test_a_round_ends_though_every_averaging_fails() -> None:
    count = VoteCount(group_of(3))
    for ballot in range(MAX_BALLOTS):
        for rank in range(3):
            count.add(rank, lacking(0, 10, ballot=ballot))
        assert isinstance(count.decide(), Order if ballot < MAX_BALLOTS - 1 else Verdict)


# who must go


def say(accuser: int, accused: int, *, is_violation: bool = False, is_stalled: bool = False) -> tuple[int, Accusation]:
    return accuser, Accusation(accused, f"{accuser} of {accused}", is_violation, is_stalled)


@pytest.mark.parametrize(
    ("accusations", "gone"),
    [
        ([], set()),
        ([say(0, 2), say(1, 2)], {2}),
        ([say(2, 0), say(2, 1), say(2, 3)], {2}),  # who accuses everybody
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
def test_who_must_go(accusations: list[tuple[int, Accusation]], gone: set[int]) -> None:
    assert dropped(accusations, 0).keys() == gone


@given(st.lists(st.builds(say, st.integers(0, 6), st.integers(0, 6), is_violation=st.booleans())))
def test_nobody_is_left_who_accuses_somebody_that_is_left(accusations: list[tuple[int, Accusation]]) -> None:
    gone = dropped(accusations, 0)
    assert all(accuser in gone or said.accused in gone for accuser, said in accusations)


def test_one_that_sent_nothing_and_does_not_vote_is_named_once_all_others_have_voted() -> None:
    count = VoteCount(group_of(4))
    _, stalled = say(0, 3, is_stalled=True)
    for rank in range(3):
        assert count.only_stalled() == set()
        vote = lacking(0, 10)
        vote.accusations = [stalled] if rank == 0 else []
        count.add(rank, vote)
        assert count.decide() is None
    assert count.only_stalled() == {3}
    count.lose(3, "it does not vote")
    assert count.decide() == Order(1, [0, 1, 2], 0, 10)
    assert count.faults == {3: "0 of 3"}, "what it did says more than that it is gone"
