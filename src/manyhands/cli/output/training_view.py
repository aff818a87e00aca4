"""The terminal output of a trainer: a status line while it trains, and a summary at its end."""

from __future__ import annotations

import math
import shlex
import sys
from typing import Protocol

from rich.table import Table

from manyhands.base.text import counted, rough
from manyhands.cli.failing import CommandFailed
from manyhands.cli.output.card import Card, print_card
from manyhands.cli.output.live_view import console_of, live_line
from manyhands.cli.output.rows import MIN_BAR, bar_rows, fitted
from manyhands.recipes.albert.summary import Standing, TrainingSummary
from manyhands.runtime.exit_delay import delay_exit

SUMMARY_TIMEOUT_S = 4.0
"""Seconds that a trainer has for its summary after it was told to leave."""
SAMPLE_TEXT = "The capital of [MASK] is ..."


class Trainer(Protocol):
    """The part of :class:`manyhands.recipes.albert.training.AlbertTrainer` that is shown."""

    def run(self) -> None: ...

    def standing(self) -> Standing: ...

    def summary(self) -> TrainingSummary: ...


def run_in_view(trainer: Trainer) -> None:
    """Run a trainer until it ends or Ctrl-C, with a status line, and print the summary.

    Raises:
        CommandFailed: it ended, and its model could not be saved.
    """
    try:
        with live_line(console_of(sys.stdout), lambda width: line_of(trainer.standing(), width)):
            trainer.run()
    except KeyboardInterrupt:
        with delay_exit(SUMMARY_TIMEOUT_S):
            print_card(card_of(trainer.summary()))
        raise
    summary = trainer.summary()
    print_card(card_of(summary))
    if summary.folder is not None and summary.saved_step < summary.step:
        raise CommandFailed(f"the model of step {summary.step} was not saved in {summary.folder}; the log says why")


def line_of(standing: Standing, width: int) -> Table:
    """The status of a trainer and its run in one line. A narrow terminal leaves out the last parts."""
    samples = standing.samples
    target = standing.target_batch_size
    eta = f"ETA {rough(standing.eta_s)}" if math.isfinite(standing.eta_s) else "ETA unknown"
    if samples >= target:
        eta = "step is due"
    parts = [
        "averaging" if standing.is_averaging else eta,
        counted(standing.num_peers, "peer"),
        f"your share {standing.share:.0%}",
    ]
    if standing.loss is not None:
        parts.append(f"loss {standing.loss:.3f}")
    if standing.samples_per_second > 0:
        parts.append(f"{standing.samples_per_second:.1f} samples/s")
    head = f"Step {standing.step + 1}: {samples}/{target} samples"
    return bar_rows((head, (samples, target), fitted(parts, width - len(head) - MIN_BAR - 2)))


def card_of(summary: TrainingSummary) -> Card:
    """The heading of the summary, and its (label, text) lines."""
    share = summary.samples_counted / summary.samples_of_all if summary.samples_of_all else 0.0
    has_state = summary.num_steps > 0 or summary.is_alone  # otherwise the run may be further than this peer
    samples = f"{summary.samples_used} of yours"
    if summary.samples_counted < summary.samples_used:  # it brought more than one peer may count for
        samples += f", which counted for {summary.samples_counted}"
    if summary.num_steps:
        samples += f", {share:.1%} of all {summary.samples_of_all} in these steps"
    if (lost := summary.samples_lost) > 0:
        samples += f"; {lost} of a step that was not finished {'is' if lost == 1 else 'are'} lost"
    lines = [
        (
            "steps",
            f"{counted(summary.num_steps, 'global step')} with you; "
            f"the {'run' if has_state else 'model here'} is at step {summary.step}",
        ),
        ("samples", samples),
    ]
    if summary.first_loss is not None and not summary.num_steps:
        lines.append(("loss", f"{summary.first_loss:.4f} on your samples, before a step with them"))
    elif summary.first_loss is not None and summary.last_loss is not None:
        lines.append(("loss", f"{summary.first_loss:.4f} at first, {summary.last_loss:.4f} at last, on your samples"))
    if (heldout := summary.heldout) is not None and heldout.before != heldout.after:  # else the model has not changed
        what = f"on {counted(heldout.num_samples, 'sample')} that nobody trains on"
        lines.append(("held-out loss", f"{heldout.before:.4f} before, {heldout.after:.4f} after, {what}"))
    if summary.folder is None:
        lines.append(("model", "not saved, as --no-checkpoints says"))
    elif summary.checkpoint is None:
        next_start = "begins anew" if summary.is_alone else "loads the state of the others"
        lines.append(("model", f"not saved yet; the next start with {summary.folder} {next_start}"))
    else:
        missing = f"; step {summary.step} was not saved" if summary.saved_step < summary.step else ""
        lines.append(("model", f"{summary.checkpoint}{missing}"))
        lines.append(("try it", f'manyhands fill {shlex.quote(str(summary.folder))} "{SAMPLE_TEXT}"'))
    return f"Your part in run {summary.run_id!r}, {rough(summary.seconds)}", lines
