"""The network thread of a peer.

The caller's thread trains; this thread runs an asyncio loop. The caller waits for it in :meth:`LoopThread.run`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from manyhands.base.errors import ConfigError, Timeout
from manyhands.runtime.switch_interval import SWITCH_INTERVAL

T = TypeVar("T")
logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
CANCEL_TIMEOUT_S = 1.0
CLOSED = "the peer is closed; make another one. A forked process has to make one of its own"


class LoopThread:
    """An asyncio loop in a background thread."""

    def __init__(self, name: str = "manyhands") -> None:
        self._loop = asyncio.SelectorEventLoop()  # on Windows too, as the Proactor loop cannot watch plain sockets
        self._lock = threading.Lock()  # prevents a submit after the close has begun
        self._is_closing = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        SWITCH_INTERVAL.shorten()
        try:
            self._loop.run_forever()
        finally:
            self._finish()
            SWITCH_INTERVAL.restore()

    def _finish(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            _, stuck = self._loop.run_until_complete(asyncio.wait(tasks, timeout=CANCEL_TIMEOUT_S))
            for task in stuck:
                logger.error("Task %r did not end within %.3g s of its cancellation", task.get_name(), CANCEL_TIMEOUT_S)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()  # does not wait for executor jobs: some can hang, and none can be interrupted

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start ``coro`` on the loop; any other thread may wait for the future."""
        with self._lock:
            if self._is_closing or not self._thread.is_alive():  # a forked child has the object, but not the thread
                coro.close()
                raise ConfigError(CLOSED)
            return asyncio.run_coroutine_threadsafe(coro, self._loop)

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float, phase: str) -> T:
        """Run ``coro`` on the loop and wait for its result; Ctrl-C cancels it.

        Raises:
            Timeout: it took longer than ``timeout_s`` seconds; ``phase`` says what was waited for.
            ConfigError: the thread was closed before the result arrived.
        """
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError("a blocking call on the loop's own thread would wait for itself; await the coroutine")
        try:
            future = self.submit(coro)
        except BaseException:  # Ctrl-C just now, too: Python would warn that nobody has awaited the coroutine
            if inspect.getcoroutinestate(coro) == inspect.CORO_CREATED:  # else it has begun on the loop, and ends there
                coro.close()
            raise
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError as error:
            raise ConfigError(CLOSED) from error
        except concurrent.futures.TimeoutError as error:
            if future.done():  # at the last moment, or the coroutine itself raised it
                return future.result()
            raise Timeout(phase, timeout_s) from error
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel all tasks and end the thread. May be called twice."""
        with self._lock:
            if not self._is_closing and self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._is_closing = True
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("The network thread did not end within %.3g s", CLOSE_TIMEOUT_S)
