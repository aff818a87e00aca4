"""The limit of open files and connections of this process."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

ENOUGH = 1 << 16
"""The soft limit that is set if the hard limit is infinite."""


def raise_open_files_limit() -> None:
    """Raise the soft limit to the hard one: many systems begin with 1024 or 256. This needs no privileges."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # macOS has another, lower limit
        logger.debug("the limit of %d open files could not be raised: %s", soft, error)
