from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.averaging.allreduce.checks import Told
from manyhands.averaging.allreduce.means import BadRecord, MeansRecords, parts_of
from manyhands.averaging.messages import SpanResult
from tests.unit.averaging.groups import group_of

CHUNK = 5
CHUNKS = st.tuples(st.integers(0, 3), st.sets(st.integers(0, 3), min_size=1))
"""The reducer of a chunk, and who contributed to it."""


def test_a_round_in_which_all_contribute_to_everything_has_no_parts() -> None:
    group = group_of(3, weights=[1.0, 0.0, 1.0])
    assert parts_of([(slice(0, 10), 0, [0, 2]), (slice(10, 20), 2, [0, 2])], group) == []


def test_a_sender_that_died_half_way_contributed_to_what_it_had_delivered() -> None:
    held = [(slice(10, 20), 1, [0, 1]), (slice(0, 5), 0, [0, 1, 2]), (slice(5, 10), 0, [0, 1])]
    assert parts_of(held, group_of(3)) == [
        SpanResult(0, 5, 0, []), SpanResult(5, 10, 0, [2]), SpanResult(10, 20, 1, [2])
    ]  # fmt: skip


def test_a_member_that_took_no_part_in_the_exchange_is_absent() -> None:
    assert parts_of([(slice(0, 20), 0, [0, 2])], group_of(3)) == [SpanResult(0, 20, 0, [1])]


@given(st.lists(CHUNKS, min_size=1, max_size=12))
def test_parts_lie_end_to_end_and_say_of_each_chunk_who_is_in_it(chunks: list[tuple[int, set[int]]]) -> None:
    group = group_of(4)
    held = [
        (slice(CHUNK * number, CHUNK * (number + 1)), reducer, sorted(present))
        for number, (reducer, present) in enumerate(chunks)
    ]
    parts = parts_of(held, group)
    if all(len(present) == 4 for _, present in chunks):
        assert parts == []
        return
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == CHUNK * len(chunks)
    for number, (reducer, present) in enumerate(chunks):
        (part,) = [part for part in parts if part.start <= CHUNK * number < part.stop]
        assert (part.reducer, part.absent) == (reducer, sorted(set(range(4)) - present))


@given(st.integers(1, 20), st.data())
def test_records_survive_the_wire(num_members: int, data: st.DataObject) -> None:
    sizes = st.lists(st.floats(0.0, width=32), min_size=num_members, max_size=num_members)
    told = Told(data.draw(sizes), data.draw(sizes))
    records = MeansRecords(num_members, range(num_members), is_measured=True, has_products=True)
    presents = data.draw(st.lists(st.sets(st.integers(0, num_members - 1), min_size=1).map(sorted), max_size=5))
    record = records.encode(presents, told)
    assert len(record) == records.num_bytes(len(presents))
    assert records.read(record) == (presents, told)


@pytest.mark.parametrize("record", [b"\x00", b"\x02", b"\x08", b"\x01\x00"])
def test_records_that_cannot_be_are_refused(record: bytes) -> None:
    with pytest.raises(BadRecord):
        MeansRecords(3, [0, 2]).read(record)


@pytest.mark.parametrize("norm", [-1.0, float("nan")])
def test_norms_that_cannot_be_are_refused(norm: float) -> None:
    records = MeansRecords(2, [0, 1], is_measured=True)
    with pytest.raises(BadRecord, match="negative, or not a number"):
        records.read(records.encode([[0, 1]], Told([1.0, norm], [])))
