"""Ids, configuration, messages, hand-over and issuing: the small parts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.errors import ConfigError
from manyhands.base.identity import PeerId
from manyhands.dht.config import MAX_CONTACTS, MAX_FOUND_RECORDS, MAX_STORED_RECORDS, MAX_VALUE_BYTES, DhtConfig
from manyhands.dht.ids import distance, id_from_bytes, id_to_bytes, key_id, node_id
from manyhands.dht.issuing import Issuer
from manyhands.dht.messages import FindRequest, FindResponse, StoreOutcome, StoreRequest, StoreResponse
from manyhands.dht.records import MAX_KEY_LENGTH, MAX_SEQUENCE, AgedRecord, Reason, fault_of
from manyhands.dht.replication import ReplicationPlanner
from manyhands.dht.routing import MAX_ADDRESS_LENGTH, MAX_ADDRESSES, Contact
from manyhands.dht.storage import Storage
from manyhands.rpc.frames import MAX_FRAME_BYTES
from tests.unit.dht.examples import ALICE, MALLORY, WALL_NOW, open_record, owned_record

IDS = st.integers(0, 2**256 - 1)


class TestIds:
    def test_points_are_sha256_of_the_text(self) -> None:
        expected = 0xBA7816BF8F01CFEA414140DE5DAE2223B00361A396177A9CB410FF61F20015AD  # FIPS 180, example "abc"
        assert node_id(PeerId("abc")) == key_id("abc") == expected

    @given(IDS, IDS, IDS)
    def test_distance_is_a_metric(self, a: int, b: int, c: int) -> None:
        assert distance(a, b) == distance(b, a)
        assert (distance(a, b) == 0) == (a == b)
        assert distance(a, c) <= distance(a, b) + distance(b, c)

    @given(IDS)
    def test_a_point_survives_the_wire(self, point: int) -> None:
        assert id_from_bytes(id_to_bytes(point)) == point


class TestConfig:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"k": 0},
            {"k": 65},
            {"replicas": 21},
            {"alpha": -1},
            {"request_timeout_s": float("nan")},
            {"refresh_period_s": float("inf")},
            {"max_requests_per_s_of_peer": 0},
            {"max_value_bytes": 65537},
        ],
    )
    def test_a_wrong_value_is_named(self, wrong: dict[str, float]) -> None:
        ((name, value),) = wrong.items()
        with pytest.raises(ConfigError, match=f"{name} is {value}"):
            DhtConfig(**wrong)  # type: ignore[arg-type]


class TestMessages:
    def test_the_largest_messages_fit_into_a_frame(self) -> None:
        largest = AgedRecord(
            msgspec.structs.replace(owned_record(key="k" * MAX_KEY_LENGTH), value=b"v" * MAX_VALUE_BYTES), 1.0
        )
        outcome = StoreOutcome(False, "stale", largest)
        store = StoreRequest([largest] * MAX_STORED_RECORDS)
        answer = StoreResponse([outcome] * MAX_STORED_RECORDS)
        margin = 1000  # of the frame around a message
        for message in (store, answer, largest_answer()):
            assert len(msgspec.msgpack.encode(message)) < MAX_FRAME_BYTES - margin
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message

    @pytest.mark.parametrize(
        "hostile",
        [
            {"target": b"short"},
            {"target": b"\0" * 32, "key": "k" * 257},
            {"target": b"\0" * 32, "key": 3},
        ],
    )
    def test_requests_that_break_the_schema_are_not_decoded(self, hostile: dict[str, object]) -> None:
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(hostile), type=FindRequest)


def largest_answer() -> FindResponse:
    """A page of the smallest records of a key that has more, and all contacts."""
    storage = Storage(DhtConfig())
    for number in range(2 * MAX_FOUND_RECORDS):
        storage.put(open_record("v" * 230, subkey=f"{number:06}"), 1000.0, 0.0)
    page, is_more = storage.page("key", None, 0.0)
    assert is_more
    assert len(page) > 900
    longest = Contact(PeerId("p" * 64), ["a" * MAX_ADDRESS_LENGTH] * MAX_ADDRESSES)
    return FindResponse([longest] * MAX_CONTACTS, [held.aged(0.0) for held in page], is_more=is_more)


class TestHandover:
    def test_a_newcomer_is_given_what_it_should_hold_once(self) -> None:
        handover = ReplicationPlanner()
        replicas = {"near": [PeerId("old")], "far": [PeerId("other")]}
        for peer_id, keys in handover.plan(replicas, replicas.__getitem__).items():
            handover.given(peer_id, keys)
        replicas["near"] = [PeerId("new"), PeerId("old")]
        assert handover.plan(replicas, replicas.__getitem__) == {"new": ["near"]}
        assert handover.plan(replicas, replicas.__getitem__) == {"new": ["near"]}, "it did not arrive"
        handover.given(PeerId("new"), ["near"])
        assert handover.plan(replicas, replicas.__getitem__) == {}

    def test_a_peer_that_was_lost_or_was_no_replica_for_a_while_is_given_the_key_again(self) -> None:
        handover = ReplicationPlanner()
        handover.plan(["key"], lambda _: [PeerId("a"), PeerId("b")])
        handover.given(PeerId("a"), ["key"])
        handover.given(PeerId("b"), ["key"])
        handover.forget(PeerId("a"))
        assert handover.plan(["key"], lambda _: [PeerId("a")]) == {"a": ["key"]}
        assert handover.plan(["key"], lambda _: [PeerId("b")]) == {"b": ["key"]}, "b was not among the replicas"

    def test_keys_that_expired_are_forgotten(self) -> None:
        handover = ReplicationPlanner()
        handover.given(PeerId("a"), [f"key-{number}" for number in range(100)])
        handover.plan(["key-1"], lambda _: [PeerId("a")])
        assert handover.plan(["key-1", "key-2"], lambda _: [PeerId("a")]) == {"a": ["key-2"]}


class TestIssuer:
    @given(st.lists(st.floats(0, 2e9), min_size=2, max_size=20))
    def test_sequence_numbers_rise_whatever_the_clock_does(self, times: list[float]) -> None:
        clock = iter(times)
        issuer = Issuer(ALICE, DhtConfig(), lambda: next(clock))
        sequences = [issuer.issue("key", ALICE.peer_id, 1, 60.0).sequence for _ in times]
        assert sequences == sorted(set(sequences))

    def test_own_records_are_signed_and_others_are_open(self) -> None:
        issuer = Issuer(ALICE, DhtConfig(), lambda: WALL_NOW)
        owned, unowned = issuer.issue("key", ALICE.peer_id, 1, 60), issuer.issue("key", "x", 1, 60)
        assert owned.owner == ALICE.peer_id
        assert unowned.owner == ""
        assert fault_of(owned, DhtConfig()) is None
        assert fault_of(unowned, DhtConfig()) is None

    def test_after_a_restart_with_an_earlier_clock_own_records_can_be_replaced(self) -> None:
        before = Issuer(ALICE, DhtConfig(), lambda: WALL_NOW).issue("key", ALICE.peer_id, "before", 60.0)
        issuer = Issuer(ALICE, DhtConfig(), lambda: WALL_NOW - 3600)
        stale = issuer.issue("key", ALICE.peer_id, "after", 60.0)
        above = issuer.sequence_to_exceed(stale, [before])
        assert above is not None
        again = issuer.issue("key", ALICE.peer_id, "after", 60.0, above)
        assert again.supersedes(before)
        assert issuer.issue("other key", ALICE.peer_id, 1, 60.0).sequence > again.sequence

    def test_a_liar_cannot_push_the_numbers_to_their_end(self) -> None:
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

    def test_a_later_record_of_the_same_process_is_no_reason_to_write_again(self) -> None:
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
    def test_a_wrong_argument_is_named(self, key: Any, subkey: Any, value: object, ttl_s: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Issuer(ALICE, DhtConfig(), lambda: WALL_NOW).issue(key, subkey, value, ttl_s)


def test_accepted_and_unchanged_are_the_reasons_that_mean_stored() -> None:
    assert {reason for reason in Reason if reason.is_stored} == {Reason.ACCEPTED, Reason.UNCHANGED}
