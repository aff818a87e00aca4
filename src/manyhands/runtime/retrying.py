"""Retries while the network is unavailable."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from manyhands.base.errors import Unavailable

T = TypeVar("T")
logger = logging.getLogger(__name__)

FIRST_WAIT_S = 2.0
MOST_WAIT_S = 60.0


def until_reached(attempt: Callable[[], T], sleep: Callable[[float], object], what: str) -> T:
    """Call ``attempt`` until it does not raise ``Unavailable``; the waits in between double, up to a minute.

    Args:
        what: for the log, such as ``joining run 'albert'``.
    """
    wait_s = FIRST_WAIT_S
    while True:
        try:
            return attempt()
        except Unavailable as error:
            logger.warning("%s has failed: %s; trying again in %.0f s", what, error, wait_s)
        sleep(wait_s)
        wait_s = min(2 * wait_s, MOST_WAIT_S)
