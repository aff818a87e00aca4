"""What follows from how the others behaved; honest peers are never kept out."""

from __future__ import annotations

import pytest

from manyhands.averaging.conduct import (
    GOOD_ROUNDS,
    IN_VAIN_S,
    MAX_IN_VAIN_S,
    REFUSED_S,
    STRIKES,
    WARY_S,
    Conduct,
)
from tests.unit.averaging.groups import peer

GOOD, BAD, NEW = peer(1), peer(2), peer(3)


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


def test_one_stranger_that_does_not_come_has_no_other_waited_for_for_two_minutes() -> None:
    conduct = after_a_good_round()
    assert list(conduct.awaited([GOOD, NEW], 0.0)) == [GOOD, NEW]
    conduct.note_in_vain(peer(9), 0.0)
    assert list(conduct.awaited([GOOD, NEW], WARY_S - 0.1)) == [GOOD]
    assert not conduct.is_refused(NEW, 0.0)
    assert list(conduct.awaited([GOOD, NEW], WARY_S)) == [GOOD, NEW]


def test_a_peer_that_has_met_nobody_waits_for_everybody() -> None:
    conduct = Conduct()
    conduct.note_in_vain(peer(9), 0.0)
    assert list(conduct.awaited([GOOD, NEW], 0.0)) == [GOOD, NEW]


def test_a_stranger_that_gives_nothing_to_its_first_two_rounds_gets_no_place_for_a_while() -> None:
    conduct = after_a_good_round()
    conduct.note_round([GOOD, peer(4)], [peer(4)], 0.0)
    assert not conduct.is_refused(peer(4), 0.0), "it was too slow, perhaps, but gave a part"
    conduct.note_round([GOOD, NEW], [NEW], 0.0, [NEW])
    assert not conduct.is_refused(NEW, 0.0), "its link may be slow"
    conduct.note_round([GOOD, NEW], [NEW], 0.0, [NEW])
    assert conduct.is_refused(NEW, IN_VAIN_S - 0.1)
    assert not conduct.is_refused(NEW, IN_VAIN_S)
    conduct.note_round([GOOD, BAD], [BAD], 0.0, [BAD])
    assert not conduct.is_refused(BAD, 0.0), "it was good before"


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
        conduct.note_in_vain(peer(number), 0.0)
        conduct.strike(peer(number), 0.0)
    assert max(len(known) for known in (conduct._met, conduct._in_vain, conduct._strikes)) <= 4096
