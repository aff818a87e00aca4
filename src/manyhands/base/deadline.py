"""Bounded waits that say what they waited for."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

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


T = TypeVar("T")


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


async def while_moving(
    work: Coroutine[Any, Any, T], progress: Callable[[], int], *, at_least: int, within_s: float, phase: str
) -> T:
    """Run ``work`` for as long as it gets on: a slow transfer is waited for, one that stands still is not.

    Args:
        progress: grows as the work gets on, for example the bytes that a stream has received.
        at_least: by how much it must grow
        within_s: in so many seconds.
        phase: as for :func:`time_limit`.
    Raises:
        Timeout: it did not; the work was cancelled, and has ended.
    """
    working = asyncio.get_running_loop().create_task(work)
    try:
        before = progress()
        while not (await asyncio.wait([working], timeout=within_s))[0]:
            if progress() < before + at_least:
                raise Timeout(phase, within_s)
            before = progress()
        return working.result()
    finally:
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
