"""The history file: what survives, what it refuses, and a disk that is full or locked."""

from __future__ import annotations

import itertools
import logging
import sqlite3
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from manyhands.base.errors import ConfigError
from manyhands.monitor import history as history_module
from manyhands.monitor.credit import Changes, CreditedStep, Total
from manyhands.monitor.history import SCHEMA, History, SeenPeer, history_path, open_history
from manyhands.monitor.picture import Point, RunEvent
from manyhands.optim.metrics import packed
from tests.credited import leaders_in
from tests.waiting import wait_until

ALICE, BOB = b"a" * 8, b"b" * 8


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """The connections to SQLite that are opened in the test, in order."""
    connections: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def noted(*args: Any, **options: Any) -> sqlite3.Connection:
        connections.append(connect(*args, **options))
        return connections[-1]

    monkeypatch.setattr(sqlite3, "connect", noted)
    return connections


def point(step: int, loss: float | None = None) -> Point:
    return Point(time=1000.0 + step, step=step, loss=loss, samples=step, peers=2)


def credited(step: int, **samples: int) -> CreditedStep:
    shares = {name[0].encode() * 8: number for name, number in samples.items()}
    return CreditedStep(step, b"lineage!", 2, packed(shares))


def event(number: int) -> RunEvent:
    return RunEvent(time=float(number), kind="joined", text=f"event {number}", step=number)


def known(peer: bytes, name: str) -> SeenPeer:
    return SeenPeer(peer, f"id of {name}", name, 1000.0, 3, 900.0, 1100.0)


def history_in_locked_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[History, sqlite3.Connection]:
    """A history, and what locks its file until it is rolled back."""
    monkeypatch.setattr(history_module, "BUSY_TIMEOUT_S", 0.01)
    monkeypatch.setattr(history_module, "WRITE_PERIOD_S", 3600.0)
    history = open_history("run", tmp_path)
    locking = sqlite3.connect(history_path(tmp_path, "run"))
    locking.execute("BEGIN IMMEDIATE")
    return history, locking


def test_points_credit_peers_and_events_survive_a_restart(tmp_path: Path) -> None:
    history = open_history("run", tmp_path / "state")
    history.add_points([point(1, 3.5), point(2)])
    history.add_points([point(2, 3.25)])
    history.add_credit(Changes(put=[credited(1, alice=5, bob=6), credited(2, alice=1)]))
    history.add_peers([known(ALICE, "alice")])
    history.add_events([event(1), event(2)])
    before = history.points(), history.events(), history.peers()
    history.close()
    history = open_history("run", tmp_path / "state")
    assert (history.points(), history.events(), history.peers()) == before
    assert history.points() == [point(1, 3.5), point(2, 3.25)]
    assert history.events() == [event(2), event(1)]
    assert history.steps() == [credited(2, alice=1), credited(1, alice=5, bob=6)]
    assert [(row.name, row.samples) for row in leaders_in(history)] == [("", 6), ("alice", 6)]
    history.close()
    history.close()


def test_points_that_are_not_written_yet_are_read_too(tmp_path: Path) -> None:
    history = open_history("run", tmp_path)
    history.add_points([point(1)])
    history.flush()
    history.add_points([point(1, 2.0), point(2)])
    assert history.points() == [point(1, 2.0), point(2)]
    history.close()


def test_points_are_chosen_evenly_with_the_last_one(tmp_path: Path) -> None:
    history = open_history("run", tmp_path)
    history.add_points([point(step) for step in range(1, 1001)])
    history.flush()
    history.add_points([point(1001)])
    chosen = [found.step for found in history.points(limit=100)]
    assert chosen[-1] == 1001
    assert 80 <= len(chosen) <= 100
    assert max(later - earlier for earlier, later in itertools.pairwise(chosen)) <= 12
    assert [found.step for found in history.points(since=1990.0)] == list(range(990, 1002))
    history.close()


def test_the_points_of_a_year_are_chosen_without_reading_them_all(
    tmp_path: Path, opened: list[sqlite3.Connection]
) -> None:
    history = open_history("run", tmp_path)
    num_steps = 100_000
    for begin in range(1, num_steps, 20_000):
        history.add_points([point(step) for step in range(begin, begin + 20_000) if step % 7])
        history.flush()
    num_read = 0

    def count() -> int:
        nonlocal num_read
        num_read += 1
        return 0

    opened[0].set_progress_handler(count, 100)
    chosen = history.points(limit=50)
    assert num_read < num_steps / 100, "fewer instructions of the database than points"
    assert chosen[-1].step == num_steps
    assert 40 <= len(chosen) <= 50
    assert max(later.step - earlier.step for earlier, later in itertools.pairwise(chosen)) <= 2 * num_steps / 50
    history.close()


def test_a_run_that_goes_back_loses_its_later_points_and_steps(tmp_path: Path) -> None:
    history = open_history("run", tmp_path)
    history.add_points([point(step) for step in range(1, 10)])
    history.add_credit(Changes(put=[credited(step, alice=1) for step in range(1, 10)]))
    history.flush()
    history.remove_points_after(5)
    history.add_points([point(6, 1.0)])
    history.add_credit(Changes(put=[credited(6, alice=7)], removed=[6, 7, 8, 9]))
    history.flush()
    assert [found.step for found in history.points()] == [1, 2, 3, 4, 5, 6]
    assert [row.samples for row in leaders_in(history)] == [12]
    history.close()


def test_final_steps_are_added_up_once(tmp_path: Path) -> None:
    history = open_history("run", tmp_path)
    history.add_credit(Changes(put=[credited(1, alice=5, bob=6)]))
    history.flush()
    history.add_credit(Changes(put=[credited(2, alice=1)], settled=[credited(1, alice=5, bob=6)]))
    history.flush()
    history.flush()
    assert history.settled() == {ALICE: Total(5, 1), BOB: Total(6, 1)}
    assert [row.samples for row in leaders_in(history)] == [6, 6]
    history.close()


def test_points_of_another_monitor_do_not_replace_those_that_were_seen(tmp_path: Path) -> None:
    history = open_history("run", tmp_path)
    history.add_points([point(2, 2.0)])
    history.add_missing_points([point(1, 9.0), point(2, 9.0)])
    assert [found.loss for found in history.points()] == [9.0, 2.0]
    history.close()


def test_points_of_another_monitor_are_dropped_while_the_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, locking = history_in_locked_file(tmp_path, monkeypatch)
    history.add_points([point(2, 2.0)])
    history.add_missing_points([point(1, 9.0), point(2, 9.0)])
    locking.rollback()
    locking.close()
    assert history.flush()
    assert history.points() == [point(2, 2.0)]
    history.close()


def test_the_file_of_another_run_or_version_or_no_database_is_refused(tmp_path: Path) -> None:
    open_history("run", tmp_path).close()
    with pytest.raises(ConfigError, match="is of run 'run', and this is run 'other'"):
        History("other", history_path(tmp_path, "run"))
    for version in (SCHEMA - 1, SCHEMA + 1):
        other = sqlite3.connect(history_path(tmp_path, "run"))
        other.execute(f"PRAGMA user_version={version}")
        other.close()
        with pytest.raises(ConfigError, match="another version"):
            open_history("run", tmp_path)
    history_path(tmp_path, "broken").write_bytes(b"this is no database" * 100)
    with pytest.raises(ConfigError, match="file is not a database"):
        open_history("broken", tmp_path)
    (tmp_path / "a file").write_text("")
    with pytest.raises(ConfigError, match="name another one"):
        open_history("run", tmp_path / "a file")


@pytest.mark.long
def test_final_steps_take_no_more_memory_the_longer_a_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, locking = history_in_locked_file(tmp_path, monkeypatch)
    shares = packed({number.to_bytes(8, "big"): 1 for number in range(1000)})
    tracemalloc.start()
    for number in range(1, 201):
        step = CreditedStep(number, b"lineage!", 2, bytes(bytearray(shares)))
        history.add_credit(Changes(put=[step]))
        history.add_credit(Changes(settled=[step]))
        assert number % 20 or not history.flush()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 100 * len(shares), "less than half of the lists"
    locking.rollback()
    locking.close()
    assert history.flush()
    assert set(history.settled().values()) == {Total(200, 200)}
    assert history.steps() == []
    history.close()


def test_a_part_that_cannot_be_written_does_not_end_the_history(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "WRITE_PERIOD_S", 0.005)
    history = open_history("run", tmp_path)
    history.add_points([point(2**70)])  # no number of SQLite
    wait_until(lambda: "is lost" in caplog.text)
    history.add_points([point(1)])
    wait_until(lambda: history.points_before(2, 1))
    history.close()


def test_forgotten_peers_are_deleted(tmp_path: Path) -> None:
    history = open_history("run", tmp_path)
    history.add_peers([known(ALICE, "alice"), known(BOB, "bob")])
    history.flush()
    history.remove_peers([ALICE])
    assert history.peers().keys() == {BOB}
    history.flush()
    assert history.peers().keys() == {BOB}
    history.close()


def test_run_ids_of_any_characters_have_a_file(tmp_path: Path) -> None:
    assert history_path(tmp_path, "my-run_1").name == "history-my-run_1.db"
    odd = history_path(tmp_path, "läuft:" + "x" * 50)
    assert odd.name.isascii()
    assert odd != history_path(tmp_path, "läuft;" + "x" * 50)


def test_a_locked_file_is_told_once_and_nothing_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(history_module, "WRITE_PERIOD_S", 3600.0)
    history = open_history("run", tmp_path)
    locking = sqlite3.connect(history_path(tmp_path, "run"))
    locking.execute("BEGIN IMMEDIATE")
    with caplog.at_level(logging.INFO):
        for step in (1, 2, 3):
            history.add_points([point(step)])
            history.add_credit(Changes(put=[credited(step, alice=1)]))
            assert not history.flush()
        assert [found.step for found in history.points()] == [1, 2, 3]
        locking.rollback()
        locking.close()
        assert history.flush()
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        f"The history cannot be written to {history_path(tmp_path, 'run')}",
        f"The history is written to {history_path(tmp_path, 'run')} again",
    ]
    assert [step.step for step in history.steps()] == [3, 2, 1]
    history.close()


def test_a_full_disk_is_told_once_and_history_goes_on_when_there_is_room(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    opened: list[sqlite3.Connection],
) -> None:
    monkeypatch.setattr(history_module, "WRITE_PERIOD_S", 3600.0)
    history = open_history("run", tmp_path)
    (pages,) = opened[0].execute("PRAGMA page_count").fetchone()
    opened[0].execute(f"PRAGMA max_page_count={pages}")  # SQLite then says that the disk is full
    many = [RunEvent(time=float(number), kind="joined", text="x" * 500) for number in range(200)]
    history.add_events(many)
    assert not history.flush()
    assert not history.flush()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "full" in caplog.text
    assert len(history.events(500)) == 200
    opened[0].execute("PRAGMA max_page_count=100000")
    assert history.flush()
    assert len(history.events(500)) == 200
    history.close()


def test_the_file_does_not_grow_without_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MAX_EVENTS", 100)
    history = open_history("run", tmp_path)
    for start in range(0, 1000, 50):
        history.add_events(map(event, range(start, start + 50)))
        history.flush()
    assert len(history.events(5000)) == 100
    history.close()


def test_a_day_of_twenty_peers_is_about_a_megabyte(tmp_path: Path) -> None:
    history = open_history("run", tmp_path)
    shares = packed({bytes([number] * 8): 100 for number in range(20)})
    day = range(1, 2881)  # a step every 30 s
    history.add_points([point(step, 1 / step) for step in day])
    history.add_credit(Changes(put=[CreditedStep(step, b"lineage!", 20, shares) for step in day]))
    history.close()
    assert 0.5e6 < history_path(tmp_path, "run").stat().st_size < 2e6


def test_points_after_a_step_are_read_piece_by_piece_whether_written_or_not() -> None:
    history = History("r")
    try:
        history.add_points(Point(time=float(step), step=step) for step in range(0, 20, 2))
        assert history.flush()
        history.add_points(Point(time=float(step), step=step) for step in range(1, 20, 2))
        assert [point.step for point in history.points_after(-1, 0.0, 7)] == list(range(7))
        assert [point.step for point in history.points_after(6, 0.0, 7)] == list(range(7, 14))
        assert [point.step for point in history.points_after(-1, 15.0, 100)] == list(range(15, 20))
        assert history.points_after(19, 0.0, 7) == []
    finally:
        history.close()
