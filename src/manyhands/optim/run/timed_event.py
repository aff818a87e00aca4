"""A wait that ends when somebody rings, or when the time is over."""

from __future__ import annotations

import asyncio


class TimedEvent:
    """One task waits for it; whoever rings it wakes that one, or lets it pass when it comes.

    Costs a timer and a future for each wait, and no task, as bounding an ``asyncio.Event`` would.
    """

    def __init__(self) -> None:
        self._is_rung = False
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """End the wait; without one the next, unless :meth:`silence` comes first."""
        self._is_rung = True
        if self._waiter is not None:
            _finish(self._waiter)

    def silence(self) -> None:
        """Forget that it was rung."""
        self._is_rung = False

    async def wait(self, timeout_s: float) -> None:
        """Wait until it is rung, or for so many seconds."""
        if self._is_rung:
            return
        assert self._waiter is None, "one task waits"
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout_s, _finish, self._waiter)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None


def _finish(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
