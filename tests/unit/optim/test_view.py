"""The peers at one position, summed up."""

from __future__ import annotations

import math
from typing import Any

import pytest

from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PeerRecord, SeenRecord
from manyhands.base.identity import PeerId
from manyhands.optim.run.progress import Progress, View

HERE = Position(3, b"here")


def record(position: Position = HERE, samples: int = 0, speed: float = 0.0, **fields: Any) -> PeerRecord:
    is_client = fields.pop("is_client", False)
    return PeerRecord(position, is_client, [], samples=samples, samples_per_second=speed, **fields)


def view_of(*records: PeerRecord, since: float = 0.0) -> View:
    """What peers have said, each at the same instant."""
    observed = {PeerId(f"p{number}"): SeenRecord(said, since + said.ttl_s) for number, said in enumerate(records)}
    return View(observed, HERE)


def test_only_peers_at_the_same_position_are_added_up() -> None:
    view = view_of(
        record(samples=10, speed=2.0),
        record(samples=5, speed=3.0, is_client=True),
        record(Position(2, b"here"), samples=100, speed=100.0),
        record(Position(3, b"there"), samples=100, speed=100.0),
    )
    progress = view.progress(record(samples=1, speed=5.0), 36)
    assert progress == Progress(samples=16, num_peers=3, samples_per_second=10.0, eta_s=2.0)
    assert view.progress(None, 36).num_peers == 2, "a monitor does not count itself"


@pytest.mark.parametrize(
    ("samples", "speed", "eta_s"),
    [(10, 0.0, 0.0), (11, 5.0, 0.0), (9, 0.0, math.inf), (0, 4.0, 2.5)],
)
def test_the_eta_follows_from_samples_speed_and_target(samples: int, speed: float, eta_s: float) -> None:
    assert view_of().progress(record(samples=samples, speed=speed), 10).eta_s == eta_s


def test_a_helper_counts_for_nothing_in_progress() -> None:
    view = view_of(record(samples=3), record(is_auxiliary=True))
    progress = view.progress(record(), 10)
    assert (progress.num_peers, progress.samples) == (2, 3)
    assert view.progress(record(is_auxiliary=True), 10).num_peers == 1


def test_extrapolated_samples_replace_published_ones() -> None:
    view = view_of(record(samples=10, speed=2.0), record(Position(2, b"here"), samples=100, speed=100.0), since=100.0)
    outlook = view.progress(record(samples=1, speed=3.0), 27, 103.0)
    assert outlook == Progress(samples=17, num_peers=2, samples_per_second=5.0, eta_s=2.0)


def test_extrapolated_samples_end_at_the_target_and_published_ones_do_not() -> None:
    view = view_of(record(samples=50, speed=60.0), record(samples=8, speed=2.0))
    assert view.progress(None, 64, 5.0) == Progress(samples=64, num_peers=2, samples_per_second=62.0, eta_s=0.0)
    assert view.progress(record(samples=1), 64, 5.0).samples == 64
    assert view.progress(record(samples=16), 64, 5.0).samples == 74


def test_fractions_of_a_sample_of_many_slow_peers_add_up() -> None:
    view = view_of(*[record(speed=0.0625)] * 40)
    assert view.progress(None, 100, 8.0).samples == 20


def test_a_liar_adds_a_bounded_number_of_samples() -> None:
    liar = record(samples=2**53, speed=1e308, counted_s_ago=1e308)
    assert 2**53 <= view_of(record(samples=10, speed=1.0), liar).progress(None, 100, 5.0).samples <= 2**54
    quick = record(speed=1e308, counted_s_ago=1e308)
    assert view_of(record(samples=10, speed=1.0), quick).progress(None, 100, 5.0).samples == 100
    assert view_of(record(samples=10, speed=1.0)).progress(None, 100, 5.0).samples == 15


def test_the_batch_of_a_guest_is_not_waited_for_once_the_run_has_voters() -> None:
    """A stranger may claim that its batches take long: each step would wait for it."""
    view = view_of(record(samples=4, speed=4.0, batch_s=1.0), record(samples=4, speed=0.1, batch_s=60.0), since=100.0)
    member, guest = view.awaited
    assert view.busy_until(100.5) == 160.0, "without voters all count"
    assert view.busy_until(100.5, {member, PeerId("me")}) == 101.0
    assert view.busy_until(100.5, {member, guest}) == 160.0
    assert view.busy_until(100.5, {PeerId("me")}) == 100.5
