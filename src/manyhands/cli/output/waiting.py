"""What a command is doing, for a person who waits for it."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.status import Status
from rich.text import Text


def shown(doing: str) -> Status:
    """While the block runs, show what the command does: on standard error, and only in a terminal.

    A notebook sets FORCE_COLOR, but shows the codes that redraw a line as they are.
    """
    console = Console(stderr=True, force_terminal=None if sys.stderr.isatty() else False)
    return console.status(Text(doing), spinner="line")
