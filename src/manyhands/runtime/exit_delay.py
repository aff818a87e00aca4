"""Lets a program that was told to exit finish some work first."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_ends_at: list[float] = []  # monotonic deadlines of the running blocks

is_hurried = threading.Event()
"""Set when the program is told to exit a second time: optional work is then skipped."""


@contextmanager
def delay_exit(limit_s: float) -> Iterator[None]:
    """Delay a forced exit of the program until the end of this block, but at most for ``limit_s`` seconds."""
    ends_at = time.monotonic() + limit_s
    _ends_at.append(ends_at)
    try:
        yield
    finally:
        _ends_at.remove(ends_at)


def exit_delay_s() -> float:
    """Return the longest time that any running block may still take; 0 without one."""
    return max((ends_at - time.monotonic() for ends_at in list(_ends_at)), default=0.0)
