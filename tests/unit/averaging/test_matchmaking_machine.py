"""What one peer, honest or not, can change in another one's search: events in, actions out."""

from __future__ import annotations

import pytest

from manyhands.averaging.attendees import Attendees
from manyhands.averaging.matchmaking.matchmaking_machine import (
    BEHIND,
    BUSY,
    GONE,
    LATE,
    LOOP_AWAY,
    Abort,
    Ask,
    Asked,
    Call,
    Called,
    CallFailed,
    Close,
    Due,
    Failed,
    Looked,
    Matchmaking,
    Refuse,
    RoundOver,
    SentOn,
    Stage,
)
from manyhands.averaging.matchmaking.patience import BATCH_MARGIN, GUEST_SHARE
from manyhands.averaging.messages import Late, Member, Position
from manyhands.averaging.roster import Roster, Standing, Trouble
from manyhands.base.identity import PeerId

A, B, C, D, G = (PeerId(name) for name in "abcdg")
HERE = Position(3, b"here")
P_S = 8.0


def member(peer: PeerId) -> Member:
    return Member(peer, [], False, 1.0)


def seen_by(
    peer: PeerId, *, guests: tuple[PeerId, ...] = (), batch_s: float = 0.0, trouble: tuple[Trouble, ...] = ()
) -> Attendees:
    """A run of four members, who lead in this order."""
    standings = {one: Standing(3, is_member=True, can_lead=True) for one in (A, B, C, D)}
    others = [one for one in (A, B, C, D, *guests) if one != peer]
    roster = Roster(standings, trouble=trouble)
    return Attendees(peer, HERE, dict.fromkeys(others, False), others, roster=roster, batch_s=batch_s)


def leading(
    now: float = 10.0, guests: tuple[PeerId, ...] = (), trouble: tuple[Trouble, ...] = ()
) -> tuple[Matchmaking, Attendees]:
    machine, who = Matchmaking(A, 0.0), seen_by(A, guests=guests, trouble=trouble)
    machine.on(Due(member(A), P_S), now, who)
    return machine, who


def test_half_of_the_called_members_saying_that_the_run_went_on_end_the_call_and_one_does_not() -> None:
    machine, who = leading()
    assert not [one for one in machine.on(CallFailed(D, BEHIND, "step 4"), 10.1, who) if isinstance(one, Abort)]
    assert machine.stage is Stage.LEADING
    machine.on(Asked(member(B), P_S), 10.2, who)
    actions = machine.on(CallFailed(C, BEHIND, "step 4"), 10.3, who)
    assert Refuse((B,), BEHIND, "step 4") in actions
    assert any(isinstance(one, Abort) for one in actions)


@pytest.mark.parametrize("patience_s", [0.0, 1e6])
def test_an_early_request_does_not_shorten_the_wait_for_the_others(patience_s: float) -> None:
    machine, who = Matchmaking(A, 0.0), seen_by(A)
    machine.on(Asked(member(D), patience_s), 2.0, who)
    machine.on(Due(member(A), P_S), 10.0, who)
    machine.on(Asked(member(D), P_S), 10.0, who)
    assert machine.on(Looked(), 10.0 + 0.9 * P_S, who) is not None
    assert machine.stage is Stage.LEADING
    (close,) = machine.on(Looked(), 10.0 + P_S, who)
    assert isinstance(close, Close)
    assert (close.late, close.missing) == (Late.MEMBERS, {B, C})


def test_refusing_a_peer_that_does_not_wait_sends_nobody_else_away() -> None:
    machine, who = Matchmaking(A, 0.0), seen_by(A)
    actions = machine.on(Asked(member(D), 0.0), 2.0, who)
    assert [(one.peers, one.code) for one in actions if isinstance(one, Refuse)] == [((D,), BUSY)]
    for number, peer in enumerate((B, C)):
        actions = machine.on(Asked(member(peer), P_S), 2.2 + number, who)
        assert not [one for one in actions if isinstance(one, Refuse)], "it waits for this peer's loop"


def test_a_leader_whose_round_failed_or_that_kept_this_peer_waiting_is_passed_over_for_less_time_each() -> None:
    machine, who = Matchmaking(D, 0.0), seen_by(D)
    assert machine.on(Due(member(D), P_S), 1.0, who) == [Ask(A, P_S)]
    assert machine.on(Failed(A, LATE, "no answer"), 20.0, who) == [Ask(B, P_S / 2)]
    machine.on(RoundOver(B, is_committed=False), 21.0, who)
    assert machine.on(Due(member(D), P_S), 21.0, who) == [Ask(C, P_S / 4)]


@pytest.mark.parametrize(("batch_s", "patience_s"), [(0.1, P_S / 8), (0.4 * P_S, BATCH_MARGIN * 0.4 * P_S), (P_S, P_S)])
def test_however_much_trouble_there_was_peers_may_finish_the_batch_in_which_a_call_finds_them(
    batch_s: float, patience_s: float
) -> None:
    machine, who = Matchmaking(D, 0.0), seen_by(D, trouble=(Trouble.MEMBER,) * 3, batch_s=batch_s)
    assert machine.on(Due(member(D), P_S), 1.0, who) == [Ask(A, pytest.approx(patience_s))]


def test_a_peer_that_is_sent_to_a_leader_which_it_has_lost_leads_until_another_one_does() -> None:
    machine, who = Matchmaking(D, 0.0), seen_by(D)
    machine.on(Due(member(D), P_S), 1.0, who)
    machine.on(Failed(A, GONE, "lost"), 2.0, who)
    assert machine.on(SentOn(A), 2.1, who) == [Ask(C, P_S)], "B has not noticed yet"
    machine.on(SentOn(B), 2.2, who)
    assert machine.stage is Stage.LEADING
    assert machine.on(Called(B), 2.3, who) == [Ask(B, P_S)]


def test_a_leader_that_was_busy_is_asked_again_when_it_calls_but_only_once() -> None:
    machine, who = Matchmaking(B, 0.0), seen_by(B)
    machine.on(Due(member(B), P_S), 1.0, who)
    machine.on(Failed(A, BUSY, "its loop is away"), 9.0, who)
    assert machine.stage is Stage.LEADING
    assert machine.on(Called(A), 9.1, who) == [Ask(A, P_S)]
    machine.on(Failed(A, BUSY, "its loop is away"), 9.2, who)
    assert machine.stage is Stage.LEADING
    assert machine.on(Called(A), 9.3, who) == []


def alone_after(failed: Failed, *, is_client: bool) -> str:
    """Why the search of one of two peers ends after the other one, which is not expected any more, gave no place."""
    both, neither = (
        Attendees(B, HERE, others, list(others), is_client=is_client, roster=Roster()) for others in ({A: False}, {})
    )
    machine = Matchmaking(B, 0.0)
    assert machine.on(Due(member(B), P_S), 1.0, both) == [Ask(A, P_S)]
    actions = machine.on(failed, 9.0, both) + machine.on(Looked(), 9.1, neither)
    (reason,) = [one.reason for one in actions if isinstance(one, Abort)]
    return reason


@pytest.mark.parametrize("is_client", [False, True])
def test_a_peer_whose_partner_answers_but_does_not_come_does_not_say_that_it_cannot_be_reached(is_client: bool) -> None:
    assert alone_after(Failed(A, BUSY, LOOP_AWAY), is_client=is_client) == LOOP_AWAY
    lost = alone_after(Failed(A, GONE, "connection refused"), is_client=is_client)
    assert lost.endswith("; connection refused")
    assert "can be reached" in lost


def test_a_peer_whose_loop_is_away_calls_nobody_that_it_has_refused() -> None:
    machine, who = Matchmaking(A, 0.0), seen_by(A)
    machine.on(Asked(member(B), P_S), 1.0, who)
    machine.on(Asked(member(C), 2 * P_S), 1.0, who)
    machine.on(Asked(member(D), 2 * P_S), 1.0, who)
    assert machine.on(Looked(), 1.0 + P_S, who) == [Refuse((B,), BUSY, LOOP_AWAY)]
    assert machine.on(Looked(), 5.0 + P_S, who) == []
    assert machine.on(Due(member(A), P_S), 6.0 + P_S, who) == [Call(B)]


@pytest.mark.parametrize(("was_late", "share"), [(False, 1.0), (True, GUEST_SHARE)])
def test_a_leader_waits_for_guests_for_a_step_or_a_tenth_of_it(was_late: bool, share: float) -> None:
    machine, who = leading(now=4.0, guests=(G,), trouble=(Trouble.WAIT,) if was_late else ())
    for peer in (B, C, D):
        machine.on(Asked(member(peer), P_S), 4.0, who)
    assert machine.stage is Stage.LEADING
    assert machine.wake_at == pytest.approx(4.0 + 4.0 * share)
    (close,) = machine.on(Looked(), machine.wake_at, who)
    assert isinstance(close, Close)
    assert close.late == (Late.NOBODY if was_late else Late.GUESTS)


def test_unconnected_guests_are_not_waited_for() -> None:
    standings = {one: Standing(3, is_member=True, can_lead=True) for one in (A, B)}
    others = dict.fromkeys((B, C, G), False)
    who = Attendees(A, HERE, others, [B, C], roster=Roster(standings, 8))
    assert (who.members, who.guests) == ({B}, {C})
