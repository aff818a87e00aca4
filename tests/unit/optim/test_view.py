"""The peers at one position, summed up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.averaging.messages import Position
from manyhands.base.identity import PeerId
from manyhands.optim.run.progress import MAX_TTL_S, ProgressRecord, Reckoning
from manyhands.optim.run.progress_reader import Observed, View

HERE = Position(3, b"here")

records = st.builds(
    ProgressRecord,
    position=st.just(HERE),
    samples=st.integers(0, 10**6),
    samples_per_second=st.floats(0, 1e4),
    lineage_samples=st.just(0),
    is_client=st.booleans(),
    addresses=st.just([]),
    ttl_s=st.floats(0, MAX_TTL_S),
    counted_s_ago=st.floats(0, 1000),
)


def view_of(said: list[tuple[ProgressRecord, float]]) -> tuple[View, list[Reckoning]]:
    """A view of peers, and how each is reckoned on: by what it said, and when."""
    peers = {
        PeerId(f"p{i:03}"): Observed(record, 1, math.inf, Reckoning.of(record, since), record.position)
        for i, (record, since) in enumerate(said)
    }
    return View(peers, HERE), [seen.reckoning for seen in peers.values()]


@given(st.lists(st.tuples(records, st.floats(1e5, 1e5 + 100)), max_size=20), st.lists(st.floats(0, 1000), max_size=8))
def test_the_sum_is_that_of_its_members(said: list[tuple[ProgressRecord, float]], waits: list[float]) -> None:
    view, members = view_of(said)
    assert len(view.trainers) == len(said)
    assert view.samples == sum(record.samples for record, _ in said)
    for now in [1e5 + 100 + wait for wait in waits]:
        alone = sum(reckoning.at(now) for reckoning in members)  # each rounded down
        assert alone - 1 <= view.reckoned_samples(now) <= alone * (1 + 1e-9) + len(said) + 1


def test_a_liar_does_not_spoil_the_sum_for_good() -> None:
    honest = ProgressRecord(HERE, 10, 1.0, 0, False, [], 300.0)
    liar = ProgressRecord(HERE, 2**53, 1e308, 0, False, [], 30.0, counted_s_ago=1e308)
    view, (_, reckoned_liar) = view_of([(honest, 1e6), (liar, 1e6)])
    assert view.reckoned_samples(1e6 + 5) > 2**53
    rest = view.reckoned_samples(1e6 + 20) - reckoned_liar.at(1e6 + 20)
    assert rest == pytest.approx(30, abs=10)


def test_the_leader_comes_first_among_those_that_can_be_dialled() -> None:
    host = ProgressRecord(HERE, 0, 0.0, 0, False, [], 30.0)
    client = ProgressRecord(HERE, 0, 0.0, 0, True, [], 30.0)
    view, _ = view_of([(client, 0.0), (host, 0.0), (host, 0.0)])
    assert view.hosts == ["p001", "p002"]
