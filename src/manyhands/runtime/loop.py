"""The one thread on which a peer does all its networking.

The caller's thread trains; this thread runs an asyncio loop. They meet in :meth:`LoopThread.run`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from manyhands.base.errors import ManyhandsError, Timeout

T = TypeVar("T")
logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


class LoopThread:
    """An asyncio loop in a background thread."""

    def __init__(self, name: str = "manyhands") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._finish()

    def _finish(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start ``coro`` on the loop; the future may be waited for from any other thread."""
        if not self._thread.is_alive():
            coro.close()
            raise ManyhandsError("the peer is closed")
        return asyncio.run_coroutine_threadsafe(coro, self._loop)

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float, phase: str) -> T:
        """Run ``coro`` on the loop and wait for its result; Ctrl-C cancels it.

        Raises:
            Timeout: it took longer than ``timeout_s`` seconds; ``phase`` says what was waited for.
        """
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError("a blocking call on the loop's own thread would wait for itself; await the coroutine")
        future = self.submit(coro)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            if future.done():  # the coroutine itself raised it
                raise
            raise Timeout(phase, timeout_s) from error
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel what still runs and end the thread. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("the network thread did not end within %.3g s", CLOSE_TIMEOUT_S)
