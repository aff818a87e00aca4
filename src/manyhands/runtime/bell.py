"""Waking whoever waits for what other threads do, at no cost while nobody waits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress


class Bell:
    """Tasks of one loop, and threads, wait for something that any thread may bring about, and then rings."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[None]] = set()
        self._threads: set[threading.Event] = set()

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        """Return once ``holds()`` is true; it is asked now, and after each ring. No bound: put one around it."""
        while True:
            rung = asyncio.get_running_loop().create_future()
            self._tasks.add(rung)  # before it asks: a ring between the two is heard
            try:
                if holds():
                    return
                await rung
            finally:
                self._tasks.discard(rung)

    def block_until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """As :meth:`wait_until`, but the thread waits; False if it did so for ``timeout_s`` in vain."""
        deadline = time.monotonic() + timeout_s
        rung = threading.Event()
        self._threads.add(rung)
        try:
            while not holds():
                if not rung.wait(deadline - time.monotonic()):
                    return holds()
                rung.clear()
            return True
        finally:
            self._threads.discard(rung)

    def ring(self) -> None:
        """Something has changed. Any thread may call this."""
        for thread in list(self._threads):
            thread.set()
        for rung in list(self._tasks):
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                rung.get_loop().call_soon_threadsafe(_end, rung)


def _end(rung: asyncio.Future[None]) -> None:
    if not rung.done():
        rung.set_result(None)
