"""Finds the batch size of a peer by a short trial, and corrects it while the peer trains."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable

from manyhands.base.errors import ConfigError
from manyhands.base.text import counted

logger = logging.getLogger(__name__)

LEAST_BATCH_S = 0.2
"""Shortest useful batch in seconds: below it, the overhead between batches is too large."""

MOST_BATCH_S = 1.0
"""Longest useful batch in seconds: with longer ones, other peers wait at the end of each global step."""

NUM_NOTED = 8
"""Number of training batches whose median duration decides whether the size changes."""


class OutOfMemory(ConfigError):
    """The model or a batch does not fit on the device."""


def fitting_batch_size(seconds_for: Callable[[int], float], limit: int) -> int:
    """The smallest power of two that takes ``LEAST_BATCH_S`` or more, but at most ``MOST_BATCH_S``; at least 1.

    The trial takes about as long as three such batches.

    Args:
        seconds_for: computes a batch of so many samples and returns the seconds, or raises :class:`OutOfMemory`.
        limit: most samples.
    Raises:
        OutOfMemory: not even one sample fits.
    """
    fitting = 1
    seconds_for(fitting)  # the first one is slow everywhere: it allocates and compiles
    size = 1
    while size <= limit:
        try:
            batch_s = seconds_for(size)
            if batch_s >= LEAST_BATCH_S:  # once more, as the machine may have been busy for a moment
                batch_s = min(batch_s, seconds_for(size))
        except OutOfMemory:
            break
        if batch_s > MOST_BATCH_S:
            break
        fitting = size
        if batch_s >= LEAST_BATCH_S:
            break
        size *= 2
    return fitting


class FittingBatchSize:
    """The batch size that suits this machine, corrected if it was busy during the trial or gets busy later.

    Args:
        seconds_for, limit: as in :func:`fitting_batch_size`, which finds the first size.
    """

    def __init__(self, seconds_for: Callable[[int], float], limit: int) -> None:
        self._seconds_for = seconds_for
        self._limit = limit
        self._noted: list[float] = []
        self.size = fitting_batch_size(seconds_for, limit)

    def note(self, batch_s: float) -> int:
        """Note the seconds that a batch of :attr:`size` samples took; returns the size of the next batch."""
        self._noted.append(batch_s)
        if len(self._noted) < NUM_NOTED:
            return self.size
        usual_s = statistics.median(self._noted)
        self._noted = []
        before = self.size
        if usual_s > MOST_BATCH_S:
            self.size = max(1, before // 2)
        elif usual_s < LEAST_BATCH_S and 2 * before <= self._limit and self._try_size(2 * before):
            self.size = 2 * before
        if self.size != before:
            batch = counted(before, "sample")
            logger.info("A batch of %s takes %.2f s: the next ones have %d", batch, usual_s, self.size)
        return self.size

    def _try_size(self, size: int) -> bool:
        """Compute a batch of this size; return whether it fits on the device. If not, no larger size is tried again."""
        try:
            self._seconds_for(size)
        except OutOfMemory:
            self._limit = self.size
            return False
        return True


def timed(compute: Callable[[], None]) -> float:
    """Seconds that a computation takes."""
    started = time.perf_counter()
    compute()
    return time.perf_counter() - started
