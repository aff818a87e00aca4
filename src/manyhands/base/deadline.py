"""Bounded waits that say what they waited for."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from manyhands.base.errors import Timeout

if sys.version_info >= (3, 11):
    from asyncio import timeout as _timeout

    def _is_over(limit: asyncio.Timeout) -> bool:
        return limit.expired()

else:
    from async_timeout import Timeout as _Limit
    from async_timeout import timeout as _timeout

    def _is_over(limit: _Limit) -> bool:
        return bool(limit.expired)


@asynccontextmanager
async def time_limit(timeout_s: float, phase: str) -> AsyncIterator[None]:
    """Bound the waits inside the block.

    Args:
        timeout_s: seconds from now.
        phase: what is waited for and for whom, as the end of the sentence "timed out after 5 s …".
    Raises:
        Timeout: the time was over; it names the phase.
    """
    try:
        async with _timeout(timeout_s) as limit:
            yield
    except asyncio.TimeoutError as error:
        if not _is_over(limit):  # somebody else's timeout, passing through
            raise
        raise Timeout(phase, timeout_s) from error
