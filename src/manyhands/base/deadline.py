"""Bounded waits that say what they waited for."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from manyhands.base.errors import Timeout

if sys.version_info >= (3, 11):
    from asyncio import timeout as _timeout
else:
    from async_timeout import timeout as _timeout


@asynccontextmanager
async def time_limit(timeout_s: float, phase: str) -> AsyncIterator[None]:
    """Bound the waits inside the block.

    Args:
        timeout_s: seconds from now.
        phase: what is waited for and for whom, as the end of the sentence "timed out after 5 s …".
    Raises:
        Timeout: the time was over; it names the phase.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    try:
        async with _timeout(timeout_s):
            yield
    except asyncio.TimeoutError as error:
        if loop.time() < deadline:  # somebody else's timeout, passing through
            raise
        raise Timeout(phase, timeout_s) from error
