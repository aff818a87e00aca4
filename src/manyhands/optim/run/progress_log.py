"""The line by which a person sees that a run is alive.

A program that shows the progress in another way can leave the line out: it is marked by :data:`SHOWN_LIVE`.
"""

from __future__ import annotations

import logging
import math

from manyhands.optim.run.progress import Progress, describe_progress

logger = logging.getLogger(__name__)

PERIOD_S = 10.0
SHOWN_LIVE = {"is_shown_live": True}
"""``extra`` of the log lines that say what a live view shows at every moment."""


class ProgressLog:
    """Logs how far the collaboration is: what is new at once, mere growth every :data:`PERIOD_S` seconds.

    New are another global step, another number of peers, an ETA that was unknown before, and the target reached.
    """

    def __init__(self) -> None:
        self._last_place = (-1, 0)
        self._last_stage = 0
        self._told_at = -math.inf

    def tell(self, step: int, progress: Progress, refresh_s: float, now: float) -> None:
        """Log the progress, if it is worth a line.

        Args:
            step: global steps that are made.
            refresh_s: until the records are read again.
            now: seconds of any clock.
        """
        if self._is_worth_a_line(step, progress, now):
            logger.info("%s", describe_progress(progress, refresh_s), extra=SHOWN_LIVE)

    def _is_worth_a_line(self, step: int, progress: Progress, now: float) -> bool:
        place, stage = (step, progress.num_peers), _stage(progress)
        if place == self._last_place and stage <= self._last_stage and now < self._told_at + PERIOD_S:
            return False
        self._last_place, self._last_stage, self._told_at = place, stage, now
        return True


def _stage(progress: Progress) -> int:
    """0: nobody knows when the target will be reached; 1: it is known; 2: it is reached."""
    return 2 if progress.eta_s == 0 else 1 if math.isfinite(progress.eta_s) else 0
