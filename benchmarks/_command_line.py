"""Command-line helpers of the benchmarks."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line on stderr, with exit code 2."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help says more)\n")


def positive(text: str) -> float:
    """A number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def positive_int(text: str) -> int:
    """A whole number above zero."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def positive_ints(text: str) -> list[int]:
    """Whole numbers above zero, separated by commas."""
    return [positive_int(one) for one in text.split(",")]


def json_path(text: str) -> Path:
    """The path of a file whose folder exists."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: there is no folder {str(path.parent)!r}")
    return path


class Steps:
    """Shows the current step on stderr: a bar on a terminal, else one line for each step."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)
        self._num_begun = 0

    def begin(self, text: str) -> None:
        """End the previous step and begin this one."""
        self._progress.update(self._task, description=text, completed=self._num_begun)
        self._num_begun += 1
        if self._progress.disable:
            print(text, file=sys.stderr, flush=True)


@contextmanager
def progress_of(total: int) -> Iterator[Steps]:
    """Show ``total`` steps while the block runs."""
    console = Console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Steps(progress, total)


def write_json(path: Path | None, results: list[dict[str, Any]]) -> None:
    """Write the results as JSON, if a path was given."""
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n")


def skip(reason: str) -> NoReturn:
    """End a script that cannot measure anything here, with exit code 2: what was asked for does not exist."""
    print(f"skipped: {reason}", file=sys.stderr)
    sys.exit(2)


def run(main: Any) -> NoReturn:
    """Run a script; Ctrl-C prints one line and gives exit code 130."""
    try:
        main()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)
