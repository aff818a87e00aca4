"""Attempts at a global step that failed one after the other, and what is said about them."""

from __future__ import annotations

import logging

from manyhands.base.errors import RoundAborted, Unavailable

logger = logging.getLogger(__name__)

FAILURES_UNTIL_ADVICE = 3


class Failures:
    """Counts them.

    Args:
        allow_solo: after some of them the peer goes on alone.
    """

    def __init__(self, *, allow_solo: bool) -> None:
        self._allow_solo = allow_solo
        self._in_a_row = 0

    @property
    def is_time_to_go_alone(self) -> bool:
        """Whether the user wants no further attempt with the others."""
        return self._allow_solo and self._in_a_row >= FAILURES_UNTIL_ADVICE

    def add(self, error: BaseException, samples: int) -> None:
        """One more; so many samples of this peer wait.

        Raises:
            BaseException: what it failed with, if that has nothing to do with the others.
        """
        if not isinstance(error, (RoundAborted, Unavailable)):
            raise error
        self._in_a_row += 1
        logger.warning("Skipped averaging: %s; the %d samples of this peer count in the next attempt", error, samples)
        if self._in_a_row % FAILURES_UNTIL_ADVICE == 0:
            logger.warning(
                "%d attempts failed in a row: other peers of the run are seen, but no round with them succeeds. %s; "
                "manyhands doctor --initial-peers ... says whether it can reach them, and they can reach it",
                self._in_a_row,
                "It goes on alone" if self._allow_solo else "This peer does not step alone",
            )

    def end(self) -> None:
        """A step was made."""
        self._in_a_row = 0
