"""How long an exchange waits for each partner, and a round for each vote."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

import pytest

from manyhands.averaging.allreduce.butterfly import Wanted
from manyhands.averaging.round.times import Action, Ask, GiveUp, RoundTimes, Seen, Stragglers
from manyhands.averaging.timing import ANSWER_S, LOOK_S, TWO_ANSWERS_S, TWO_DIALS_S
from tests.unit.averaging.groups import group_of, peer

ROUND_S = 60.0
NUM_BYTES = 1000
GONE = "does not answer"


def times(num_members: int = 4, hurried: Collection[int] = (), bandwidths: list[int] | None = None) -> RoundTimes:
    """Of the member with rank 0."""
    group = group_of(num_members, **({} if bandwidths is None else {"bandwidths": bandwidths}))
    return RoundTimes(group, 0, ROUND_S, dict.fromkeys(hurried, TWO_ANSWERS_S))


class Exchange:
    """An exchange of the member with rank 0, which looks at its partners as time passes.

    Attributes:
        seen: the streams of its partners.
        answers: what they have answered since the last look.
        said: all actions, with the time of each.
    """

    def __init__(self, num_members: int = 4, hurried: Collection[int] = (), spans: Mapping[int, int] | None = None):
        spans = spans if spans is not None else dict.fromkeys(range(num_members), NUM_BYTES)
        num_bytes = dict.fromkeys(range(1, num_members), NUM_BYTES)
        self.stragglers = Stragglers(times(num_members, hurried), num_bytes, spans, 0.0)
        self.now = 0.0
        self.seen: dict[int, Seen] = {}
        self.over: set[int] = set()
        self.awaited: set[int] = set()
        self.answers: dict[int, str] = {}
        self.has_reduced = False
        self.said: list[tuple[float, Action]] = []

    def see(self, rank: int, owed: Wanted | None, received: int, last_received: float | None = None) -> None:
        at = self.now if last_received is None else last_received
        self.seen[rank] = Seen(owed, received, at)

    def pass_to(self, until: float, bytes_per_s: Mapping[int, float] | None = None) -> None:
        """Look again and again; some partners send at a steady rate, and all that are asked say that they are there."""
        while self.now < until:
            self.now += LOOK_S
            for rank, rate in (bytes_per_s or {}).items():
                self.see(rank, self.seen[rank].owed, int(rate * self.now))
            actions = self.stragglers.looked(
                self.seen, self.answers, self.over, self.awaited, self.has_reduced, self.now
            )
            self.answers = {action.rank: "" for action in actions if isinstance(action, Ask)}
            self.said += [(self.now, action) for action in actions]
            self.over |= {action.rank for action in actions if isinstance(action, GiveUp)}

    def given_up(self) -> dict[int, float]:
        """When each partner was given up."""
        return {action.rank: at for at, action in self.said if isinstance(action, GiveUp)}


def test_a_member_that_sends_is_not_asked_and_a_silent_one_is_asked_again_and_again() -> None:
    exchange = Exchange()
    exchange.see(1, Wanted.VALUES, 0)
    exchange.see(2, Wanted.VALUES, 0)
    exchange.see(3, None, 0)
    exchange.pass_to(10.0, {1: 50.0})
    asked = [at for at, action in exchange.said if action == Ask(2)]
    assert {action for _, action in exchange.said} == {Ask(2)}
    assert asked[0] == pytest.approx(ANSWER_S + LOOK_S)
    assert all(later - at >= ANSWER_S for at, later in itertools.pairwise(asked))


@pytest.mark.parametrize("received", [7, 8])
def test_a_member_that_does_not_answer_is_given_up_unless_something_came_meanwhile(received: int) -> None:
    exchange = Exchange()
    exchange.see(1, Wanted.MEANS, 7)
    exchange.pass_to(2.0 * ANSWER_S)
    exchange.see(1, Wanted.MEANS, received)
    exchange.answers[1] = GONE
    exchange.pass_to(exchange.now + LOOK_S)
    told = GiveUp(1, f"peer {peer(1)} sends nothing, and {GONE}")
    assert (exchange.said[-1][1] == told) == (received == 7)


@pytest.mark.parametrize("has_come", [False, True])
def test_a_partner_is_asked_where_its_stream_stays(has_come: bool) -> None:
    """At once; not one that this peer dials."""
    exchange = Exchange()
    exchange.awaited = {2}
    exchange.pass_to(LOOK_S)
    assert exchange.said == [(LOOK_S, Ask(2))]
    if has_come:
        exchange.see(2, Wanted.VALUES, 0)
    exchange.answers[2] = GONE
    exchange.pass_to(2 * LOOK_S)
    told = (2 * LOOK_S, GiveUp(2, f"no stream to a member: peer {peer(2)} {GONE}"))
    assert (exchange.said[-1] == told) == (not has_come)


def test_a_member_too_slow_for_the_end_is_given_up_after_half_of_the_round() -> None:
    exchange = Exchange()
    for rank in (1, 2, 3):
        exchange.see(rank, Wanted.VALUES, 0)
    exchange.pass_to(50.0, {1: NUM_BYTES / 55.0, 2: NUM_BYTES / 70.0})
    assert exchange.given_up() == {2: 30.0, 3: 30.0}
    reasons = [action.reason for _, action in exchange.said if isinstance(action, GiveUp)]
    assert "at its pace it would need 70 s" in reasons[0]
    assert "it has sent nothing" in reasons[1]


def test_pauses_for_which_others_are_the_reason_do_not_count() -> None:
    """It would need a minute for what it has not sent, as this member had no room for it most of the time."""
    exchange = Exchange()
    exchange.see(1, None, NUM_BYTES // 10)
    exchange.pass_to(28.0)
    exchange.see(1, Wanted.VALUES, NUM_BYTES // 10)
    exchange.pass_to(40.0)
    assert exchange.given_up() == {}


def test_a_reducer_is_overdue_if_another_one_was_done_long_before() -> None:
    exchange = Exchange()
    exchange.see(1, Wanted.MEANS, 10)
    exchange.see(2, None, NUM_BYTES, 20.0)
    exchange.see(3, Wanted.MEANS, NUM_BYTES // 2)
    exchange.pass_to(50.0, {3: NUM_BYTES / 55.0})
    assert exchange.given_up() == {1: pytest.approx(39.0, abs=2 * LOOK_S)}


@pytest.mark.parametrize("spans", [{0: 10, 1: 20, 2: 10}, {0: 10, 1: 10, 2: 10}])
def test_a_reducer_with_a_larger_span_may_take_longer(spans: dict[int, int]) -> None:
    exchange = Exchange(3, spans=spans)
    exchange.see(1, Wanted.MEANS, 10)
    exchange.see(2, None, NUM_BYTES, 25.0)
    exchange.pass_to(58.0)
    assert (1 in exchange.given_up()) == (spans[1] == 10)


def test_if_nobody_is_done_no_reducer_is_overdue() -> None:
    """They may all wait for one slow member."""
    exchange = Exchange()
    for rank in (1, 2, 3):
        exchange.see(rank, Wanted.MEANS, 10)
    exchange.has_reduced = True
    exchange.pass_to(58.0)
    assert exchange.given_up() == {}


def test_of_two_reducers_the_own_span_shows_that_the_other_one_is_overdue() -> None:
    exchange = Exchange(3, spans={0: 10, 1: 10})
    exchange.see(1, Wanted.MEANS, 10)
    exchange.see(2, None, NUM_BYTES)
    exchange.has_reduced = True
    exchange.pass_to(58.0)
    assert exchange.given_up() == {1: 39.0}


def test_a_hurried_partner_has_four_seconds_more_than_all_others() -> None:
    exchange = Exchange(hurried=[3])
    for rank in (1, 2, 3):
        exchange.see(rank, Wanted.VALUES, 0)
    exchange.pass_to(10.0, {1: 10.0, 2: 10.0, 3: 5.0})
    assert exchange.given_up() == {}
    exchange.see(1, Wanted.MEANS, 100)
    exchange.see(2, Wanted.MEANS, 100)
    exchange.pass_to(20.0, {3: 5.0})
    assert exchange.given_up() == {3: pytest.approx(14.0, abs=2 * LOOK_S)}


def test_two_hurried_partners_do_not_excuse_each_other() -> None:
    exchange = Exchange(hurried=[2, 3])
    exchange.see(1, None, NUM_BYTES)
    exchange.see(2, Wanted.VALUES, 0)
    exchange.see(3, Wanted.VALUES, 0)
    exchange.pass_to(6.0)
    assert exchange.given_up().keys() == {2, 3}


def test_an_unknown_bandwidth_says_nothing_about_how_long_an_answer_takes() -> None:
    limits = times(3, bandwidths=[10_000_000, 0, 4096])
    assert limits.answer_s(1) == ANSWER_S
    assert limits.answer_s(2) == 4.0
    assert limits.answer_s(1, 4096.0) == 4.0


@pytest.mark.parametrize(("rtt_s", "limit_s"), [(0.01, LOOK_S), (0.15, 1.5), (3.0, ANSWER_S)])
def test_a_hurried_member_has_ten_round_trips_to_open_its_stream(rtt_s: float, limit_s: float) -> None:
    limits = times(3, hurried=[2])
    assert limits.stream_s(1, rtt_s) == TWO_DIALS_S
    assert limits.stream_s(2, rtt_s) == pytest.approx(limit_s)
