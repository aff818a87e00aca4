"""Formats numbers, durations and errors for log lines and reports."""

from __future__ import annotations

import shlex

MAX_REASON_LENGTH = 300


def counted(number: int, noun: str) -> str:
    """Format a count: ``1 peer``, ``2 peers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def rough(seconds: float) -> str:
    """Format a duration: ``95 s``, ``12 min``, ``5.5 h``, ``3 days``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:,.0f} days"


def amount_of(num_bytes: int) -> str:
    """Format an amount of data: ``12.3 MB``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return counted(num_bytes, "byte")


def shell_option(option: str, value: str) -> str:
    """Write an option for a shell: a value that begins with a dash would be taken for another option."""
    separator = "=" if value.startswith("-") else " "
    return f"{option}{separator}{shlex.quote(value)}"


def reason_of(error: BaseException | str) -> str:
    """Shorten the message of another library, or of its error, to one line."""
    return " ".join(str(error).split())[:MAX_REASON_LENGTH] or type(error).__name__
