"""Words for log lines and reports."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """``1 peer``, ``2 peers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
