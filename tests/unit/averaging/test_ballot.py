from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from manyhands.averaging.ballot import Ballot
from manyhands.averaging.messages import Verdict, Vote
from tests.unit.averaging.groups import group_of, peer

LOST, NO_RESULT = "lost", "no result"
EVENTS = st.sampled_from([b"digest one", b"digest two", LOST, NO_RESULT])


@st.composite
def elections(draw: st.DrawFn) -> tuple[int, list[tuple[int, bytes | str]]]:
    """A group size, and what happens to its members, in any order; some never answer, some speak twice."""
    num_members = draw(st.integers(1, 7))
    return num_members, draw(st.lists(st.tuples(st.integers(0, num_members), EVENTS), max_size=14))


def apply(ballot: Ballot, member: int, event: bytes | str) -> None:
    if event == LOST:
        ballot.add_lost(peer(member), f"{member} was lost")
    elif isinstance(event, bytes):
        ballot.add(peer(member), Vote(b"group", event))
    else:
        ballot.add(peer(member), Vote(b"group", b"", f"{member} lost somebody"))


@given(elections())
def test_a_verdict_never_changes_and_follows_the_majority(election: tuple[int, list[tuple[int, bytes | str]]]) -> None:
    num_members, events = election
    ballot = Ballot(group_of(num_members))
    first: dict[int, bytes | str] = {}
    verdict: Verdict | None = None
    for member, event in events:
        apply(ballot, member, event)
        if member < num_members:  # the last number is nobody's
            first.setdefault(member, event)
        held = Counter(event for event in first.values() if isinstance(event, bytes))
        most = max(held.values(), default=0)
        before, verdict = verdict, ballot.decide()
        if before is not None:
            assert verdict is not None
            assert verdict.manifest == before.manifest, "two verdicts in one round"
        if 2 * most > num_members:
            assert verdict is not None
            assert verdict.manifest is not None
            assert held[verdict.manifest.digest] == most
        elif 2 * (most + num_members - len(first)) > num_members:
            assert verdict is None, "somebody's vote can still decide it"
        else:
            assert verdict is not None
            assert verdict.manifest is None
            assert verdict.reason


@given(elections(), st.randoms(use_true_random=False))
def test_the_order_of_first_votes_does_not_matter(election: tuple[int, list[tuple[int, bytes | str]]], rng) -> None:
    num_members, events = election
    once = list(dict(reversed(events)).items())  # the first vote of each
    shuffled = rng.sample(once, len(once))
    ballots = [Ballot(group_of(num_members)) for _ in range(2)]
    for ballot, order in zip(ballots, (once, shuffled), strict=True):
        for member, event in order:
            apply(ballot, member, event)
    assert ballots[0].decide() == ballots[1].decide()


def test_only_lost_members_are_blamed_and_only_when_they_had_not_voted() -> None:
    ballot = Ballot(group_of(5))
    ballot.add(peer(0), Vote(b"group", b"", "peer04 did it"))
    ballot.add(peer(1), Vote(b"group", b"digest"))
    ballot.add_lost(peer(1), "too late, it has voted")
    ballot.add_lost(peer(2), "frozen")
    assert ballot.decide() is None
    ballot.add_lost(peer(3), "cut off")
    verdict = ballot.decide()
    assert verdict is not None
    assert verdict.manifest is None
    assert verdict.blamed == [peer(2), peer(3)]
    for reason in ("peer04 did it", "frozen", "cut off"):
        assert reason in verdict.reason


def test_half_is_not_enough() -> None:
    ballot = Ballot(group_of(4))
    for member in range(2):
        ballot.add(peer(member), Vote(b"group", b"digest"))
        ballot.add(peer(2 + member), Vote(b"group", b"another"))
    verdict = ballot.decide()
    assert verdict is not None
    assert verdict.manifest is None
    assert verdict.reason == "the members hold different results"
