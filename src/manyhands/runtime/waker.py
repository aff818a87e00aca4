"""Waking whoever waits for what other threads do, at no cost while nobody waits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress


class Waker:
    """Tasks of one loop, and threads, wait for something that any thread may bring about and then tells."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[None]] = set()
        self._threads: set[threading.Event] = set()

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        """Return once ``holds()`` is true; asked now, and after each :meth:`wake`. No bound: put one around it."""
        while True:
            woken = asyncio.get_running_loop().create_future()
            self._tasks.add(woken)  # before it asks: a call between the two is heard
            try:
                if holds():
                    return
                await woken
            finally:
                self._tasks.discard(woken)

    def block_until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """As :meth:`wait_until`, but the thread waits; False if it did so for ``timeout_s`` in vain."""
        deadline = time.monotonic() + timeout_s
        woken = threading.Event()
        self._threads.add(woken)
        try:
            while not holds():
                if not woken.wait(deadline - time.monotonic()):
                    return holds()
                woken.clear()
            return True
        finally:
            self._threads.discard(woken)

    def wake(self) -> None:
        """Something has changed. Any thread may call this."""
        for thread in list(self._threads):
            thread.set()
        for woken in list(self._tasks):
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                woken.get_loop().call_soon_threadsafe(_end, woken)


def _end(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
