"""Whom lookups pass over for a while."""

from __future__ import annotations

from manyhands.base.identity import PeerId
from manyhands.dht.missing import FIRST_S, MAX_PEERS, MOST_S, Missing

SOMEONE = PeerId("someone")


def test_from_failure_to_failure_it_is_passed_over_for_twice_as_long() -> None:
    missing = Missing()
    now, for_s = 100.0, FIRST_S
    for _ in range(8):
        missing.failed(SOMEONE, now)
        assert missing.is_missing(SOMEONE, now + for_s - 0.1)
        assert not missing.is_missing(SOMEONE, now + for_s)
        now, for_s = now + for_s, min(2 * for_s, MOST_S)


def test_whoever_is_heard_of_begins_anew() -> None:
    missing = Missing()
    missing.failed(SOMEONE, 0.0)
    missing.failed(SOMEONE, 0.0)
    missing.seen(SOMEONE)
    assert not missing.is_missing(SOMEONE, 0.0)
    missing.failed(SOMEONE, 0.0)
    assert not missing.is_missing(SOMEONE, FIRST_S)


def test_it_is_bounded() -> None:
    missing = Missing()
    for number in range(MAX_PEERS + 1):
        missing.failed(PeerId(f"peer {number}"), 0.0)
    assert len(missing) == MAX_PEERS
    assert not missing.is_missing(PeerId("peer 0"), 0.0)
    assert missing.is_missing(PeerId("peer 1"), 0.0)
