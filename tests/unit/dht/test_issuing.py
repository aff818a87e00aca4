"""Records of this peer: their sequence numbers, signatures and limits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.errors import ConfigError
from manyhands.dht.config import DhtConfig
from manyhands.dht.issuing import Issuer
from manyhands.dht.records import MAX_SEQUENCE, fault_of
from tests.unit.dht.examples import ALICE, MALLORY, WALL_NOW, open_record


@given(st.lists(st.floats(0, 2e9), min_size=2, max_size=20))
def test_sequence_numbers_rise_whatever_the_clock_does(times: list[float]) -> None:
    clock = iter(times)
    issuer = Issuer(ALICE, DhtConfig(), lambda: next(clock))
    sequences = [issuer.issue("key", ALICE.peer_id, 1, 60.0).sequence for _ in times]
    assert sequences == sorted(set(sequences))


def test_own_records_are_signed_and_others_are_open() -> None:
    issuer = Issuer(ALICE, DhtConfig(), lambda: WALL_NOW)
    owned, unowned = issuer.issue("key", ALICE.peer_id, 1, 60), issuer.issue("key", "x", 1, 60)
    assert owned.owner == ALICE.peer_id
    assert unowned.owner == ""
    assert fault_of(owned, DhtConfig()) is None
    assert fault_of(unowned, DhtConfig()) is None


def test_after_a_restart_with_an_earlier_clock_own_records_can_be_replaced() -> None:
    before = Issuer(ALICE, DhtConfig(), lambda: WALL_NOW).issue("key", ALICE.peer_id, "before", 60.0)
    issuer = Issuer(ALICE, DhtConfig(), lambda: WALL_NOW - 3600)
    stale = issuer.issue("key", ALICE.peer_id, "after", 60.0)
    above = issuer.sequence_to_exceed(stale, [before])
    assert above is not None
    again = issuer.issue("key", ALICE.peer_id, "after", 60.0, above)
    assert again.supersedes(before)
    assert issuer.issue("other key", ALICE.peer_id, 1, 60.0).sequence > again.sequence


def test_a_liar_cannot_push_the_numbers_to_their_end() -> None:
    issuer = Issuer(ALICE, DhtConfig(), lambda: WALL_NOW)
    record = issuer.issue("key", ALICE.peer_id, 1, 60.0)
    forged = open_record(subkey=ALICE.peer_id, sequence=MAX_SEQUENCE - 1).signed_by(MALLORY)
    elsewhere = open_record(subkey="x", sequence=MAX_SEQUENCE - 1)
    assert issuer.sequence_to_exceed(record, [forged, elsewhere]) is None
    unowned = issuer.issue("key", "x", 1, 60.0)
    assert issuer.sequence_to_exceed(unowned, [open_record(subkey="x", sequence=MAX_SEQUENCE)]) is None
    above = issuer.sequence_to_exceed(unowned, [elsewhere])
    assert issuer.issue("key", "x", 1, 60.0, above or 0).sequence == MAX_SEQUENCE
    assert issuer.issue("key", "y", 1, 60.0).sequence < MAX_SEQUENCE, "an open record moves only its own number"


def test_a_later_record_of_the_same_process_is_no_reason_to_write_again() -> None:
    issuer = Issuer(ALICE, DhtConfig(), lambda: WALL_NOW)
    slow = issuer.issue("key", ALICE.peer_id, "slow", 60.0)
    fast = issuer.issue("key", ALICE.peer_id, "fast", 60.0)
    assert issuer.sequence_to_exceed(slow, [fast]) is None


@pytest.mark.parametrize(
    ("key", "subkey", "value", "ttl_s", "message"),
    [
        ("", "", 1, 60.0, "key is empty"),
        (5, "", 1, 60.0, "key 5 is a int; it must be a str, such as 'my-run.progress'"),
        (None, "", 1, 60.0, "key None is a NoneType"),
        (b"x", "", 1, 60.0, "key b'x' is a bytes"),
        (b"", "", 1, 60.0, "key b'' is a bytes"),
        (("a",), "", 1, 60.0, r"key \('a',\) is a tuple"),
        ("key", 0, 1, 60.0, "subkey 0 is a int"),
        ("key", "", 1, "60", "ttl_s is '60'"),
        ("k" * 257, "", 1, 60.0, "has 257 characters"),
        ("\ud800", "", 1, 60.0, "is not text"),
        ("key", "s" * 129, 1, 60.0, "has 129 characters"),
        ("key", MALLORY.peer_id, 1, 60.0, "another peer's id"),
        ("key", "", b"v" * 65536, 60.0, "at most 65536 fit"),
        ("key", "", object(), 60.0, "cannot store a object"),
        ("key", "", 1, 0.0, "ttl_s is 0.0"),
        ("key", "", 1, 86401.0, "ttl_s is 86401"),
        ("key", "", 1, float("nan"), "ttl_s is nan"),
    ],
)
def test_a_wrong_argument_is_named(key: Any, subkey: Any, value: object, ttl_s: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Issuer(ALICE, DhtConfig(), lambda: WALL_NOW).issue(key, subkey, value, ttl_s)
