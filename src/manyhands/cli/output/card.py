"""The summary that a command prints at its end: a heading, and lines of a label and a text each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

Card = tuple[str, Sequence[tuple[str, str]]]
"""A heading, and (label, text) lines."""


def print_card(card: Card) -> None:
    """Print the summary; ignored if the terminal is gone or lacks the characters."""
    heading, lines = card
    width = max(len(name) for name, _ in lines)
    with suppress(OSError, UnicodeError):
        print(f"\n{heading}")  # noqa: T201
        for name, text in lines:
            print(f"  {name:<{width}}  {text}", flush=True)  # noqa: T201
