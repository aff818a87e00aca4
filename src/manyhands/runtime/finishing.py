"""Work that a program which was told to leave may finish first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_ends_at: list[float] = []  # monotonic; of the blocks that are running


@contextmanager
def finishing(limit_s: float) -> Iterator[None]:
    """Whoever ends a program that does not leave in time waits for the end of this block, at most so many seconds."""
    ends_at = time.monotonic() + limit_s
    _ends_at.append(ends_at)
    try:
        yield
    finally:
        _ends_at.remove(ends_at)


def finishing_for_s() -> float:
    """For how many seconds at most something may still want to finish; 0 if there is nothing."""
    return max((ends_at - time.monotonic() for ends_at in list(_ends_at)), default=0.0)
