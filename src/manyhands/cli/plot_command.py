"""``manyhands plot``: draw the curves of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from manyhands.monitor.plot import plot as plot_files


def plot(
    files: Annotated[
        tuple[Path, ...],
        Parameter(
            help="Event files (--events) of monitors, trainers and evaluators, and histories of monitors (SQLite)."
        ),
    ],
    /,
    *,
    output: Annotated[Path, Parameter(name=("--output", "-o"), help="The chart to write: a .png or .svg.")],
) -> None:
    """Draw loss, throughput and peers over the global steps.

    Several files are drawn on one chart, labelled by file name. For example:

        manyhands plot monitor.jsonl -o run.png

    Needs the extra manyhands[plot].
    """
    plot_files(files, output)
    print(output)  # noqa: T201
