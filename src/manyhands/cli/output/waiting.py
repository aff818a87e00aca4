"""What a command is doing, for a person who waits for it."""

from __future__ import annotations

from rich.console import Console
from rich.status import Status
from rich.text import Text


def shown(doing: str) -> Status:
    """While the block runs, show what the command does: on standard error, and only in a terminal."""
    return Console(stderr=True).status(Text(doing), spinner="line")
