from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.errors import ConfigError
from manyhands.base.identity import verify
from manyhands.dht.config import DhtConfig
from manyhands.dht.records import (
    AgedRecord,
    Reason,
    Record,
    decode_value,
    encode_value,
    examined,
    fault_of,
    remaining_s,
)
from tests.unit.dht.examples import ALICE, MALLORY, WALL_NOW, open_record, owned_record

CONFIG = DhtConfig()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@given(VALUES)
def test_a_value_comes_back_as_it_was_stored(value: Any) -> None:
    assert decode_value(encode_value(value)) == value


@given(st.binary(max_size=200))
def test_bytes_of_a_stranger_decode_or_are_a_value_error(raw: bytes) -> None:
    try:
        decode_value(raw)
    except ValueError:
        assert fault_of(open_record_of(raw), CONFIG) is Reason.MALFORMED
    else:
        assert fault_of(open_record_of(raw), CONFIG) is None


def open_record_of(raw: bytes) -> Record:
    return msgspec.structs.replace(open_record(), value=raw)


@pytest.mark.parametrize("raw", [b"\x91" * 60000 + b"\xc0", b"\x81" * 60000, b"\xdd\xff\xff\xff\xff", b"\xa1\xff", b""])
def test_hostile_values_are_malformed(raw: bytes) -> None:
    assert fault_of(open_record_of(raw), CONFIG) is Reason.MALFORMED


def test_values_are_nested_32_deep_at_most() -> None:
    assert decode_value(encode_value(nested(32))) == nested(32)
    with pytest.raises(ConfigError, match="within each other"):
        encode_value(nested(33))


@pytest.mark.parametrize("value", [object(), {1, 2, print}, 2**70, "\ud800"])
def test_storing_a_value_that_msgpack_cannot_hold_is_a_config_error(value: Any) -> None:
    with pytest.raises(ConfigError, match="cannot store a"):
        encode_value(value)


def test_the_signed_bytes_are_the_same_for_ever() -> None:
    record = open_record({"step": 3}, subkey="s", sequence=7, issued_at=1.5, ttl_s=2)
    golden = "96a36b6579a173c40781a47374657003" + "07cb3ff8000000000000" + "cb4000000000000000"
    assert record.signed_by(ALICE).signed_bytes().hex() == golden


@given(VALUES, st.integers(0, 2**62), st.floats(0, 2e9), st.floats(0.001, 86400))
def test_a_signed_record_survives_the_wire(value: Any, sequence: int, issued_at: float, ttl_s: float) -> None:
    record = owned_record(value, sequence=sequence, issued_at=issued_at, ttl_s=ttl_s)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=Record)
    assert received == record
    assert fault_of(received, CONFIG) is None


CHANGES = {
    "key": "another key",
    "value": encode_value(2),
    "sequence": 2,
    "issued_at": WALL_NOW + 1,
    "ttl_s": 61.0,
    "signature": b"\0" * 64,
}


@pytest.mark.parametrize("field", CHANGES)
def test_nothing_that_is_signed_can_be_changed(field: str) -> None:
    forged = msgspec.structs.replace(owned_record(), **{field: CHANGES[field]})
    assert fault_of(forged, CONFIG) is Reason.BAD_SIGNATURE


def test_only_the_named_peer_may_write_its_subkey() -> None:
    theft = open_record(subkey=ALICE.peer_id)
    assert fault_of(theft, CONFIG) is Reason.WRONG_OWNER
    assert fault_of(theft.signed_by(MALLORY), CONFIG) is Reason.WRONG_OWNER
    pretended = msgspec.structs.replace(theft.signed_by(MALLORY), owner=ALICE.peer_id)
    assert fault_of(pretended, CONFIG) is Reason.BAD_SIGNATURE


def test_a_peer_id_has_one_spelling() -> None:
    subkey = ALICE.peer_id + " "  # base58 decoders take it for the same peer
    signed = open_record(subkey=subkey).signed_by(ALICE)
    assert fault_of(signed, CONFIG) is Reason.WRONG_OWNER
    assert fault_of(msgspec.structs.replace(signed, owner=subkey), CONFIG) is Reason.WRONG_OWNER


def test_an_open_record_has_no_owner() -> None:
    assert fault_of(open_record(subkey="anything"), CONFIG) is None
    assert fault_of(open_record(subkey="anything").signed_by(ALICE), CONFIG) is Reason.WRONG_OWNER


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, 86401.0, math.inf, math.nan])
def test_a_lifetime_is_above_0_and_at_most_a_day(ttl_s: float) -> None:
    assert fault_of(owned_record(ttl_s=ttl_s), CONFIG) is Reason.MALFORMED


@pytest.mark.parametrize("issued_at", [math.inf, math.nan])
def test_a_record_with_a_time_that_is_not_finite_is_malformed(issued_at: float) -> None:
    assert fault_of(owned_record(issued_at=issued_at), CONFIG) is Reason.MALFORMED


def test_size_is_checked_before_all_else() -> None:
    record = open_record_of(b"\xc1" * 101)
    assert fault_of(record, DhtConfig(max_value_bytes=100)) is Reason.TOO_LARGE


def test_a_record_lasts_until_its_age_reaches_its_lifetime() -> None:
    for record in (open_record(ttl_s=60.0), owned_record(ttl_s=60.0)):
        assert remaining_s(AgedRecord(record, 0.0), WALL_NOW, CONFIG) == 60.0
        assert remaining_s(AgedRecord(record, 59.0), WALL_NOW, CONFIG) == 1.0
        assert remaining_s(AgedRecord(record, 60.0), WALL_NOW, CONFIG) is Reason.EXPIRED
        assert remaining_s(AgedRecord(record, -5.0), WALL_NOW, CONFIG) == 60.0, "nobody can lengthen a life"
        assert remaining_s(AgedRecord(record, math.nan), WALL_NOW, CONFIG) is Reason.MALFORMED


@given(skew_s=st.floats(-60, 60), age_s=st.floats(0, 59.9))
def test_clocks_a_minute_apart_lose_nothing(skew_s: float, age_s: float) -> None:
    for record in (open_record(ttl_s=60.0), owned_record(ttl_s=60.0)):
        wall_now_there = WALL_NOW + age_s + skew_s
        assert remaining_s(AgedRecord(record, age_s), wall_now_there, CONFIG) == pytest.approx(60.0 - age_s, abs=1e-5)


def test_an_owned_record_cannot_be_played_back_after_its_time() -> None:
    record = owned_record(ttl_s=100.0)
    claimed = AgedRecord(record, 0.0)
    assert remaining_s(claimed, WALL_NOW + 161.0, CONFIG) is Reason.EXPIRED
    assert remaining_s(claimed, WALL_NOW + 150.0, CONFIG) == 10.0, "whatever the age is said to be"
    assert remaining_s(AgedRecord(open_record(ttl_s=100.0), 0.0), WALL_NOW + 1e6, CONFIG) == 100.0


def test_an_owned_record_from_the_future_is_refused() -> None:
    record = owned_record()
    assert remaining_s(AgedRecord(record, 0.0), WALL_NOW - 59.0, CONFIG) == 60.0
    assert remaining_s(AgedRecord(record, 0.0), WALL_NOW - 61.0, CONFIG) is Reason.FROM_THE_FUTURE


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=2, max_size=2, unique=True))
def test_of_two_different_records_exactly_one_counts(pair: list[tuple[int, int]]) -> None:
    one, other = (open_record(value, sequence=sequence) for sequence, value in pair)
    assert one.supersedes(other) != other.supersedes(one)
    assert not one.supersedes(one)
    if one.sequence > other.sequence:
        assert one.supersedes(other)


def test_a_record_is_verified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[Any] = []

    def count(*what: Any) -> None:
        verified.append(what)
        verify(*what)

    monkeypatch.setattr("manyhands.dht.records.verify", count)
    true, other = owned_record("verified once"), owned_record("another one")
    forged = msgspec.structs.replace(true, signature=other.signature)
    for _ in range(3):
        assert fault_of(true, CONFIG) is None
        assert fault_of(forged, CONFIG) is Reason.BAD_SIGNATURE
    assert len(verified) == 2


def test_a_record_that_comes_again_is_the_one_that_came_first_and_a_large_one_is_not_kept() -> None:
    first, again = owned_record("shared"), owned_record("shared")
    assert examined(first, CONFIG)[0] is examined(again, CONFIG)[0]
    large, copy = open_record("x" * 600), open_record("x" * 600)
    assert examined(large, CONFIG)[0] is large
    assert examined(copy, CONFIG)[0] is copy
    forged = msgspec.structs.replace(first, value=b"\x01")
    assert examined(forged, CONFIG) == (forged, Reason.BAD_SIGNATURE)


def test_verdicts_on_records_take_a_bounded_room(monkeypatch: pytest.MonkeyPatch) -> None:
    remembered: OrderedDict[bytes, Reason] = OrderedDict()
    monkeypatch.setattr("manyhands.dht.records._verdicts", remembered)
    monkeypatch.setattr("manyhands.dht.records.REMEMBERED_VERDICTS", 10)
    for number in range(50):
        assert fault_of(open_record(number), CONFIG) is None
        assert len(remembered) <= 10


def test_accepted_and_unchanged_are_the_reasons_that_mean_stored() -> None:
    assert {reason for reason in Reason if reason.is_stored} == {Reason.ACCEPTED, Reason.UNCHANGED}
