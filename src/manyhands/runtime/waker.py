"""Notifies tasks and threads of events in other threads, at no cost while none waits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress


class Waker:
    """A condition that tasks of one loop and threads can wait for, and that any thread can signal."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[None]] = set()
        self._threads: set[threading.Event] = set()

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        """Return once ``holds()`` is true, without a timeout. It is called now and after each :meth:`wake`."""
        while True:
            woken = asyncio.get_running_loop().create_future()
            self._tasks.add(woken)  # before the check, so that no wake in between is missed
            try:
                if holds():
                    return
                await woken
            finally:
                self._tasks.discard(woken)

    def block_until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Like :meth:`wait_until`, but block the thread; return False after ``timeout_s``."""
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
        """Signal a change. Any thread may call this."""
        for thread in list(self._threads):
            thread.set()
        for woken in list(self._tasks):
            with suppress(RuntimeError):  # the loop is closed: no task waits
                woken.get_loop().call_soon_threadsafe(_end, woken)


def _end(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
