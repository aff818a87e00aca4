"""The summary that a command prints at its end: a heading, and lines of a label and a text each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console

Card = tuple[str, Sequence[tuple[str, str]]]
"""A heading, and (label, text) lines."""


def print_card(console: Console, card: Card) -> None:
    """Print the summary; ignored if the terminal is gone."""
    heading, lines = card
    width = max(len(name) for name, _ in lines)
    with suppress(OSError, UnicodeError):  # the terminal was closed or lacks the characters
        console.print()
        console.print(heading, style="bold", markup=False, emoji=False, soft_wrap=True)
        for name, text in lines:
            console.print(f"  {name:<{width}}  {text}", markup=False, emoji=False, soft_wrap=True)
