"""Records of bulk connections: they come out as they went in, in their order only, or not at all."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.transport.chunks import CHUNK_BYTES, buffer_chunks
from manyhands.transport.record_memory import ROOM_BYTES
from manyhands.transport.sealing import (
    FIRST_BYTES,
    HEADER_BYTES,
    TAG_BYTES,
    BadRecord,
    Opener,
    RecordBuffer,
    Sealer,
)

SECRET = bytes(range(32))


def sealed(sealer: Sealer, plaintext: bytes) -> bytes:
    out = memoryview(bytearray(ROOM_BYTES))
    return bytes(out[: sealer.seal_into(memoryview(plaintext), out)])


def num_bytes_of(room: memoryview) -> int:
    """The size of the memory that a room is a part of."""
    memory: Any = room.obj
    return len(memory)


def arrived(records: RecordBuffer, data: bytes, cut: int) -> bytes:
    """What can be taken, when the data comes in pieces."""
    taken = b""
    while data:
        room = records.room()
        num_bytes = min(len(room), len(data), cut)
        assert num_bytes > 0
        room[:num_bytes] = data[:num_bytes]
        records.added(num_bytes)
        data = data[num_bytes:]
        target = memoryview(bytearray(CHUNK_BYTES))
        while num_taken := records.take_into(target):
            taken += target[:num_taken]
    return taken


@settings(max_examples=60)
@given(
    sizes=st.lists(st.one_of(st.integers(1, 300), st.integers(1, 2 * CHUNK_BYTES)), max_size=6),
    cut=st.one_of(st.integers(50, 5000), st.integers(5000, 2 * ROOM_BYTES)),
    records_of_one_key=st.integers(1, 4),
    is_chacha=st.booleans(),
    num_before=st.integers(0, 5000),
)
def test_bytes_come_out_in_order_however_they_are_cut(
    sizes: list[int], cut: int, records_of_one_key: int, is_chacha: bool, num_before: int
) -> None:
    sealer, opener = (
        kind(SECRET, is_chacha=is_chacha, records_of_one_key=records_of_one_key) for kind in (Sealer, Opener)
    )
    data = random.Random(cut).randbytes(sum(sizes))
    parts = [data[sum(sizes[:number]) :][:size] for number, size in enumerate(sizes)]
    sent = b"".join(sealed(sealer, bytes(chunk)) for chunk in buffer_chunks(parts))
    records = RecordBuffer(opener, sent[:num_before])
    target = memoryview(bytearray(len(data)))
    num_taken = records.take_into(target)
    assert bytes(target[:num_taken]) + arrived(records, sent[num_before:], cut) == data


@given(wanted=st.lists(st.integers(1, 2000), min_size=1, max_size=20))
def test_a_reader_that_takes_less_than_a_record_gets_the_rest_later(wanted: list[int]) -> None:
    data = random.Random(1).randbytes(sum(wanted))
    sealer = Sealer(SECRET)
    records = RecordBuffer(Opener(SECRET), b"".join(sealed(sealer, bytes(chunk)) for chunk in buffer_chunks([data])))
    taken = b""
    for num_bytes in wanted:
        target = memoryview(bytearray(num_bytes))
        assert records.take_into(target) == num_bytes
        taken += target
    assert taken == data
    assert not records.is_ready


def test_whole_records_are_decrypted_into_the_callers_memory() -> None:
    sealer = Sealer(SECRET)
    target = bytearray(1500)
    are_callers: list[bool] = []

    class NotingOpener(Opener):
        def open_into(self, record: memoryview, out: memoryview) -> None:
            are_callers.append(out.obj is target)
            super().open_into(record, out)

    records = RecordBuffer(NotingOpener(SECRET), sealed(sealer, b"a" * 1000) + sealed(sealer, b"b" * 1000))
    assert records.take_into(memoryview(target)) == 1500
    assert target == b"a" * 1000 + b"b" * 500
    assert are_callers == [True, False], "there is room for all of the first one"


def test_memory_for_long_records_goes_to_the_next_stream_unless_something_lies_in_it() -> None:
    sealer = Sealer(SECRET)
    first, second = sealed(sealer, b"a" * CHUNK_BYTES), sealed(sealer, b"b" * 100)
    records, target = RecordBuffer(Opener(SECRET)), bytearray(CHUNK_BYTES)

    def receive(data: bytes) -> Any:
        """Returns the memory that the last bytes lie in."""
        while data:
            room = records.room()
            num_bytes = min(len(room), len(data))
            room[:num_bytes] = data[:num_bytes]
            records.added(num_bytes)
            data = data[num_bytes:]
        return room.obj

    memory = receive(first)
    assert records.take_into(memoryview(target)) == CHUNK_BYTES
    assert receive(second[:10]) is memory
    records.rest()
    assert receive(second[10:]) is memory
    assert records.take_into(memoryview(target)[:100]) == 100
    records.rest()
    assert num_bytes_of(records.room()) < ROOM_BYTES
    other = RecordBuffer(Opener(SECRET), first[:HEADER_BYTES])
    assert other.room().obj is memory


def test_memory_for_records_of_64_kib_is_not_that_of_the_longest() -> None:
    record = sealed(Sealer(SECRET), b"a" * (1 << 16))
    records, target = RecordBuffer(Opener(SECRET)), bytearray(1 << 16)
    for start in range(0, len(record), 4000):
        part = record[start : start + 4000]
        room = records.room()
        room[: len(part)] = part
        records.added(len(part))
    assert num_bytes_of(room) < 1.1 * len(record)
    assert records.take_into(memoryview(target)) == len(target)
    assert set(target) == {ord("a")}
    records.rest()
    assert num_bytes_of(records.room()) == FIRST_BYTES


@pytest.mark.parametrize("at", [HEADER_BYTES, 50, HEADER_BYTES + 100, HEADER_BYTES + 100 + TAG_BYTES - 1])
def test_a_changed_bit_is_refused(at: int) -> None:
    record = bytearray(sealed(Sealer(SECRET), b"x" * 100))
    record[at] ^= 1
    with pytest.raises(BadRecord, match="altered"):
        RecordBuffer(Opener(SECRET), bytes(record)).take_into(memoryview(bytearray(100)))


def test_a_shorter_length_than_was_sealed_is_refused() -> None:
    record = bytearray(sealed(Sealer(SECRET), b"x" * 100))
    record[:HEADER_BYTES] = (99).to_bytes(HEADER_BYTES, "big")
    with pytest.raises(BadRecord):
        RecordBuffer(Opener(SECRET), bytes(record)).take_into(memoryview(bytearray(100)))


@pytest.mark.parametrize("order", [[1], [0, 0], [0, 2], [1, 0]], ids=["first lost", "repeated", "one lost", "swapped"])
def test_records_open_in_their_order_only(order: list[int]) -> None:
    sealer = Sealer(SECRET)
    parts = [sealed(sealer, bytes([number]) * 10) for number in range(3)]
    records = RecordBuffer(Opener(SECRET), b"".join(parts[number] for number in order))
    with pytest.raises(BadRecord, match="altered"):
        records.take_into(memoryview(bytearray(10 * len(order))))


def test_the_records_of_another_secret_are_refused() -> None:
    with pytest.raises(BadRecord):
        RecordBuffer(Opener(bytes(32)), sealed(Sealer(SECRET), b"x")).take_into(memoryview(bytearray(1)))


@pytest.mark.parametrize("num_plain", [0, CHUNK_BYTES + 1, 2**32 - 1])
def test_lengths_that_no_record_has_are_refused_before_anything_is_received(num_plain: int) -> None:
    records = RecordBuffer(Opener(SECRET), num_plain.to_bytes(HEADER_BYTES, "big"))
    with pytest.raises(BadRecord, match=f"a record of {num_plain} bytes"):
        _ = records.is_ready
    with pytest.raises(BadRecord):
        records.room()


def test_the_key_changes_after_a_number_of_records() -> None:
    sealer = Sealer(SECRET, records_of_one_key=2)
    keys = [sealer.next()[0] for _ in range(5)]
    assert keys[0] is keys[1] is not keys[2] is keys[3] is not keys[4]


@pytest.mark.parametrize(
    ("is_chacha", "record"),
    [
        (False, "000000032afbe1ddeca89a6147a34ba8ff4d77c931ed32 0000000313999bf78f7ef8576583b934cb64f333bcf4b1"),
        (True, "00000003fd9df0bf5f13fb8569a5bc3225b346684093aa 000000035d50999ba07203e25f0efc9cffa6e9a56dbcdf"),
    ],
)
def test_sealed_records_never_change(is_chacha: bool, record: str) -> None:
    """A change here breaks the peers of older versions: it needs a new ALPN."""
    sealer = Sealer(SECRET, is_chacha=is_chacha, records_of_one_key=1)
    assert [sealed(sealer, b"abc").hex() for _ in range(2)] == record.split()


def test_small_records_are_opened_a_few_at_a_time() -> None:
    sealer = Sealer(SECRET)
    records = RecordBuffer(Opener(SECRET), b"".join(sealed(sealer, b"x") for _ in range(10)))
    target = memoryview(bytearray(100))
    assert [records.take_into(target, 4) for _ in range(4)] == [4, 4, 2, 0]


def test_an_alert_of_the_handshake_is_said_in_words() -> None:
    with pytest.raises(BadRecord, match="refused the TLS handshake"):
        _ = RecordBuffer(Opener(SECRET), bytes.fromhex("15030300130102")).is_ready
