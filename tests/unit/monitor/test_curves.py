"""What the tutorials show people of a run, in the files of wandb and TensorBoard."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from manyhands.base.errors import ConfigError, MissingExtra
from manyhands.monitor import curves
from manyhands.monitor.curves import CurvePoint, Curves, Sink, TensorBoardSink, TrackioSink, WandbSink
from manyhands.monitor.monitor_events import HeldoutSeen, Listening, StepMade
from tests.unit.monitor.curve_files import tensorboard_points, trackio_points, wandb_points

EVENTS = [
    Listening("id", []),
    StepMade(7, 4.5, 3, 256, 12.5),
    StepMade(8, 4.25, 2, 272, 13.5),
    HeldoutSeen(7, 5.5, 0.25, 0.5),  # an evaluator tells late
]
POINTS: list[dict[str, float]] = [
    {"loss": 4.5, "alive peers": 3, "samples": 256, "performance": 12.5, "step": 7},
    {"loss": 4.25, "alive peers": 2, "samples": 272, "performance": 13.5, "step": 8},
    {"heldout loss": 5.5, "mlm accuracy": 0.25, "sop accuracy": 0.5, "step": 7},
]


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first import of wandb can take longer than a monitor that ends waits for its curves."""
    monkeypatch.setattr(curves, "CLOSE_TIMEOUT_S", 60.0)
    monkeypatch.setattr(curves, "FINISH_TIMEOUT_S", 50.0)


def draw(*sinks: Sink) -> None:
    drawn = Curves({f"sink {number}": sink for number, sink in enumerate(sinks)})
    for event in EVENTS:
        drawn.add(event)
    drawn.close()


def test_tensorboard_has_the_five_fields_and_those_of_evaluators(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = tmp_path / "new" / "curves"
    draw(TensorBoardSink(folder, "first"), TensorBoardSink(folder, "second"))
    for name in ("first", "second"):
        assert tensorboard_points(folder / name) == [(int(point["step"]), point) for point in POINTS]
    assert f"tensorboard --logdir {folder}" in caplog.text


@pytest.mark.long
@pytest.mark.usefixtures("slow_machine")
def test_wandb_without_a_key_writes_an_offline_run_and_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    caplog.set_level(logging.INFO)
    draw(WandbSink("demo", "run", None))
    assert wandb_points(tmp_path) == POINTS
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("manyhands")]
    assert lines[0] == "There is no API key for wandb (wandb login stores one): the curves are written offline"
    assert lines[1].startswith("The curves are written to ")
    assert "wandb sync" in lines[1]
    assert len(lines) == 2
    assert capfd.readouterr().out == ""


def test_trackio_has_the_points_and_says_in_one_line_how_to_see_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: trackio takes its folder from the environment when it is imported."""
    pytest.importorskip("trackio")
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = subprocess.run(
        [sys.executable, "-c", WITH_TRACKIO], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    assert (
        done.stderr == "The curves are in the Trackio project my demo; to see them: trackio show --project 'my demo'\n"
    )
    assert trackio_points(tmp_path) == POINTS


WITH_TRACKIO = """
import logging, sys
from manyhands.monitor import curves
from manyhands.monitor.curves import Curves, TrackioSink
from manyhands.monitor.monitor_events import HeldoutSeen, StepMade
logging.basicConfig(format="%(message)s")
logging.getLogger("manyhands").setLevel(logging.INFO)
curves.CLOSE_TIMEOUT_S = 50.0  # imports of a machine that has much else to do
drawn = Curves({"Trackio": TrackioSink("my demo", "run", "run-1")})
for event in (StepMade(7, 4.5, 3, 256, 12.5), StepMade(8, 4.25, 2, 272, 13.5), HeldoutSeen(7, 5.5, 0.25, 0.5)):
    drawn.add(event)
assert drawn.close()
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


class Recorder:
    """A sink that a test can hold up or break."""

    def __init__(self, *, fails_in: str = "", times: float = math.inf) -> None:
        self.points: list[CurvePoint] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.has_step_4 = threading.Event()
        self._fails_in = fails_in
        self._times = times

    def open(self) -> None:
        self._act("open")

    def add(self, point: CurvePoint) -> None:
        self._act("add")
        self.points.append(point)
        if point["step"] == 4:
            self.has_step_4.set()

    def close(self) -> None:
        self._act("close")

    def _act(self, name: str) -> None:
        assert self.may_go_on.wait(30)
        if name == self._fails_in and self._times > 0:
            self._times -= 1
            raise RuntimeError("the server\n  is gone")


@pytest.mark.parametrize("place", ["open", "add", "close"])
def test_a_sink_that_fails_holds_nobody_up_and_is_one_warning(place: str, caplog: pytest.LogCaptureFixture) -> None:
    broken, whole = Recorder(fails_in=place), Recorder()
    draw(broken, whole)
    assert whole.points == POINTS
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("sink 0 gets no points (the server is gone); the monitor ")


@pytest.mark.parametrize("place", ["open", "add"])
def test_a_sink_that_has_failed_is_opened_again(
    place: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "REOPEN_S", 0.0)
    caplog.set_level(logging.INFO, "manyhands")
    sink = Recorder(fails_in=place, times=3)
    drawn = Curves({"TensorBoard": sink})
    for step in range(5):
        drawn.add(StepMade(step, 4.5, 3, 256, 12.5))
    assert sink.has_step_4.wait(30)
    assert drawn.close()
    assert [point["step"] for point in sink.points] == ([0, 1, 2, 3, 4] if place == "open" else [3, 4])
    assert [record.getMessage() for record in caplog.records] == [
        "TensorBoard gets no points (the server is gone); the monitor tries again every 0 s",
        "TensorBoard gets points again",
    ]


def test_a_sink_that_hangs_holds_nobody_up(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "CLOSE_TIMEOUT_S", 0.2)
    slow, quick = Recorder(), Recorder()
    slow.may_go_on.clear()
    drawn = Curves({"slow": slow, "quick": quick})
    for step in range(curves.MAX_WAITING + 10):
        drawn.add(StepMade(step, 4.5, 3, 256, 12.5))
        while len(quick.points) + 100 < step:
            pass
    drawn.close()
    assert len(quick.points) == curves.MAX_WAITING + 10
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("slow gets no more points (it is 1000 points behind)")
    slow.may_go_on.set()


def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"--wandb-project needs .*pip install .*\[wandb\]"):
        WandbSink("demo", "run", None)
    with pytest.raises(MissingExtra, match=r"--tensorboard needs .*pip install .*\[tensorboard\]"):
        TensorBoardSink(tmp_path / "new", "run")
    with pytest.raises(MissingExtra, match=r"--trackio needs .*pip install .*\[trackio\]"):
        TrackioSink("demo", "run", "run-1")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a folder that can be written"):
        TensorBoardSink(tmp_path / "file", "run")


WITHOUT_TORCH = """
import sys
from pathlib import Path
import manyhands.cli.monitor_command
from manyhands.monitor import curves
from manyhands.monitor.curves import Curves, TensorBoardSink, WandbSink
from manyhands.monitor.monitor_events import StepMade
curves.CLOSE_TIMEOUT_S = curves.FINISH_TIMEOUT_S = 50.0  # imports of a machine that has much else to do
drawn = Curves({"wandb": WandbSink("demo", "run", "offline"), "TensorBoard": TensorBoardSink(Path("curves"), "run")})
drawn.add(StepMade(7, 4.5, 3, 256, 12.5))
drawn.close()
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


@pytest.mark.long
def test_no_curve_imports_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
    assert wandb_points(tmp_path)[0]["step"] == tensorboard_points(tmp_path)[0][0] == 7
