from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.averaging.allreduce.means import BadContribution, Contributions
from manyhands.averaging.messages import SpanResult

NUMEL = 20
SLICES = st.tuples(st.integers(0, NUMEL), st.integers(0, NUMEL)).filter(lambda ends: ends[0] < ends[1])
EVENTS = st.tuples(SLICES, st.integers(0, 3), st.none() | st.sets(st.integers(0, 3), min_size=1))


def test_a_round_in_which_all_contribute_to_everything_has_no_parts() -> None:
    held = Contributions(NUMEL, 3, [0, 2])
    held.add(0, 10, 0, [0, 2])
    assert held.missing() == (10, NUMEL)
    held.add(10, NUMEL, 2, [0, 2])
    assert held.missing() == (0, 0)
    assert held.parts() == []


def test_a_sender_that_died_half_way_contributed_to_what_it_had_delivered() -> None:
    held = Contributions(NUMEL, 3, [0, 1, 2])
    held.add(0, 5, 0, [0, 1, 2])
    held.add(5, 10, 0, [0, 1])
    held.add(10, NUMEL, 1, [0, 1])
    assert held.parts() == [SpanResult(0, 5, 0, []), SpanResult(5, 10, 0, [2]), SpanResult(10, NUMEL, 1, [2])]


@given(st.lists(EVENTS, max_size=12))
def test_parts_say_of_each_value_what_was_said_last(
    events: list[tuple[tuple[int, int], int, set[int] | None]],
) -> None:
    held = Contributions(NUMEL, 4, [0, 1, 2, 3])
    expected: dict[int, tuple[int, frozenset[int]]] = {}
    for (start, stop), reducer, present in events:
        if present is None:
            held.drop(start, stop)
        else:
            held.add(start, stop, reducer, present)
        for index in range(start, stop):
            expected.pop(index, None)
            if present is not None:
                expected[index] = (reducer, frozenset(range(4)) - present)
    missing = [index for index in range(NUMEL) if index not in expected]
    assert held.missing() == ((missing[0], missing[-1] + 1) if missing else (0, 0))
    if any(absent for _, absent in expected.values()):
        said = {
            index: (part.reducer, frozenset(part.absent))
            for part in held.parts()
            for index in range(part.start, part.stop)
        }
        assert said == expected


@given(st.integers(1, 20), st.data())
def test_records_survive_the_wire(num_members: int, data: st.DataObject) -> None:
    held = Contributions(NUMEL, num_members, range(num_members))
    presents = data.draw(st.lists(st.sets(st.integers(0, num_members - 1), min_size=1).map(sorted), max_size=5))
    record = held.record(presents)
    assert len(record) == held.mask_bytes * len(presents)
    assert held.read_record(record) == presents


@pytest.mark.parametrize("record", [b"\x00", b"\x02", b"\x08", b"\x01\x00"])
def test_records_that_cannot_be_are_refused(record: bytes) -> None:
    with pytest.raises(BadContribution):
        Contributions(NUMEL, 3, [0, 2]).read_record(record)
