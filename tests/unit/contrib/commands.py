"""Parses the command lines of contrib/ and of the documentation as the program itself does."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manyhands.cli.main import app
from manyhands.cli.old_names import Translation

ROOT = Path(__file__).parents[3]
CONTRIB = ROOT / "contrib"


def parsed(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The name of the command and its arguments, which are checked as far as they are before a command begins.

    Raises:
        CycloptsError, ConfigError: the command line is refused.
    """
    translation = Translation(words)
    assert not translation.notes, "an old name"
    command, bound, ignored = app.parse_args(translation.words, exit_on_error=False, print_error=False)[:3]
    assert not ignored
    assert inspect.isfunction(command), words
    arguments = dict(bound.arguments)
    options = arguments.pop("options", None)  # of commands whose options are one dataclass
    return command.__name__, arguments | (vars(options) if options is not None else {})
