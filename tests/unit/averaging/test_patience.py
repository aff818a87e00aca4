"""How long a peer waits for whom before its round."""

from __future__ import annotations

import math

import pytest

from manyhands.averaging.attendees import Attendees
from manyhands.averaging.matchmaking.patience import (
    BATCH_MARGIN,
    LEAST_SHARE,
    MAX_HALVINGS,
    LeaderWaits,
    Wait,
    half_came_at,
    leader_waits,
    patience_s,
)
from manyhands.averaging.messages import Member, Position
from manyhands.averaging.roster import Roster, Standing
from manyhands.averaging.timing import DIAL_S
from manyhands.base.identity import PeerId

A, B, C, D, G = (PeerId(name) for name in "abcdg")
P_S = 8.0
ROSTER = Roster({one: Standing(3, is_member=True, can_lead=True) for one in (A, B, C, D)})


def who(roster: Roster | None = ROSTER) -> Attendees:
    others = (B, C, D, G)
    return Attendees(A, Position(3, b"here"), dict.fromkeys(others, False), others, roster=roster)


def waits(**since: float) -> dict[PeerId, Wait]:
    """Of peers that ask from an instant on, each for its whole patience."""
    return {PeerId(name): Wait(Member(PeerId(name), [], False, 1.0), at, at + P_S) for name, at in since.items()}


def of_leader(asking: dict[PeerId, Wait], *, led_at: float = 100.0) -> LeaderWaits:
    return leader_waits(who(), asking, P_S, stepped_at=90.0, led_at=led_at)


def test_each_troubled_round_and_each_failed_attempt_halves_it_down_to_a_sixteenth() -> None:
    assert [patience_s(P_S, 0), patience_s(P_S, 1), patience_s(P_S, 1, 2)] == [P_S, P_S / 2, P_S / 8]
    assert patience_s(P_S, 3, 9) == P_S * 0.5**MAX_HALVINGS


@pytest.mark.parametrize(("batch_s", "expected_s"), [(0.1, P_S / 8), (4.0, BATCH_MARGIN * 4.0), (60.0, P_S)])
def test_members_may_finish_a_batch_but_are_never_waited_for_longer_than_the_matchmaking_time(
    batch_s: float, expected_s: float
) -> None:
    assert patience_s(P_S, 3, 0, batch_s) == expected_s


def test_a_leader_waits_from_when_half_of_the_members_had_asked() -> None:
    assert half_came_at(who(), waits(b=95.0)) == math.inf
    assert half_came_at(who(), waits(b=95.0, g=96.0)) == math.inf, "a guest does not count"
    assert half_came_at(who(), waits(b=95.0, c=97.0)) == 97.0
    assert half_came_at(who(None), waits(g=95.0)) == 95.0, "without a roster the first one counts"
    assert of_leader(waits(b=95.0)).members == 103.0, "then b goes elsewhere"
    assert of_leader(waits(b=97.0, c=99.0)).members == 99.0 + P_S
    assert of_leader(waits(b=80.0, c=81.0)).members == 100.0 + LEAST_SHARE * P_S, "however early they came"


def test_guests_have_the_time_of_a_step_and_clients_that_cannot_be_called_that_of_a_dial() -> None:
    assert of_leader({}) == LeaderWaits(100.0 + P_S, 100.0 + P_S, 100.0 + DIAL_S), "the step took 10 s"
    assert of_leader({}, led_at=93.0).guests == 96.0
