"""The chart shows what the files say, and what cannot be drawn is said in one line."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import matplotlib.image
import msgspec
import numpy as np
import pytest

from manyhands.cli.main import run
from manyhands.cli.output.event_file import EventWriter
from manyhands.monitor.history import History, history_path
from manyhands.monitor.monitor_events import HeldoutSeen, Listening, ProgressMade, StepMade
from manyhands.monitor.picture import Point
from manyhands.monitor.plot import MAX_POINTS, Curve, labels_of, read
from manyhands.recipes.albert.trainer_events import BatchDone, Counts, Evaluated, Finished, StepDone

COUNTS = Counts(0, 0, 0, 0, 0, 0)


def monitor_file(path: Path) -> Path:
    write = EventWriter(path)
    write(Listening("A", []))
    write(ProgressMade(0, 64, 256, 2, 20.0, 9.0))
    write(ProgressMade(0, 128, 256, 3, 30.0, None))
    write(StepMade(1, 9.0, 3, 256, 30.0))
    write(ProgressMade(1, 64, 256, 1, 10.0, 19.0))  # the others have not told yet that they made step 1
    write(ProgressMade(1, 60, 256, 3, 25.0, 8.0))  # the samples of before were an estimate
    write(HeldoutSeen(1, 9.5, 0.1, 0.5))
    write(StepMade(2, 8.0, 3, 256, 30.0))
    write.close()
    return path


def trainer_file(path: Path) -> Path:
    write = EventWriter(path)
    for step in (0, 1):
        write(BatchDone(step, 9.0, 10.0, COUNTS))
        write(BatchDone(step, 9.0, 20.0 + step, COUNTS))
        write(StepDone(step + 1, 9.0 - step if step else None, "", 2 + step, COUNTS))
    write(Finished(2, 8.0, "00", COUNTS))
    write.close()
    return path


def history(path: Path, points: list[Point]) -> Path:
    names = [field.name for field in msgspec.structs.fields(Point)]
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"CREATE TABLE points ({', '.join(names)})")
        rows = [[getattr(point, name) for name in names] for point in points]
        database.executemany(f"INSERT INTO points VALUES ({', '.join('?' * len(names))})", rows)
    return path


def test_a_monitors_file_has_the_whole_run(tmp_path: Path) -> None:
    curves = read(monitor_file(tmp_path / "m"), "m")
    assert curves.loss.parts == [[(1, 9.0), (2, 8.0)]]
    assert curves.heldout_loss.parts == [[(1, 9.5)]]
    assert curves.throughput.parts == [[(1, 30.0), (2, 25.0)]]
    assert curves.peers.parts == [[(1, 3), (2, 3)]]


def test_a_trainers_file_has_its_own_part(tmp_path: Path) -> None:
    curves = read(trainer_file(tmp_path / "t"), "t")
    assert curves.loss.parts == [[(2, 8.0)]], "it had no batch in the first step"
    assert curves.throughput.parts == [[(1, 15.0), (2, 15.5)]], "the mean over the batches of a step"
    assert curves.peers.parts == [[(1, 2), (2, 3)]]


def test_an_evaluators_file_has_the_heldout_loss(tmp_path: Path) -> None:
    write = EventWriter(tmp_path / "e")
    write(Evaluated(5, 7.5, 0.1, 0.5, 64))
    write(Evaluated(10, float("nan"), 0.1, 0.5, 64))
    write.close()
    assert read(tmp_path / "e", "e").heldout_loss.parts == [[(5, 7.5)]]


def test_a_history_has_its_points_in_order(tmp_path: Path) -> None:
    points = [
        Point(time=2.0, step=2, loss=8.0, samples=256, samples_per_second=30.0, peers=3),
        Point(time=1.0, step=1, samples=256, samples_per_second=20.0, peers=2, heldout_loss=9.0),
        Point(time=3.0, step=3, samples=256, peers=3),  # made while the monitor was away
    ]
    curves = read(history(tmp_path / "odd name?#%.sqlite", points), "h")
    assert curves.loss.parts == [[(2, 8.0)]]
    assert curves.heldout_loss.parts == [[(1, 9.0)]]
    assert curves.throughput.parts == [[(1, 20.0), (2, 30.0)]]
    assert curves.peers.parts == [[(1, 2), (2, 3), (3, 3)]]


def test_a_history_that_a_monitor_writes_is_read_meanwhile_and_not_changed(tmp_path: Path) -> None:
    path = history(tmp_path / "h", [Point(time=1.0, step=1, loss=9.0)])
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("BEGIN IMMEDIATE")
        database.execute("INSERT INTO points (time, step, loss) VALUES (2.0, 2, 8.0)")
        assert read(path, "h").loss.parts == [[(1, 9.0)]]
        database.rollback()


def test_the_history_of_a_monitor_is_read_while_it_runs_and_afterwards(tmp_path: Path) -> None:
    path = history_path(tmp_path, "r")
    kept = History("r", path)
    kept.add_points([Point(time=1.0, step=1, loss=9.0, samples=256, samples_per_second=20.0, peers=2)])
    assert kept.flush()
    while_it_runs = read(path, "h")
    kept.close()
    assert while_it_runs == read(path, "h")
    assert while_it_runs.loss.parts == [[(1, 9.0)]]
    assert while_it_runs.peers.parts == [[(1, 2)]]


def test_a_run_that_was_begun_anew_is_another_part_of_the_curve() -> None:
    curve = Curve()
    for step, value in ((1, 9.0), (2, 8.0), (2, 7.9), (1, 9.1), (2, None), (2, float("nan")), (3, 7.0)):
        curve.add(step, value)
    assert curve.parts == [[(1, 9.0), (2, 8.0), (2, 7.9)], [(1, 9.1), (3, 7.0)]]


def test_a_month_is_thinned_to_the_width_of_the_chart() -> None:
    curve = Curve()
    for step in range(100_001):
        curve.add(step, 2.0 * step)
    (part,) = curve.thinned(MAX_POINTS).parts
    assert MAX_POINTS / 2 < len(part) <= MAX_POINTS
    assert all(value == pytest.approx(2 * step) for step, value in part)
    assert curve.thinned(200_000).parts == curve.parts


def test_files_of_one_name_are_told_apart() -> None:
    assert labels_of([Path("a/x"), Path("b/x"), Path("b/y")]) == ["a/x", "b/x", "y"]


def test_the_last_line_may_be_unfinished_and_unknown_events_are_skipped(tmp_path: Path) -> None:
    path = monitor_file(tmp_path / "m")
    with path.open("a") as file:
        file.write('{"type":"of_tomorrow","version":1,"step":3,"more":{"a":1}}\n')
        file.write('{"type":"step_seen","st')
    assert read(path, "m").loss.parts == [[(1, 9.0), (2, 8.0)]]


def test_a_png_is_dark_on_white(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.png"
    files = [monitor_file(tmp_path / "m"), trainer_file(tmp_path / "t")]
    assert run(["plot", *map(str, files), "-o", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    image = matplotlib.image.imread(output)[..., :3]
    assert min(image.shape[:2]) >= 900
    assert (image[0, 0] == 1.0).all()
    lightness = image.mean(axis=2)
    assert np.median(lightness) == 1.0
    assert (lightness < 0.3).sum() > 1000, "there is text"


def test_an_svg_names_the_files_and_is_the_same_each_time(tmp_path: Path) -> None:
    files = [monitor_file(tmp_path / "price$of$power"), trainer_file(tmp_path / "_t")]
    drawn = []
    for number in range(2):
        output = tmp_path / f"{number}.SVG"
        assert run(["plot", *map(str, files), "--output", str(output)]) == 0
        drawn.append(output.read_text())
    assert drawn[0] == drawn[1]
    for text in ("price$of$power", "_t", "held-out loss", "global step", "samples per second", "peers"):
        assert f"<!-- {text} -->" in drawn[0]


def test_files_and_options_that_cannot_be_plotted_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = monitor_file(tmp_path / "good")
    (tmp_path / "empty").touch()
    (tmp_path / "log").write_text("Nov 23 03:58:06.392 [INFO] Found no active peers\n")
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 10000)
    (tmp_path / "newer").write_text('{"type":"step_seen","version":2}\n')
    (tmp_path / "quiet").write_text('{"type":"listening","version":1,"peer_id":"A","addresses":[]}\n')
    with closing(sqlite3.connect(tmp_path / "other")) as database:
        database.execute("CREATE TABLE points (time, step)")
    history(tmp_path / "torn", [Point(time=1.0, step=1)])
    whole = (tmp_path / "torn").read_bytes()
    (tmp_path / "torn").write_bytes(whole[:50] + b"\xff" * 50 + whole[100:4096])
    history(tmp_path / "text", [Point(time=1.0, step=1, loss="low")])  # type: ignore[arg-type]
    history(tmp_path / "no points", [])
    cases: list[tuple[list[Any], str]] = [
        ([tmp_path / "missing"], "No such file or directory"),
        ([tmp_path], "Is a directory"),
        ([good, tmp_path / "empty"], "empty has nothing to draw"),
        ([tmp_path / "log"], "log is not an event file: line 1 is not an event"),
        ([tmp_path / "binary"], "binary is not an event file"),
        ([tmp_path / "newer"], "newer version of manyhands"),
        ([tmp_path / "quiet"], "nothing to draw"),
        ([tmp_path / "other"], "other is not the history of a monitor: no such column"),
        ([tmp_path / "torn"], "torn is not the history of a monitor"),
        ([tmp_path / "text"], "text is not the history of a monitor"),
        ([tmp_path / "no points"], "nothing to draw"),
        ([good, "-o", tmp_path / "out.pdf"], "ends in neither .png nor .svg"),
        ([good, "-o", tmp_path / "out"], "ends in neither .png nor .svg"),
        ([good, "-o", tmp_path / "nowhere" / "out.png"], "there is no folder"),
        ([good, "-o", tmp_path / "folder.png"], "cannot write the chart"),
        ([], 'Command "plot" parameter FILES requires an argument'),
    ]
    (tmp_path / "folder.png").mkdir()
    for arguments, message in cases:
        output = [] if "-o" in arguments else ["-o", str(tmp_path / "out.png")]
        assert run(["plot", *map(str, arguments), *output]) == 2, arguments
        said = capsys.readouterr()
        assert message in said.err, arguments
        assert len(said.err.splitlines()) == 1, said.err
        assert not said.out
    assert not (tmp_path / "out.png").exists()


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["plot", str(monitor_file(tmp_path / "m")), "-o", str(tmp_path / "o.png")]) == 2
    assert "[plot]" in capsys.readouterr().err
