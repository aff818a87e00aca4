"""Waking tasks from other threads, at no cost while nobody waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress


class Bell:
    """Tasks of one loop wait for something that any thread may bring about, and then rings."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        """Return once ``holds()`` is true; it is asked now, and after each ring. No bound: put one around it."""
        while True:
            rung = asyncio.get_running_loop().create_future()
            self._waiting.add(rung)  # before it asks: a ring between the two is heard
            try:
                if holds():
                    return
                await rung
            finally:
                self._waiting.discard(rung)

    def ring(self) -> None:
        """Something has changed. Any thread may call this."""
        for rung in list(self._waiting):
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                rung.get_loop().call_soon_threadsafe(_end, rung)


def _end(rung: asyncio.Future[None]) -> None:
    if not rung.done():
        rung.set_result(None)
