"""Finds the batch size of a peer by a short trial."""

from __future__ import annotations

import time
from collections.abc import Callable

from manyhands.base.errors import ConfigError

LEAST_BATCH_S = 0.2
"""In shorter batches the overhead between batches is too large."""

MOST_BATCH_S = 1.0
"""Longer batches make the other peers wait at the end of each global step."""

NUM_TIMED = 2
"""The faster run counts: this machine may be busy for a moment."""


class OutOfMemory(ConfigError):
    """The model or a batch does not fit on the device."""


def fitting_batch_size(seconds_for: Callable[[int], float], limit: int) -> int:
    """The smallest power of two that takes ``LEAST_BATCH_S``, but no longer than ``MOST_BATCH_S``; at least 1.

    Takes about as long as four such batches.

    Args:
        seconds_for: computes a batch of this many samples and returns the seconds, or raises :class:`OutOfMemory`.
        limit: most samples.
    Raises:
        OutOfMemory: not even one sample fits.
    """
    fitting = 1
    seconds_for(fitting)  # the first one is slow everywhere: it allocates and compiles
    size = 1
    while size <= limit:
        try:
            batch_s = min(seconds_for(size) for _ in range(NUM_TIMED))
        except OutOfMemory:
            break
        if batch_s > MOST_BATCH_S:
            break
        fitting = size
        if batch_s >= LEAST_BATCH_S:
            break
        size *= 2
    return fitting


def timed(compute: Callable[[], None]) -> float:
    """Seconds that a computation takes."""
    started = time.perf_counter()
    compute()
    return time.perf_counter() - started
