"""What follows from how the others behaved; honest peers are never kept out."""

from __future__ import annotations

import pytest

from manyhands.averaging.conduct import (
    GOOD_ROUNDS,
    IN_VAIN_S,
    MAX_IN_VAIN_S,
    MAX_OFFENCES,
    OFFENCE_S,
    REFUSED_S,
    STRIKES,
    WARY_S,
    Conduct,
)
from tests.unit.averaging.groups import peer

GOOD, BAD = peer(1), peer(2)


def after_a_good_round() -> Conduct:
    conduct = Conduct()
    conduct.note_round([GOOD, BAD], [], 0.0)
    return conduct


def test_a_known_peer_may_be_late_once_and_is_then_waited_for_less_and_less() -> None:
    conduct, now = after_a_good_round(), 0.0
    conduct.note_in_vain(BAD, now)
    assert conduct.is_heeded(BAD, now)
    for number in range(8):
        conduct.note_in_vain(BAD, now)
        until = now + min(IN_VAIN_S * 2**number, MAX_IN_VAIN_S)
        assert not conduct.is_heeded(BAD, until - 0.1)
        assert list(conduct.awaited([GOOD, BAD], until - 0.1)) == [GOOD]
        assert conduct.is_heeded(BAD, until)
        assert not conduct.is_refused(BAD, now), "it has a place if it comes by itself"
        now = until
    conduct.note_round([GOOD, BAD], [], now)
    conduct.note_in_vain(BAD, now)
    assert conduct.is_heeded(BAD, now)


def test_after_a_newcomer_that_did_not_come_no_other_is_waited_for_that_is_heard_of_later() -> None:
    conduct = after_a_good_round()
    newcomer, earlier, later = peer(3), peer(4), peer(5)
    assert set(conduct.awaited([GOOD, newcomer, earlier], 1.0)) == {GOOD, newcomer, earlier}
    conduct.note_in_vain(newcomer, 5.0)
    assert set(conduct.awaited([GOOD, newcomer, earlier, later], 5.0)) == {GOOD, newcomer, earlier}, (
        "an identity costs nothing"
    )
    assert conduct.is_heeded(later, 5.0), "it has a place if it comes by itself"
    conduct.note_round([GOOD, later], [], 6.0)
    assert later in conduct.awaited([GOOD, later], 6.0)
    assert peer(6) in conduct.awaited([peer(6)], 5.0 + WARY_S)


def test_a_peer_that_spoils_round_after_round_gets_no_place_for_seconds() -> None:
    conduct = after_a_good_round()
    for _ in range(MAX_OFFENCES):
        conduct.note_round([GOOD, BAD], [BAD], 1.0)
        assert not conduct.is_refused(BAD, 1.0)
    conduct.note_round([GOOD, BAD], [BAD], 1.0)
    assert conduct.is_refused(BAD, 1.0)
    assert not conduct.is_refused(BAD, 1.0 + OFFENCE_S * 2**MAX_OFFENCES)


def test_values_that_are_too_large_three_times_cost_ten_minutes_then_twenty() -> None:
    conduct, now = after_a_good_round(), 0.0
    for number in range(4):
        for _ in range(STRIKES - 1):
            assert conduct.strike(BAD, now) == 0.0
            assert not conduct.is_refused(BAD, now)
        assert conduct.strike(BAD, now) == pytest.approx(REFUSED_S * 2**number)
        assert conduct.is_refused(BAD, now + REFUSED_S * 2**number - 0.1)
        now += REFUSED_S * 2**number
        assert not conduct.is_refused(BAD, now)


def test_an_odd_batch_now_and_then_is_forgiven() -> None:
    conduct = after_a_good_round()
    for _ in range(100):
        assert conduct.strike(BAD, 0.0) == 0.0
        conduct.note_round([GOOD, BAD], [BAD], 0.0)
        for _ in range(GOOD_ROUNDS):
            conduct.note_round([GOOD, BAD], [], 0.0)
    assert not conduct.is_refused(BAD, 0.0)


def test_what_is_remembered_is_bounded() -> None:
    conduct = Conduct()
    for number in range(10_000):
        conduct.note_round([peer(number)], [], 0.0)
        conduct.awaited([peer(number)], 0.0)
        conduct.note_in_vain(peer(number), 0.0)
        conduct.strike(peer(number), 0.0)
    assert max(len(known) for known in (conduct._in_vain, conduct._strikes, conduct._met, conduct._heard_of)) <= 4096
