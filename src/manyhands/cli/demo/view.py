"""Output of the demo: a live display in a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from manyhands.base.text import counted
from manyhands.cli.demo.tally import Summary, Tally, TrainerTally

SHOWN_LINES = 8
MIN_WIDTH = 76
"""Columns of a terminal in which the table of the trainers can be read."""


class DemoView(Protocol):
    """Output of the demo."""

    def say(self, who: str, line: str) -> None:
        """Show a line of one process, or of the demo itself."""

    def refresh(self, tally: Tally) -> None:
        """Show the state of the run."""

    def __enter__(self) -> DemoView: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class PlainView:
    """Prints lines as they come."""

    def say(self, who: str, line: str) -> None:
        print(f"{who:>9} | {line}", flush=True)  # noqa: T201

    def refresh(self, tally: Tally) -> None:
        """Does nothing: the lines are enough."""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


class LiveDemoView:
    """Redraws progress bars, a table of the trainers and the last lines."""

    def __init__(self, console: Console) -> None:
        self._lines: deque[str] = deque(maxlen=SHOWN_LINES)
        self._live = Live(console=console, refresh_per_second=8)

    def say(self, who: str, line: str) -> None:
        self._lines.append(f"{who:>9} | {line}")

    def refresh(self, tally: Tally) -> None:
        lines = Text("\n".join(self._lines), no_wrap=True, overflow="ellipsis", style="dim")
        self._live.update(Group(self._bars(tally), _table(tally), Panel(lines, title="log", title_align="left")))

    def _bars(self, tally: Tally) -> RenderableType:
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        step = tally.step
        grid.add_row("global steps", ProgressBar(tally.num_steps, step), f"{step} of {tally.num_steps}")
        if (progress := tally.progress) is not None and progress.target_batch_size:
            eta = f"ETA {progress.eta_s:.1f} s" if progress.eta_s is not None else "ETA unknown"
            grid.add_row(
                "samples to the next",
                ProgressBar(progress.target_batch_size, min(progress.samples, progress.target_batch_size)),
                f"{progress.samples} of {progress.target_batch_size}, {eta}, {counted(progress.num_peers, 'peer')}, "
                f"{progress.samples_per_second:.0f} samples/s",
            )
        if tally.page:
            return Group(grid, Text(f"page {tally.page}", no_wrap=True, overflow="ellipsis"))
        return grid

    def __enter__(self) -> LiveDemoView:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, traceback)


def _table(tally: Tally) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    for heading in ("trainer", "peer id", "step", "samples", "used", "samples/s", "loss", ""):
        justify: JustifyMethod = "left" if heading in ("trainer", "peer id", "") else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for trainer in tally.trainers:
        table.add_row(
            trainer.name,
            f"…{trainer.peer_id[-6:]}" if trainer.peer_id else "",
            str(trainer.step),
            str(trainer.counts.samples_computed),
            str(trainer.counts.samples_used),
            f"{trainer.samples_per_second:.1f}",
            f"{trainer.loss:.3f}" if trainer.loss is not None else "",
            _status(trainer),
            style="dim" if trainer.is_killed else None,
        )
    return table


def _status(trainer: TrainerTally) -> str:
    if trainer.is_killed:
        return "killed"
    if trainer.finished is not None:
        return "finished"
    if trainer.joined is None:
        return "starting"
    return "joined late" if trainer.is_newcomer else "training"


def print_summary(console: Console, summary: Summary) -> None:
    """Print the summary of the demo."""
    table = Table(title="The run", show_header=False, title_justify="left", box=None, padding=(0, 2))
    first, last = summary.heldout_loss_first, summary.heldout_loss_last
    if first is not None and last is not None:
        table.add_row("held-out loss", f"{first:.4f} before, {last:.4f} after {summary.steps} global steps")
    table.add_row("samples", f"{summary.samples_computed} computed, {summary.samples_used} used")
    table.add_row("rounds", f"{summary.rounds_committed} committed, {summary.rounds_aborted} aborted attempts")
    table.add_row("newcomer", f"{summary.joined_late_samples} of its samples were used")
    for peer_id, samples in summary.samples_per_peer.items():
        digest = summary.state_digest_per_peer.get(peer_id)
        state = f"state {digest[:16]}" if digest is not None else "killed on the way"
        megabytes = summary.bytes_sent_per_peer[peer_id] / 1e6
        table.add_row(f"peer …{peer_id[-6:]}", f"{samples} samples, {megabytes:.1f} MB sent, {state}")
    table.add_row("wall time", f"{summary.wall_s:.1f} s")
    console.print(table)
    for problem in summary.problems:
        console.print(f"problem: {problem}", highlight=False)
    if not summary.problems:
        console.print("The loss fell, all peers hold the identical state, and the newcomer contributed.")
