"""A chart of a run: loss, throughput and peers, read from event files or from the history of a monitor."""

from __future__ import annotations

import importlib.util
import math
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from manyhands.base.errors import ConfigError, MissingExtra

ENDINGS = (".png", ".svg")
SQLITE_MAGIC = b"SQLite format 3\x00"
EVENTS_VERSION = 1
MAX_POINTS = 2000
"""Most points of one curve, about the width of the chart in pixels; more are averaged."""

MAX_LINE_BYTES = 1 << 20
"""Most bytes of one event: a file with a longer line is not an event file."""

COLUMNS = ("step", "loss", "heldout_loss", "samples_per_second", "peers")

COLOURS = ("#1f5fa8", "#c2410c", "#2f7d32", "#7b3fa0", "#a61e4d", "#0f766e", "#8a6100", "#4a4a4a")
"""Dark enough to be read on white."""


@dataclass
class Curve:
    """A curve in parts: a new part begins where the run was begun anew, or resumed from a checkpoint.

    Attributes:
        parts: lists of (global step, value); the steps of a part never fall.
    """

    parts: list[list[tuple[float, float]]] = field(default_factory=list)

    def add(self, step: float, value: float | None) -> None:
        """Append a point; without a value or with one that is not finite, nothing."""
        if value is None or not math.isfinite(value):
            return
        if not self.parts or self.parts[-1][-1][0] > step:
            self.parts.append([])
        self.parts[-1].append((step, value))

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def thinned(self, num_points: int) -> Curve:
        """A curve of about ``num_points`` points at most: means over equally many points of a part."""
        width = math.ceil(len(self) / num_points) if len(self) else 1
        return Curve([[_mean(part[at : at + width]) for at in range(0, len(part), width)] for part in self.parts])


@dataclass
class RunCurves:
    """The curves in one file.

    Attributes:
        label: for the legend.
        throughput: samples per second; of all peers in the file of a monitor, of one in the file of a trainer.
    """

    label: str
    loss: Curve = field(default_factory=Curve)
    heldout_loss: Curve = field(default_factory=Curve)
    throughput: Curve = field(default_factory=Curve)
    peers: Curve = field(default_factory=Curve)

    def __len__(self) -> int:
        return len(self.loss) + len(self.heldout_loss) + len(self.throughput) + len(self.peers)


class _Event(msgspec.Struct):
    """The fields of events that are drawn; see docs/reference/events.md."""

    type: str
    version: int
    step: int | None = None
    loss: float | None = None
    heldout_loss: float | None = None
    samples_per_second: float | None = None
    num_peers: int | None = None


class _Row(msgspec.Struct):
    """A row of the table ``points``; see :class:`manyhands.monitor.picture.Point`."""

    step: int
    loss: float | None
    heldout_loss: float | None
    samples_per_second: float | None
    peers: int | None


def plot(paths: Sequence[Path], output: Path) -> None:
    """Draw all files on one chart.

    Args:
        paths: event files of monitors, trainers and evaluators, and histories of monitors (SQLite).
        output: a ``.png`` or ``.svg``; it is overwritten.
    Raises:
        MissingExtra: matplotlib is not installed.
        ConfigError: a file cannot be read or has nothing to draw, or the output has another ending or cannot be
            written.
    """
    check_output(output)
    draw([read(path, label) for path, label in zip(paths, labels_of(paths), strict=True)], output)


def is_possible() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_output(output: Path) -> None:
    """Check all that can be checked before the files are read.

    Raises:
        MissingExtra: matplotlib is not installed.
        ConfigError: the ending is unknown, or the folder does not exist.
    """
    if output.suffix.lower() not in ENDINGS:
        raise ConfigError(f"the chart {str(output)!r} ends in neither .png nor .svg; write for example -o run.png")
    if not output.parent.is_dir():
        raise ConfigError(f"there is no folder {str(output.parent)!r} for the chart; make it, or name another one")
    if not is_possible():
        raise MissingExtra("manyhands plot", "plot")


def labels_of(paths: Sequence[Path]) -> list[str]:
    """The names of the files; where two have one name, the paths as they were given."""
    names = [path.name for path in paths]
    return [name if names.count(name) == 1 else str(path) for path, name in zip(paths, names, strict=True)]


def read(path: Path, label: str) -> RunCurves:
    """Read an event file, or the history of a monitor.

    Raises:
        ConfigError: it cannot be read, or it has nothing to draw.
    """
    curves = RunCurves(label)
    try:
        with path.open("rb") as file:
            is_database = file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC
            file.seek(0)
            if not is_database:
                _add_events(curves, _events(path, iter(lambda: file.readline(MAX_LINE_BYTES), b"")))
        if is_database:
            _add_history(curves, path)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}; name an event file, or the history of a monitor"
        ) from None
    if not len(curves):
        raise ConfigError(
            f"{path} has nothing to draw yet: no progress or step_seen of a monitor, and no batch or step of a trainer"
        )
    return curves


def _events(path: Path, lines: Iterable[bytes]) -> Iterator[_Event]:
    decoder = msgspec.json.Decoder(_Event)
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):  # still being written
            return
        try:
            event = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ConfigError(
                f"{path} is not an event file: line {number} is not an event; name a file of --events, or the history "
                "of a monitor"
            ) from None
        if event.version > EVENTS_VERSION:
            raise ConfigError(f"{path} was written by a newer version of manyhands; install that one to plot it")
        yield event


def _add_events(curves: RunCurves, events: Iterable[_Event]) -> None:
    of_a_step: list[_Event] = []  # batches of a trainer, or what a monitor saw while the peers accumulated
    for event in events:
        step = event.step
        if step is None:
            continue
        if event.type == "step_seen":
            curves.loss.add(step, event.loss)
        elif event.type in ("heldout_seen", "evaluated"):
            curves.heldout_loss.add(step, event.heldout_loss)
        elif event.type in ("progress", "batch"):
            if of_a_step and of_a_step[0].step != step:
                _add_step(curves, of_a_step)
                of_a_step = []
            of_a_step.append(event)
        elif event.type == "step":
            curves.loss.add(step, event.loss)
            curves.peers.add(step, event.num_peers)
    if of_a_step:
        _add_step(curves, of_a_step)


def _add_step(curves: RunCurves, events: Sequence[_Event]) -> None:
    """Add the throughput and the peers of the global step that these events lead to."""
    last = events[-1]
    assert last.step is not None
    step = last.step + 1
    if last.type == "progress":  # the first events of a step lack the peers that had not published the step before it
        events = [last]
        curves.peers.add(step, last.num_peers)
    speeds = [event.samples_per_second for event in events if event.samples_per_second is not None]
    if speeds:
        curves.throughput.add(step, sum(speeds) / len(speeds))


def _add_history(curves: RunCurves, path: Path) -> None:
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            for values in database.execute(f"SELECT {', '.join(COLUMNS)} FROM points ORDER BY step"):
                row = msgspec.convert(dict(zip(COLUMNS, values, strict=True)), _Row)
                curves.loss.add(row.step, row.loss)
                curves.heldout_loss.add(row.step, row.heldout_loss)
                curves.throughput.add(row.step, row.samples_per_second or None)  # 0 stands for unknown
                curves.peers.add(row.step, row.peers)
    except (sqlite3.Error, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is not the history of a monitor: {error}") from None


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(step for step, _ in points) / len(points), sum(value for _, value in points) / len(points)


def draw(files: Sequence[RunCurves], output: Path) -> None:
    """Draw the chart: dark on white, whatever the user's settings of matplotlib are.

    Raises:
        ConfigError: it cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update({"svg.hashsalt": "manyhands", "axes.spines.top": False, "axes.spines.right": False})
        figure = Figure(figsize=(10.0, 9.0), dpi=150, layout="constrained", facecolor="white")
        axes: Any = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
        for number, curves in enumerate(files):
            colour = COLOURS[number % len(COLOURS)]
            _draw_curve(axes[0], curves.loss, colour, "-")
            _draw_curve(axes[0], curves.heldout_loss, colour, "--")
            _draw_curve(axes[1], curves.throughput, colour, "-")
            _draw_curve(axes[2], curves.peers, colour, "-", drawstyle="steps-post")
        for ax, title in zip(axes, ("loss (nats)", "samples per second", "peers"), strict=True):
            ax.set_ylabel(title, fontsize=12)
            ax.grid(visible=True, color="#dddddd", linewidth=0.8)
        axes[1].set_ylim(bottom=0.0)
        axes[2].set_ylim(bottom=0.0)
        axes[2].yaxis.set_major_locator(MaxNLocator(integer=True))
        axes[2].set_xlabel("global step", fontsize=12)
        axes[2].xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.align_ylabels(axes)
        _draw_legend(axes[0], files)
        try:
            figure.savefig(output, metadata={"Date": None} if output.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise ConfigError(f"cannot write the chart {output}: {error.strerror or error}") from error


def _draw_curve(ax: Any, curve: Curve, colour: str, line_style: str, **how: Any) -> None:
    for part in curve.thinned(MAX_POINTS).parts:
        steps, values = zip(*part, strict=True)
        marker = "o" if len(part) == 1 else None  # a line needs two points
        ax.plot(steps, values, color=colour, linestyle=line_style, linewidth=1.8, marker=marker, markersize=4, **how)


def _draw_legend(ax: Any, files: Sequence[RunCurves]) -> None:
    from matplotlib.lines import Line2D

    named: list[tuple[str, str, Any]] = [
        (curves.label, COLOURS[number % len(COLOURS)], "-") for number, curves in enumerate(files)
    ]
    if any(len(curves.heldout_loss) for curves in files):
        named.append(("held-out loss", "#222222", "--"))
    lines = [Line2D([], [], color=colour, linestyle=style, linewidth=1.8) for _, colour, style in named]
    legend = ax.legend(lines, [label for label, _, _ in named], fontsize=11, frameon=True, framealpha=0.9)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a file name may have a dollar sign
