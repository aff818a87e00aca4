"""What DHT nodes send each other arrives as it was sent, and nothing that was signed survives a change."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.address import MAX_ADDRESS_LENGTH, MAX_ADDRESSES
from manyhands.base.identity import PeerId
from manyhands.dht.config import MAX_CONTACTS, MAX_FOUND_RECORDS, MAX_STORED_RECORDS, MAX_VALUE_BYTES, DhtConfig
from manyhands.dht.ids import ID_BYTES
from manyhands.dht.messages import FindRequest, FindResponse, StoreOutcome, StoreRequest, StoreResponse
from manyhands.dht.records import MAX_KEY_LENGTH, AgedRecord, Record, fault_of
from manyhands.dht.routing import Contact
from manyhands.dht.storage import Storage
from manyhands.rpc.frames import MAX_FRAME_BYTES
from tests.unit.dht.examples import ALICE, contact, open_record, owned_record

VALUES = st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=20) | st.binary(max_size=20)
RECORDS = st.builds(open_record, VALUES, subkey=st.text(max_size=20), sequence=st.integers(0, 2**62)) | st.builds(
    owned_record, VALUES, ttl_s=st.floats(0.001, 86400)
)
AGED = st.builds(AgedRecord, RECORDS, st.floats(0, 1e6))
CONTACTS = st.integers(0, 60_000).map(contact)
MESSAGES = st.one_of(
    st.builds(FindRequest, st.binary(min_size=ID_BYTES, max_size=ID_BYTES), st.none() | st.text(max_size=256)),
    st.builds(FindResponse, st.lists(CONTACTS, max_size=4), st.lists(AGED, max_size=3)),
    st.builds(StoreRequest, st.lists(AGED, max_size=3)),
    st.builds(
        StoreResponse,
        st.lists(st.builds(StoreOutcome, st.booleans(), st.text(max_size=64), st.none() | AGED), max_size=3),
    ),
)


@given(MESSAGES)
def test_messages_survive_the_wire(message: msgspec.Struct) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message


SIGNED = owned_record({"step": 3})
ENCODED = msgspec.msgpack.encode(SIGNED)


@given(st.integers(0, len(ENCODED) - 1), st.integers(1, 255))
def test_no_changed_byte_of_a_signed_record_changes_what_it_says(place: int, change: int) -> None:
    changed = ENCODED[:place] + bytes([ENCODED[place] ^ change]) + ENCODED[place + 1 :]
    try:
        record = msgspec.msgpack.decode(changed, type=Record)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    if record.owner and fault_of(record, DhtConfig()) is None:
        assert record.signed_bytes() == SIGNED.signed_bytes()
        assert record.owner == ALICE.peer_id


@pytest.mark.parametrize(
    "message",
    [
        FindRequest(b"x" * 31),
        FindRequest(b"x" * 33),
        FindRequest(b"x" * 32, "k" * 257),
        FindResponse([contact(1)] * (MAX_CONTACTS + 1)),
        FindResponse([Contact(ALICE.peer_id, ["x" * 401])]),
        FindResponse([Contact(ALICE.peer_id, ["x"] * 9)]),
        StoreRequest([AgedRecord(open_record(), 0.0)] * (MAX_STORED_RECORDS + 1)),
        StoreRequest([AgedRecord(msgspec.structs.replace(open_record(), sequence=-1), 0.0)]),
        StoreResponse([StoreOutcome(True, "x" * 65)]),
    ],
)
def test_messages_out_of_bounds_are_not_even_decoded(message: msgspec.Struct) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


def test_the_largest_messages_fit_into_a_frame() -> None:
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
def test_requests_that_break_the_schema_are_not_decoded(hostile: dict[str, object]) -> None:
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
