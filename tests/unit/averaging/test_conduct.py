"""What follows from how the others behaved; honest peers are never kept out."""

from __future__ import annotations

import pytest

from manyhands.averaging.matchmaking.conduct import (
    GOOD_ROUNDS,
    MAX_AVOIDED_S,
    REFUSED_S,
    STRIKES,
    Conduct,
)
from tests.unit.averaging.groups import peer

GOOD, BAD = peer(1), peer(2)
WAIT_S = 10.0


def after_a_good_round() -> Conduct:
    conduct = Conduct(WAIT_S)
    conduct.note_round([GOOD, BAD], [], 0.0)
    return conduct


def test_a_known_peer_may_be_late_once_and_is_then_waited_for_less_and_less() -> None:
    conduct, now = after_a_good_round(), 0.0
    conduct.note_in_vain(BAD, now)
    assert conduct.is_heeded(BAD, now)
    for number in range(8):
        conduct.note_in_vain(BAD, now)
        until = now + min(WAIT_S * 4.0**number, MAX_AVOIDED_S)
        assert not conduct.is_heeded(BAD, until - 0.1)
        assert list(conduct.awaited([GOOD, BAD], until - 0.1)) == [GOOD]
        assert conduct.is_heeded(BAD, until)
        assert not conduct.is_refused(BAD, now), "it has a place if it comes by itself"
        now = until
    conduct.note_round([GOOD, BAD], [], now)
    conduct.note_in_vain(BAD, now)
    assert conduct.is_heeded(BAD, now)


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
    conduct = Conduct(WAIT_S)
    for number in range(10_000):
        conduct.note_round([peer(number)], [], 0.0)
        conduct.note_in_vain(peer(number), 0.0)
        conduct.strike(peer(number), 0.0)
    assert max(len(known) for known in (conduct._avoided._known, conduct._strikes)) <= 4096
