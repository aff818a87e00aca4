"""The screen that ``manyhands monitor`` draws in a terminal, from the picture of a run. Pure.

Names, versions, devices and texts are those of strangers: unprintable characters are replaced, and nothing is markup.
"""

from __future__ import annotations

import logging
import math
import unicodedata
from collections.abc import Callable, Sequence
from itertools import pairwise
from textwrap import wrap
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from manyhands.base.text import amount_of, counted, rough
from manyhands.cli.output.card import Card
from manyhands.cli.output.rows import bar_rows, fitted
from manyhands.monitor.picture import PeerRow, Point, RunEvent, RunPicture

MARGIN = 1
MAX_CHART_ROWS = 10
MAX_COLUMN_WIDTH = 4
AXIS_WIDTH = 8
"""Columns for the numbers at the left of a chart."""
MAX_LOSS = 1e6
"""Larger losses are not drawn: the model has diverged, or a peer made them up."""
MAX_TEXT = 500
"""Most characters of a text that are shown."""
MAX_MARKS = 2
"""Most combining marks on one character: more would cover the rows above and below."""
MAX_ROWS_PER_LINE = 3
"""Most rows of one log line."""
MAX_LOG_ROWS = 9
"""Most rows of all log lines together."""
LATE_S = 10.0
MAX_AGO_S = 1e9
"""Longest time that is shown. Longer ones come from a wrong clock, or a peer made them up."""
BLOCKS = "▁▂▃▄▅▆▇█"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LEFT_TO_RIGHT = "\N{LEFT-TO-RIGHT MARK}"

STATE_STYLES = {"training": "green", "averaging": "cyan", "gone": "red", "left": "dim"}
EVENT_STYLES = {"joined": "green", "died": "red", "aborted": "yellow", "refused": "yellow"}


def screen_of(
    picture: RunPicture,
    points: Sequence[Point],
    width: int,
    height: int,
    now: float,
    *,
    log: Sequence[logging.LogRecord] = (),
    footer: Sequence[str] = (),
) -> RenderableType:
    """The screen for ``width`` columns and ``height`` rows. It never has more rows.

    Args:
        points: the committed global steps that are known, oldest first.
        now: seconds since 1970.
        log: records to show, oldest first. Warnings stay until newer ones need their place.
        footer: for the bottom.
    """
    inner = max(width - 2 * MARGIN, 1)
    head = [_title(picture), _progress(picture, now), _numbers(picture, inner)]
    foot = _foot(footer, inner)
    losses = [point.loss for point in points if point.loss is not None and abs(point.loss) < MAX_LOSS]
    num_log_rows = len(_log_rows(log, inner, MAX_LOG_ROWS, now))
    wants = {  # by priority: the last ones are left out first
        "head": Want(min(2, height), len(head), math.inf),
        "log": Want(2, 1 + num_log_rows, 2) if num_log_rows else None,
        "peers": Want(3, 2 + len(picture.peers), 6) if picture.peers else Want(1, 1, 1),
        "loss": Want(2, 1 + min(MAX_CHART_ROWS, len(losses)), 3) if losses else Want(1, 1, 1),
        "foot": Want(len(foot), len(foot), 1) if foot else None,
        "events": Want(2, 1 + len(picture.events), 2) if picture.events else None,
    }
    rows = _allotted(height, {name: want for name, want in wants.items() if want is not None})
    parts: list[RenderableType] = [*head[: rows["head"]]]
    if rows["loss"]:
        parts += _loss(points, losses, inner, rows["loss"])
    if rows["peers"]:
        parts += _peers(picture, inner, rows["peers"], now)
    if rows.get("events"):
        parts.append(_rule("Events"))
        parts += [_event(event, now) for event in picture.events[: rows["events"] - 1]]
    if rows.get("log"):
        parts += [_rule("Log"), *_log_rows(log, inner, rows["log"] - 1, now)]
    if rows.get("foot"):
        parts += [Text("")] * (height - sum(rows.values()))
        parts += foot
    return Padding(Group(*parts), (0, MARGIN))


class Want(NamedTuple):
    """The possible numbers of rows of a part of the screen: none, or ``least`` to ``most``."""

    least: int
    most: int
    weight: float


def _allotted(height: int, wants: dict[str, Want]) -> dict[str, int]:
    """Divide the rows among the parts: first the least of each, then in proportion to the weights."""
    rows = dict.fromkeys(wants, 0)
    left = height
    for name, want in wants.items():
        if want.least <= left:
            rows[name] = want.least
            left -= want.least
    while left > 0:
        growing = [name for name, want in wants.items() if 0 < rows[name] < want.most]
        if not growing:
            break
        rows[min(growing, key=lambda name: rows[name] / wants[name].weight)] += 1
        left -= 1
    return rows


# the heading


def _title(picture: RunPicture) -> RenderableType:
    row = Table.grid(expand=True)
    row.add_column(no_wrap=True)
    row.add_column(no_wrap=True, justify="right")
    name = Text.assemble(("manyhands monitor", "bold"), (f"  run {shown(picture.run_id)}  ", "bold cyan"))
    row.add_row(name, Text("Ctrl-C ends", style="dim"))
    return row


def _progress(picture: RunPicture, now: float) -> RenderableType:
    samples = picture.samples
    target = picture.target_batch_size
    if picture.eta_s is not None:
        more = max(picture.samples_per_second * (now - picture.time), 0.0)
        samples = max(samples, int(min(samples + more, target)) if math.isfinite(more) else 0)
    step = Text.assemble((f"Step {picture.step:,}", "bold"), "  next ", _countdown(picture, now))
    if not target:
        return _row(step.append(f"  {samples:,} samples"))
    return bar_rows((step, (samples, target), f"{samples:,}/{target:,} samples"))


def _countdown(picture: RunPicture, now: float) -> str:
    if not picture.target_batch_size:
        return "at an unknown time"
    if picture.eta_s is None or not math.isfinite(picture.eta_s):
        return "unknown: no peer computes"
    left_s = picture.time + picture.eta_s - now
    if left_s >= 1:
        return f"in {ago(left_s)}"
    return "is due" if left_s > -LATE_S else f"is due since {ago(-left_s)}"


def _numbers(picture: RunPicture, width: int) -> Text:
    last = picture.last
    parts = [
        f"{picture.num_peers:,} peer{'' if picture.num_peers == 1 else 's'}",
        f"{speed(picture.samples_per_second)} samples/s",
    ]
    if picture.committed_samples:
        parts.append(f"{whole(picture.committed_samples)} {picture.unit} committed")
    if last is not None and last.bytes_sent is not None:
        parts.append(f"{amount_of(last.bytes_sent)} sent in the last step")
    if last is not None and last.learning_rate is not None:
        parts.append(f"learning rate {last.learning_rate:.3g}")
    return _row(Text(fitted(parts, width, " · ")))


# the loss


def _loss(points: Sequence[Point], losses: Sequence[float], width: int, rows: int) -> list[RenderableType]:
    heldout = [point for point in points if point.heldout_loss is not None]
    parts = [f"{losses[-1]:.4f}"] if losses else []
    if heldout:
        newest = max(heldout, key=lambda point: point.step)
        parts.append(f"held-out {newest.heldout_loss:.4f} at step {newest.step:,}")
    if losses:
        parts += [f"lowest {min(losses):.4f}", f"first {losses[0]:.4f}"]
    lines: list[RenderableType] = [
        _rule("Loss", fitted(parts or ["none yet: it comes with the next global step"], width - len("Loss  "), " · "))
    ]
    if rows == 1 or not losses:
        return lines
    has_axis = width >= 5 * AXIS_WIDTH and rows > 2
    values = columns_of(losses, width - (AXIS_WIDTH if has_axis else 0))
    axis = {0: f"{max(values):.3f}", rows - 2: f"{min(values):.3f}"} if has_axis else {}
    for number, drawn in enumerate(chart_of(values, rows - 1)):
        line = Text(f"{axis.get(number, ''):>{AXIS_WIDTH - 1}} " if has_axis else "", style="dim")
        line.append(drawn, style="not dim green")
        lines.append(_row(line))
    return lines


def columns_of(values: Sequence[float], width: int) -> list[float]:
    """At most ``width`` numbers: few values are repeated, and many are replaced by means over equal stretches."""
    num = min(len(values), width)
    if (times := min(width // num, MAX_COLUMN_WIDTH)) > 1:
        return [value for value in values for _ in range(times)]
    bounds = [len(values) * column // num for column in range(num + 1)]
    return [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(bounds)]


def chart_of(values: Sequence[float], rows: int) -> list[str]:
    """A bar for each value, from the lowest to the highest one, in ``rows`` lines of block characters, top first."""
    low = min(values)
    span = max(values) - low
    most = rows * len(BLOCKS)
    heights = [1 + round((value - low) / span * (most - 1)) if span > 0 else 1 for value in values]
    lines = []
    for row in reversed(range(rows)):
        eighths = [min(max(height - row * len(BLOCKS), 0), len(BLOCKS)) for height in heights]
        lines.append("".join(BLOCKS[number - 1] if number else " " for number in eighths))
    return lines


# the peers


class Column(NamedTuple):
    """A column of the table of peers."""

    heading: str
    cell: Callable[[PeerRow, float], str]
    width: int | None  # None for as much as there is
    least_screen: int  # in columns
    is_number: bool = True


COLUMNS = [
    Column("samples", lambda peer, now: whole(peer.samples), 11, 0),
    Column("share", lambda peer, now: f"{peer.share:.1%}", 6, 0),
    Column("samples/s", lambda peer, now: speed(peer.samples_per_second), 9, 58),
    Column("step", lambda peer, now: whole(peer.step), 9, 58),
    Column("state", lambda peer, now: peer.state, 9, 44, False),
    Column("reach", lambda peer, now: peer.reach, 9, 70, False),
    Column("committed", lambda peer, now: whole(peer.rounds_committed), 9, 110),
    Column("missed", lambda peer, now: whole(peer.rounds_missed), 9, 110),
    Column("since", lambda peer, now: ago(now - peer.since) if peer.since else "", 7, 96),
    Column("peer id", lambda peer, now: abbreviated(peer.peer_id), 8, 120, False),
    Column("version", lambda peer, now: shown(peer.version), 8, 140, False),
    Column("device", lambda peer, now: shown(peer.device), 20, 160, False),
    Column("not in the last step because", lambda peer, now: shown(peer.reason), None, 190, False),
]


def _peers(picture: RunPicture, width: int, rows: int, now: float) -> list[RenderableType]:
    if not picture.peers:
        return [_rule("Peers", "" if picture.num_peers else "nobody trains")]
    columns = [column for column in COLUMNS if width >= column.least_screen]
    gap = 2 if width >= 100 else 1
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, expand=True, header_style="bold", width=width)
    table.add_column("peer", ratio=1, no_wrap=True, overflow="ellipsis")
    for column in columns:
        table.add_column(
            picture.unit if column.heading == "samples" else column.heading,
            justify="right" if column.is_number else "left", no_wrap=True, overflow="ellipsis",
            width=column.width, ratio=None if column.width else 1,
        )  # fmt: skip
    seen = picture.peers[: rows - 2]
    for peer in seen:
        name = Text(shown(peer.name) or abbreviated(peer.peer_id))
        cells = [Text(column.cell(peer, now)) for column in columns]
        for column, cell in zip(columns, cells, strict=True):
            if column.heading == "state":
                cell.stylize(STATE_STYLES.get(peer.state, ""))
        table.add_row(name, *cells, style="dim" if peer.state in ("gone", "left") else None)
    more = len(picture.peers) - len(seen)
    return [_rule("Peers", f"{len(seen):,} shown and {more:,} more" if more else ""), table]


# events, log and footer


def _event(event: RunEvent, now: float) -> Text:
    line = Text(f"{ago(now - event.time):>7}  ", style="dim")
    line.append(shown(event.text), style=f"not dim {EVENT_STYLES.get(event.kind, '')}")
    return _row(line)


def _log_rows(log: Sequence[logging.LogRecord], width: int, num_rows: int, now: float) -> list[Text]:
    """The newest lines that fit, oldest first: warnings, and others where these leave room."""
    warnings = [record for record in log if record.levelno >= logging.WARNING]
    others = [record for record in log if record.levelno < logging.WARNING]
    drawn: list[tuple[float, list[Text]]] = []
    for record in [*reversed(warnings[-num_rows:]), *reversed(others[-num_rows:])]:
        if num_rows > 0:
            rows = _log_line(record, width, min(num_rows, MAX_ROWS_PER_LINE), now)
            drawn.append((record.created, rows))
            num_rows -= len(rows)
    drawn.sort(key=lambda pair: pair[0])
    return [row for _, rows in drawn for row in rows]


def _log_line(record: logging.LogRecord, width: int, num_rows: int, now: float) -> list[Text]:
    is_warning = record.levelno >= logging.WARNING
    style = "yellow" if is_warning else ""
    if record.levelno >= logging.ERROR:
        style = "bold red"
    text = shown(f"{record.levelname} {record.getMessage()}" if is_warning else record.getMessage())
    rows = []
    for number, piece in enumerate(wrap(text, max(width - 9, 10), max_lines=num_rows, placeholder=" …")):
        row = Text(f"{ago(now - record.created) if number == 0 else '':>7}  ", style="dim")
        row.append(piece, style=f"not dim {style}")
        rows.append(_row(row))
    return rows


def _foot(footer: Sequence[str], width: int) -> list[RenderableType]:
    if not footer:
        return []
    lines = [shown(line) for line in footer]
    if cell_len(one := "   ".join(lines)) <= width:
        lines = [one]
    return [_rule(""), *(_row(Text(line)) for line in lines)]


def _rule(title: str, more: str = "") -> Rule:
    return Rule(Text.assemble((title, "bold"), " " if more else "", more), align="left", style="dim")


# texts


def _row(text: Text) -> Text:
    """One row, cut to the width of the terminal."""
    text.no_wrap = True
    text.overflow = "ellipsis"
    return text


def shown(text: str) -> str:
    """A text of a stranger as one line, without codes that move the cursor or reorder the text after it."""
    kept = []
    num_marks = 0
    for char in " ".join(text[:MAX_TEXT].split()):
        is_mark = unicodedata.category(char).startswith("M")
        num_marks = num_marks + 1 if is_mark else 0
        if num_marks <= MAX_MARKS and not 0xFE00 <= ord(char) <= 0xFE0F:  # no variants of emoji: widths differ
            kept.append(char if char.isprintable() else REPLACEMENT)
    if any(unicodedata.bidirectional(char) in ("R", "AL", "AN") for char in kept):
        kept.append(LEFT_TO_RIGHT)
    return "".join(kept)


def abbreviated(peer_id: str) -> str:
    """The end of a peer id: all ids begin alike."""
    return f"…{shown(peer_id[-6:])}"


def ago(seconds: float) -> str:
    """The time since an event: ``now``, ``95 s``, ``12 min``, ``5.5 h``, ``3 days``."""
    return rough(min(seconds, MAX_AGO_S)) if 1 <= seconds < math.inf else "now"


def whole(number: int) -> str:
    """A count: ``1,234,567``, and ``1.23e+12`` where that would be too long."""
    return f"{number:,}" if abs(number) < 10**9 else f"{number:.2e}"


def speed(number: float) -> str:
    """Samples per second: ``12.3``, ``12,345``, ``1.23e+09``."""
    if abs(number) < 1e4:
        return f"{number:.1f}"
    return f"{number:,.0f}" if abs(number) < 1e7 else f"{number:.2e}"


def card_of(picture: RunPicture, points: Sequence[Point]) -> Card:
    """The summary of a run at the end of a monitor: a heading, and (label, text) lines."""
    lines = [("step", f"{counted(picture.step, 'global step')} of the run")]
    if losses := [point.loss for point in points if point.loss is not None]:
        lines.append(("loss", f"{losses[0]:.4f} at first, {losses[-1]:.4f} at last, over all peers"))
    if measured := [point.heldout_loss for point in points if point.heldout_loss is not None]:
        lines.append(("held-out loss", f"{measured[0]:.4f} at first, {measured[-1]:.4f} at last"))
    lines.append((picture.unit, f"{picture.committed_samples:,} in the steps that this monitor knows"))
    outlook = "it goes on without this monitor" if picture.num_peers else "it goes on when a trainer joins"
    lines.append(("peers", f"{picture.num_peers} in the run; {outlook}"))
    return f"Run {picture.run_id!r}", lines
