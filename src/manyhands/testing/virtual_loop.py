"""An asyncio loop on which time is virtual: it jumps to the next timer when nothing is ready.

Nothing here waits, and nothing depends on memory addresses, so the same program with the same seed does the same things
in the same order, in any process. Threads and sockets do not exist in this world: executor jobs run on the loop, and
take the virtual time that a model says.

Callbacks belong to the *host* in whose context they were scheduled (:data:`current_host`). A frozen host's callbacks
wait until it thaws; those of a dead host never run.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import math
import selectors
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Schedulable(Protocol):
    """What the loop asks of a host before it runs one of its callbacks."""

    def may_run(self, resume: Callable[[], None], context: contextvars.Context) -> bool:
        """Whether to run a callback now; a host that says no calls ``resume`` later, or never."""


current_host: contextvars.ContextVar[Schedulable | None] = contextvars.ContextVar("current_host", default=None)


class Deadlock(Exception):
    """Everybody waits, and nothing will ever happen; names those who wait and where."""


class VirtualTimeout(Exception):
    """The main coroutine was not done when its virtual time was over; names who waits and where."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop. :meth:`run` is the way in.

    Args:
        executor_cost_s: virtual seconds that a job of ``run_in_executor`` takes, by its function.
    """

    def __init__(self, executor_cost_s: Callable[[Callable[..., Any]], float] = lambda job: 0.001) -> None:
        self.now = 0.0
        self.num_callbacks = 0
        self._limit_s = math.inf
        self._executor_cost_s = executor_cost_s
        self._serial = itertools.count()
        super().__init__(_NoWaiting(self))
        self.set_task_factory(_task_factory)

    def run(self, main: Coroutine[Any, Any, T], limit_s: float = 3600.0) -> T:
        """Run ``main`` to its end, and close the loop.

        Args:
            limit_s: virtual seconds after which it is too late.
        Raises:
            Deadlock: ``main`` waits for something that can never happen.
            VirtualTimeout: ``main`` was not done in time.
        """
        asyncio.set_event_loop(self)
        try:
            self._limit_s = limit_s
            return self.run_until_complete(self.create_task(main, name="main"))
        finally:
            self._abandon()
            asyncio.set_event_loop(None)
            self.close()

    def _abandon(self) -> None:
        """What still waits never goes on; its clean-up must not run at a moment that the collector chooses."""
        self.set_exception_handler(lambda loop, context: None)
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001
            coro = task.get_coro()
            if isinstance(coro, Coroutine):
                _close_quietly(coro)

    def who_waits(self) -> str:
        """All unfinished tasks, and the line on which each waits."""
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        return "waiting: " + "; ".join(f"{task.get_name()} at {_where(task)}" for task in tasks)

    # time

    def time(self) -> float:
        return self.now

    def jump(self) -> None:
        """Go to the next timer."""
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        if not scheduled:
            raise Deadlock("nothing will ever happen again; " + self.who_waits())
        if scheduled[0].when() > self._limit_s:
            raise VirtualTimeout(f"not done after {self._limit_s:g} virtual seconds; " + self.who_waits())
        self.now = max(self.now, scheduled[0].when())

    # hosts

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        context = context if context is not None else contextvars.copy_context()
        host = context.get(current_host)
        if host is None:
            return super().call_soon(callback, *args, context=context)
        guarded = _Guarded(self, host, callback, args, context)
        guarded.handle = super().call_soon(guarded.run, context=context)
        return guarded.handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        context = context if context is not None else contextvars.copy_context()
        host = context.get(current_host)
        if host is None:
            return super().call_at(when, callback, *args, context=context)
        guarded = _Guarded(self, host, callback, args, context)
        guarded.handle = handle = super().call_at(when, guarded.run, context=context)
        return handle

    # what would bring in chance or threads

    def create_future(self) -> asyncio.Future[Any]:
        return _NumberedFuture(next(self._serial), loop=self)

    def next_serial(self) -> int:
        """A number that no other task or future of this loop has."""
        return next(self._serial)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future = self.create_future()
        self.call_later(self._executor_cost_s(func), _run_job, future, func, args)
        return future


class _Guarded:
    """A callback that its host may hold up; it can be cancelled all the while."""

    handle: asyncio.Handle

    def __init__(
        self,
        loop: VirtualLoop,
        host: Schedulable,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context,
    ) -> None:
        self._loop, self._host, self._context = loop, host, context
        self._callback, self._args = callback, args

    def run(self) -> None:
        """Run it now, if it is still wanted and the host lets it."""
        if not self.handle.cancelled() and self._host.may_run(self.run, self._context):
            self._loop.num_callbacks += 1
            self._callback(*self._args)


class _NumberedFuture(asyncio.Future[Any]):
    """Hashes by its number: sets of futures have the same order in each process."""

    def __init__(self, number: int, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._number = number

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class _NumberedTask(asyncio.Task[Any]):
    """Hashes by its number, like :class:`_NumberedFuture`."""

    def __init__(self, coro: Coroutine[Any, Any, Any], number: int, **kwargs: Any) -> None:
        self._number = number
        super().__init__(coro, **kwargs)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


def _task_factory(loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> _NumberedTask:
    assert isinstance(loop, VirtualLoop)
    return _NumberedTask(coro, loop.next_serial(), loop=loop, **kwargs)


def _run_job(future: asyncio.Future[T], func: Callable[..., T], args: tuple[Any, ...]) -> None:
    if future.cancelled():
        return
    try:
        future.set_result(func(*args))
    except Exception as error:  # noqa: BLE001 (it belongs to whoever waits for the job)
        future.set_exception(error)


def _where(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    return f"{frames[-1].f_code.co_filename.rpartition('/')[2]}:{frames[-1].f_lineno}" if frames else "its end"


def _close_quietly(coro: Coroutine[Any, Any, Any] | Generator[Any, Any, Any]) -> None:
    try:
        coro.close()
    except BaseException:  # noqa: BLE001 (clean-up of what was abandoned, in a world that has ended)
        return


class _NoWaiting(selectors.SelectSelector):
    """There are no sockets here: where a real loop waits, this one jumps."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._loop.jump()
        return []
