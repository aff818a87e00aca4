"""Updates are made at their pace, say what changed, and never leave a browser with a hole."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import msgspec
import pytest

from manyhands.monitor.picture import PeerRow, Point, RunPicture
from manyhands.monitor.web.source import thinned
from manyhands.monitor.web.update_stream import PIECE_BYTES, UpdateStream
from manyhands.monitor.web.updates import PEER_COLUMNS, PeersPart, parts_of
from tests.synthetic_run import SyntheticRun

PICTURE = RunPicture(run_id="r", time=1000.0, step=3, eta_s=10.0)


def peer(number: int, **fields: Any) -> PeerRow:
    return PeerRow(peer_id=f"peer {number}", **fields)


def data_of(message: bytes) -> Any:
    assert message.endswith(b"\n\n")
    return json.loads(message.split(b"\ndata: ")[1])


def rows_of(message: bytes) -> dict[str, dict[str, Any]]:
    rows = [dict(zip(PEER_COLUMNS, row, strict=True)) for row in data_of(message)["rows"]]
    return {row["peer_id"]: row for row in rows}


def test_numbers_are_sent_at_most_four_times_a_second_and_only_if_they_changed() -> None:
    run = parts_of()[0]
    assert run.update(PICTURE, 0.0)
    changed = msgspec.structs.replace(PICTURE, samples=5)
    assert not run.update(changed, 0.2)
    assert run.update(changed, 0.25)
    assert not run.update(changed, 10.0)
    assert run.version == 2
    assert data_of(run.since(1))["samples"] == 5
    assert run.since(2) == b""


def test_a_change_of_time_alone_is_sent_only_now_and_then() -> None:
    run = parts_of()[0]
    run.update(PICTURE, 0.0)
    later = msgspec.structs.replace(PICTURE, time=1002.0, eta_s=8.0)
    assert not run.update(later, 2.0)
    sooner = msgspec.structs.replace(PICTURE, time=1002.0, eta_s=3.0)
    assert run.update(sooner, 2.0)
    assert run.update(msgspec.structs.replace(sooner, time=1006.0, eta_s=None), 6.0)


def test_peers_are_sent_whole_to_a_newcomer_and_by_row_to_others() -> None:
    part = PeersPart()
    part.update(msgspec.structs.replace(PICTURE, peers=[peer(1), peer(2)]), 0.0)
    assert set(rows_of(part.since(0))) == {"peer 1", "peer 2"}
    changed = msgspec.structs.replace(PICTURE, peers=[peer(1), peer(2, samples=8), peer(3)])
    assert not part.update(changed, 0.2)
    assert part.update(changed, 0.25)
    changes = part.since(1)
    assert not data_of(changes)["whole"]
    assert set(rows_of(changes)) == {"peer 2", "peer 3"}
    assert rows_of(changes)["peer 2"]["samples"] == 8
    left = msgspec.structs.replace(PICTURE, peers=[peer(1), peer(3)])
    assert part.update(left, 4.0)
    assert data_of(part.since(2))["gone"] == ["peer 2"]
    for missed in (0, 1):  # a browser that skipped a version gets everything
        whole = part.since(missed)
        assert data_of(whole)["whole"]
        assert set(rows_of(whole)) == {"peer 1", "peer 3"}
    assert part.since(3) == b""


@pytest.mark.parametrize(("num_peers", "period_s"), [(3, 0.25), (500, 1.0), (5000, 2.0)])
def test_the_table_of_a_crowd_is_sent_less_often(num_peers: int, period_s: float) -> None:
    part = PeersPart()
    rows = [peer(number) for number in range(num_peers)]
    assert part.update(msgspec.structs.replace(PICTURE, peers=rows), 0.0)
    changed = msgspec.structs.replace(PICTURE, peers=[peer(0, state="gone"), *rows[1:]])
    assert not part.update(changed, period_s - 0.01)
    assert part.update(changed, period_s)


@pytest.mark.parametrize(
    ("fields", "is_news"),
    [({"last_seen": 9.0}, False), ({"samples_per_second": 10.4}, False), ({"samples_per_second": 11.0}, True),
     ({"state": "gone"}, True), ({"step": 4}, True), ({"share": 0.5}, False)],
)  # fmt: skip
def test_signs_of_life_and_small_changes_of_speed_are_not_sent(fields: dict[str, Any], is_news: bool) -> None:
    part = PeersPart()
    before = peer(1, samples_per_second=10.0)
    part.update(msgspec.structs.replace(PICTURE, peers=[before]), 0.0)
    after = msgspec.structs.replace(before, **fields)
    assert part.update(msgspec.structs.replace(PICTURE, peers=[after]), 10.0) == is_news


def test_slow_drift_of_a_speed_is_sent_in_the_end() -> None:
    part = PeersPart()
    part.update(msgspec.structs.replace(PICTURE, peers=[peer(1, samples_per_second=10.0)]), 0.0)
    for number in range(1, 4):
        drifted = peer(1, samples_per_second=10.0 + 0.2 * number)
        is_sent = part.update(msgspec.structs.replace(PICTURE, peers=[drifted]), 10.0 * number)
        assert is_sent == (number == 3)


def test_names_stay_one_line_of_the_stream() -> None:
    part = PeersPart()
    part.update(msgspec.structs.replace(PICTURE, peers=[peer(1, name="a\n\nevent: run\ndata: {}")]), 0.0)
    assert part.since(0).count(b"\n") == 3
    assert rows_of(part.since(0))["peer 1"]["name"] == "a\n\nevent: run\ndata: {}"


def test_thinned_points_keep_the_newest_and_held_out_losses() -> None:
    points = [Point(time=float(step), step=step, heldout_loss=1.5 if step == 7 else None) for step in range(1, 11)]
    assert thinned(points, 10) == points
    assert [(point.step, point.heldout_loss) for point in thinned(points, 2)] == [(5, None), (10, 1.5)]
    assert thinned([], 3) == []


async def test_pages_that_read_slowly_share_what_they_are_sent() -> None:
    run = SyntheticRun(2000, time.time())
    table = PeersPart()
    table.update(run.picture(), 0.0)
    stream = UpdateStream(run, "page")
    stream.look()
    pages = [stream.messages() for _ in range(20)]
    tracemalloc.start()
    try:
        for page in pages:
            while not (await anext(page)).startswith(b"event: peers"):  # a piece of 500 kB
                pass
        per_page = (tracemalloc.get_traced_memory()[0] - len(table.since(0))) / len(pages)
    finally:
        tracemalloc.stop()
    for page in pages:
        await page.aclose()  # type: ignore[attr-defined]
    assert per_page < 2 * PIECE_BYTES
