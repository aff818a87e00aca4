"""Timeouts that name what was waited for."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, TypeVar

from manyhands.base.errors import Timeout

if sys.version_info >= (3, 11):
    from asyncio import timeout as _timeout
else:
    from async_timeout import timeout as _timeout


T = TypeVar("T")


def time_limit(timeout_s: float, phase: str) -> AbstractAsyncContextManager[None]:
    """Limit the time of the block.

    Args:
        timeout_s: seconds from now.
        phase: what is waited for, and for whom, as the end of the sentence "timed out after 5 s …".
    Raises:
        Timeout: the time was over; it names the phase.
    """
    return _TimeLimit(timeout_s, phase)


class _TimeLimit(AbstractAsyncContextManager[None]):
    def __init__(self, timeout_s: float, phase: str) -> None:
        self._timeout_s = timeout_s
        self._phase = phase

    async def __aenter__(self) -> None:
        self._limit = _timeout(self._timeout_s)
        await self._limit.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._limit.__aexit__(kind, error, traceback)
        except asyncio.TimeoutError as over:  # raised by this limit; one raised in the block passes as ``error``
            raise Timeout(self._phase, self._timeout_s) from over


async def wait_at_most(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until an event is set, but for at most ``timeout_s`` seconds."""
    with contextlib.suppress(asyncio.TimeoutError):
        async with _timeout(timeout_s):
            await event.wait()


async def while_moving(
    work: Coroutine[Any, Any, T], progress: Callable[[], int], *, at_least: int, within_s: float, phase: str
) -> T:
    """Run ``work`` for as long as it makes progress: a slow transfer may continue, a stalled one is cancelled.

    Args:
        progress: returns a number that grows with the work, such as the bytes that a stream has received.
        at_least: least growth of that number in each period; below it the work is stalled.
        within_s: length of a period, in seconds.
        phase: as for :func:`time_limit`.
    Raises:
        Timeout: there was too little progress; the work was cancelled, and has ended.
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
        elif not working.cancelled():
            working.exception()  # retrieved: it may have failed while this was cancelled
