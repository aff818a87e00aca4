"""Background tasks with an owner that logs their failures and ends them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)


class TaskOwner:
    """Holds the background tasks of one component, logs those that fail, and ends all on :meth:`close`.

    Args:
        name: of the component, for log lines.
        on_failure: called on the loop with the exception of each failed task, after it was logged.
    """

    def __init__(self, name: str, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._name = name
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cancelled: set[asyncio.Task[Any]] = set()
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coro: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Run ``coro`` until it ends or the owner is closed."""
        if self.is_closed:
            coro.close()
            raise RuntimeError(f"{self._name} is closed; it cannot start {name!r}")
        task = asyncio.get_running_loop().create_task(coro, name=f"{self._name}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    @asynccontextmanager
    async def beside(self, coro: Coroutine[Any, Any, object], *, name: str) -> AsyncIterator[None]:
        """Run ``coro`` while the block runs; a failure is logged at once and does not affect the block."""
        task = self.spawn(coro, name=name)
        try:
            yield
        finally:
            self.cancel(task)
            await asyncio.gather(task, return_exceptions=True)

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task, once: a second cancellation would interrupt its cleanup."""
        if task in self._tasks and task not in self._cancelled:
            self._cancelled.add(task)
            task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._cancelled.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("Background task %r failed", task.get_name(), exc_info=error)
        if self._on_failure is not None:
            self._on_failure(error)

    async def close(self, timeout_s: float = 5.0) -> None:
        """Cancel all tasks and wait for them; log those that take longer than ``timeout_s`` seconds."""
        self.is_closed = True
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            self.cancel(task)
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=timeout_s)
            for task in stuck:
                logger.error("Background task %r did not end within %.3g s of its cancellation",
                             task.get_name(), timeout_s)  # fmt: skip
