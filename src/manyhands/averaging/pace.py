"""How fast this peer's streams on long links should send together, by what rounds have shown. Pure.

Several streams that fill one line in bursts overflow its queue, and each loss holds one of them up for several round
trips. A system that paces them at what the line carries, and each so that all end together, loses hardly anything.

A paced round shows no more than its pace. If it kept that up, the next one is a little faster, and after a few such
rounds much faster; if it did not, the line is full.
"""

from __future__ import annotations

KEPT_UP = 0.95
"""Of the pace; a round that was slower was not held back by it."""
STEP = 0.01
"""By so much the pace rises after a round that kept it up."""
NUM_EQUAL_STEPS = 3
"""Steps in a row; each further one is twice as large as the one before."""
MAX_STEP = 0.5
NEWEST_SHARE = 0.5
"""Of a round that was slower than its pace in the next pace: what is too fast costs more than what is too slow."""
MAX_PACE = 1e12
"""Bytes per second."""


class Pace:
    """The pace of one round after the other.

    Attributes:
        bytes_per_s: for all streams together; None until a round has shown what the line carries.
    """

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self._num_steps, self._step = 0, STEP

    def add_round(self, measured: float, *, is_paced: bool) -> None:
        """Count what one round sent while it was held up, in bytes per second, > 0."""
        before = self.bytes_per_s
        if before is None:
            self.bytes_per_s = measured
        elif is_paced and measured >= KEPT_UP * before:
            self._num_steps += 1
            if self._num_steps > NUM_EQUAL_STEPS:
                self._step = min(2 * self._step, MAX_STEP)
            self.bytes_per_s = min(before * (1 + self._step), MAX_PACE)
        else:
            self.bytes_per_s = before * (measured / before) ** NEWEST_SHARE
            self._num_steps, self._step = 0, STEP
