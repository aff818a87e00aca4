"""Threads for jobs that may block indefinitely, such as reading from a socket.

Python joins the threads of an executor when it exits, so that an endless job would hang the process; these threads are
daemons. Idle ones are kept for the next job.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

IDLE_S = 5.0
"""A thread without a job ends after this time."""


class BlockingThreads:
    """A pool with one thread for each running job.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self, job: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run a job on a thread. Cancelling the future does not end the job."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = _Worker(self, self._name)
        worker.jobs.put((loop, done, job, args))
        return done

    def close(self) -> None:
        """End the idle threads; the others end with their jobs."""
        with self._lock:
            self._is_closed = True
            idle = self._idle
            self._idle = []
        for worker in idle:
            worker.jobs.put(None)

    def rest(self, worker: _Worker) -> bool:
        """Add a worker to the idle ones; return whether it has to wait for another job."""
        with self._lock:
            if not self._is_closed:
                self._idle.append(worker)
            return not self._is_closed

    def leave(self, worker: _Worker) -> bool:
        """Remove a worker that has been idle for long; return whether it may end, as no job was given to it."""
        with self._lock:
            is_idle = worker in self._idle
            if is_idle:
                self._idle.remove(worker)
            return is_idle


class _Worker:
    """One thread."""

    def __init__(self, pool: BlockingThreads, name: str) -> None:
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pool = pool
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                task = self.jobs.get(timeout=IDLE_S)
            except queue.Empty:
                if self._pool.leave(self):
                    return
                continue
            if task is None:
                return
            _do(*task)
            del task  # releases its references
            if not self._pool.rest(self):
                return


def _do(loop: asyncio.AbstractEventLoop, done: asyncio.Future[T], job: Callable[..., T], args: tuple[Any, ...]) -> None:
    try:
        outcome: Any = job(*args)
        report: Callable[[Any], None] = done.set_result
    except BaseException as error:  # noqa: BLE001 (re-raised for the caller that awaits the job)
        outcome = error
        report = done.set_exception

    def finish() -> None:
        if not done.done():
            report(outcome)

    try:
        loop.call_soon_threadsafe(finish)
    except RuntimeError:  # the loop is closed: nobody waits
        return
