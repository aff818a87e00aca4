"""Output of the demo: the lines of its processes, in a terminal the run below them, and at the end a summary."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from manyhands.base.text import counted
from manyhands.cli.demo.tally import MEAN_FLIP, LiarSummary, Summary, Tally, TrainerTally
from manyhands.cli.output.card import Card
from manyhands.cli.output.rows import bar_rows

TABLE_WIDTH = 76
"""Width of the table in characters. A narrower terminal shows its left part."""
SAID = {
    "sign-flip": "sent minus its gradient",
    MEAN_FLIP: "sent minus the means that it computed for the others, from its fourth step on",
}
"""What the liar did."""
NOBODY = {
    "sign-flip": "nobody: a gradient of the usual size may be that of other data",
    MEAN_FLIP: "nobody: it was honest in its first three steps",
}
"""Why nobody noticed a lie."""


class DemoView:
    """Prints lines as they come; in a terminal, draws the run below them while the block runs.

    Args:
        console: of standard output.
        tally: the state of the run, which is drawn.
    """

    def __init__(self, console: Console, tally: Tally) -> None:
        self._console = console
        self._tally = tally
        self._live = Live(console=console, get_renderable=self._drawn, auto_refresh=False, transient=True)

    def say(self, who: str, line: str) -> None:
        """Print a line of one process, or of the demo itself; in a terminal, as much of it as fits."""
        is_cut = self._console.is_terminal
        self._console.print(
            Text(f"{who:>9} | {line}"),
            soft_wrap=not is_cut,
            no_wrap=True,
            overflow="ellipsis" if is_cut else None,
        )

    def refresh(self) -> None:
        """Draw the state of the run."""
        self._live.refresh()

    def _drawn(self) -> RenderableType:
        tally = self._tally
        progress = tally.progress
        rows = [("global steps", (tally.step, tally.num_steps), f"{tally.step} of {tally.num_steps}")]
        if progress is not None and progress.target_batch_size:
            samples = f"{progress.samples} of {progress.target_batch_size}"
            eta = f"ETA {progress.eta_s:.1f} s" if progress.eta_s is not None else "ETA unknown"
            peers = f"{counted(progress.num_peers, 'peer')}, {progress.samples_per_second:.0f} samples/s"
            part = (progress.samples, progress.target_batch_size)
            rows.append(("samples to the next", part, f"{samples}, {eta}, {peers}"))
        page = [Text(f"page {tally.page}", no_wrap=True, overflow="ellipsis")] if tally.page else []
        return Group(bar_rows(*rows), *page, _table(tally))

    def __enter__(self) -> DemoView:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()


def _table(tally: Tally) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold", width=TABLE_WIDTH)
    for heading in ("trainer", "peer id", "step", "samples", "used", "samples/s", "loss", ""):
        justify: JustifyMethod = "left" if heading in ("trainer", "peer id", "") else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for trainer in tally.trainers:
        table.add_row(
            trainer.name,
            _short(trainer.peer_id) if trainer.peer_id else "",
            str(trainer.step),
            str(trainer.counts.samples_computed),
            str(trainer.counts.samples_used),
            f"{trainer.samples_per_second:.1f}",
            f"{trainer.loss:.3f}" if trainer.loss is not None else "",
            _status(trainer),
            style="dim" if trainer.is_killed else None,
        )
    return table


def _short(peer_id: str) -> str:
    return f"…{peer_id[-6:]}"


def _status(trainer: TrainerTally) -> str:
    if trainer.is_killed:
        return "killed"
    if trainer.finished is not None and not trainer.lie:
        return "finished"
    if trainer.joined is None:
        return "starting"
    if trainer.lie:
        return trainer.standing
    return "joined late" if trainer.is_newcomer else "training"


def card_of(summary: Summary) -> Card:
    """The summary of the demo: a heading, and (label, text) lines."""
    lines = [
        ("samples", f"{summary.samples_computed} computed, {summary.samples_used} used"),
        ("rounds", f"{summary.rounds_committed} committed, {summary.rounds_aborted} aborted attempts"),
    ]
    if summary.liar is None:
        lines.append(("newcomer", f"{summary.joined_late_samples} of its samples were used"))
    else:
        lines += _lines_of(summary.liar)
    first = summary.heldout_loss_first
    last = summary.heldout_loss_last
    if first is not None and last is not None:
        lines.insert(0, ("held-out loss", f"{first:.4f} before, {last:.4f} after {summary.steps} global steps"))
    for peer_id, samples in summary.samples_per_peer.items():
        digest = summary.state_digest_per_peer.get(peer_id)
        is_liar = summary.liar is not None and peer_id == summary.liar.peer_id
        state = f"state {digest[:16]}" if digest is not None else "the liar" if is_liar else "killed on the way"
        megabytes = summary.bytes_sent_per_peer[peer_id] / 1e6
        lines.append((f"peer {_short(peer_id)}", f"{samples} samples, {megabytes:.1f} MB sent, {state}"))
    lines.append(("wall time", f"{summary.wall_s:.1f} s"))
    if not summary.problems and not summary.has_learnt:
        lines.append(("outcome", "the liar undid what the others learnt; their states are equal"))
    elif not summary.problems:
        end = "the newcomer contributed" if summary.liar is None else "in spite of the liar"
        lines.append(("outcome", f"the loss fell, all states are equal, {end}"))
    lines += [("problem", problem) for problem in summary.problems]
    return "The run", lines


def _lines_of(liar: LiarSummary) -> Iterator[tuple[str, str]]:
    """What the trainer that lies did, who noticed it, and what became of it."""
    yield "liar", f"{_short(liar.peer_id)} {SAID[liar.lie]}"
    if not liar.standings:  # it has made no step
        return
    names = sorted({name for names in liar.noticed.values() for name in names})
    if names:
        steps = ", ".join(map(str, liar.noticed))
        yield "noticed by", f"{', '.join(names)}; they left it out of step {steps}"
    else:
        yield "noticed by", NOBODY[liar.lie]
    yield "standing", ", ".join(f"{standing} after step {step}" for step, standing in liar.standings.items())
