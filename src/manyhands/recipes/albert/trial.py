"""Finds by a short trial how many samples a peer should compute at once."""

from __future__ import annotations

import time
from collections.abc import Callable

from manyhands.base.errors import ConfigError

LEAST_BATCH_S = 0.2
"""Shorter batches spend too much of their time between them."""

MOST_BATCH_S = 1.0
"""Longer ones keep the others waiting at the end of each global step."""

NUM_TIMED = 2
"""The faster one counts: this machine may do something else for a moment."""


class OutOfMemory(ConfigError):
    """The device cannot hold such a batch, or the model."""


def fitting_batch_size(seconds_for: Callable[[int], float], limit: int) -> int:
    """The smallest power of two that takes ``LEAST_BATCH_S``, but no longer than ``MOST_BATCH_S``; 1 at least.

    Takes about as long as four such batches.

    Args:
        seconds_for: computes so many samples, and says how long that took; or raises :class:`OutOfMemory`.
        limit: no more samples than this.
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
    """How many seconds a computation takes."""
    started = time.perf_counter()
    compute()
    return time.perf_counter() - started
