"""An asyncio event loop with virtual time, which jumps to the next timer when nothing is ready.

Nothing waits, and nothing depends on memory addresses, so the same program with the same seed does the same things in
the same order, in any process. There are no threads or sockets: executor jobs run on the loop, and take as much virtual
time as ``executor_cost_s`` says.

The loop handles one event at a time: a timer runs, then everything that it made ready, then the next timer, even if
both are due at the same instant. Between two events the loop is *settled*; a world then checks its invariants.

Callbacks belong to the *life* of the host in whose context they were scheduled (:data:`current_life`). Callbacks of a
frozen host wait until it thaws; those of a dead one never run.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import heapq
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, TypeVar

import msgspec

from manyhands.testing.numbered import Life, NumberedFuture, NumberedTask, current_life, where

T = TypeVar("T")

PATIENCE = 1000
"""Rounds of ready callbacks after which other timers of the same instant run as well."""

MAX_ROUNDS = 100_000
"""Rounds of ready callbacks at one instant after which the loop reports an endless loop."""

COLLECT_EVERY = 1_000_000
"""Callbacks between two garbage collections of the young generation, so that collections are deterministic."""

COLLECT_ALL_EVERY = 8
"""Young collections for each full one."""

MIN_CANCELLED = 100
"""Cancelled timers are removed once there are more of them than this, and than half of all timers."""


Timer = tuple[float, int, "VirtualHandle | None", Callable[..., Any], tuple[Any, ...]]
"""Due time, serial number that orders timers of one instant, handle, callback and its arguments.

The timer of a host has a handle. The timer of no host has None, and the callback and arguments instead.
"""


class Deadlock(Exception):
    """All tasks wait, and nothing can wake them; lists the tasks and where they wait."""


class VirtualTimeout(Exception):
    """The main coroutine did not finish within its virtual time; lists the waiting tasks and where they wait."""


class VirtualHandle(msgspec.Struct, eq=False):
    """A scheduled callback. Creating one takes a third of the time of asyncio's ``TimerHandle``, which it replaces."""

    loop: Any
    callback: Callable[..., Any]
    args: tuple[Any, ...]
    context: contextvars.Context
    life: Any
    due: float
    is_timer: bool = False
    is_cancelled: bool = False

    def cancel(self) -> None:
        if not self.is_cancelled:
            self.is_cancelled = True
            self.callback = _nothing
            self.args = ()
            if self.is_timer:
                self.loop.num_cancelled += 1

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.due

    def __repr__(self) -> str:
        return f"<{getattr(self.callback, '__qualname__', self.callback)} at {self.due:.6f} s>"


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop with virtual time; start it with :meth:`run`.

    Args:
        executor_cost_s: virtual seconds that a job of ``run_in_executor`` takes, by its function.

    Attributes:
        now: virtual seconds since the loop was made.
        num_callbacks: callbacks run so far.
        num_cancelled: cancelled timers that are still queued.
        last_timer: the last event.
        on_settled: called after each event and everything that it led to.
    """

    def __init__(self, executor_cost_s: Callable[[Callable[..., Any]], float] = lambda job: 0.001) -> None:
        super().__init__()
        self.now = 0.0
        self.num_callbacks = 0
        self.num_cancelled = 0
        self.last_timer: VirtualHandle | None = None
        self.on_settled: Callable[[], None] | None = None
        self._queue: deque[VirtualHandle] = deque()
        self._timers: list[Timer] = []
        self._collect_at = COLLECT_EVERY
        self._num_collections = 0
        self._limit_s = math.inf
        self._executor_cost_s = executor_cost_s
        self._serial = itertools.count()
        self._order = itertools.count()
        self._outside = contextvars.Context()
        self.create_future = functools.partial(NumberedFuture, loop=self)  # type: ignore[method-assign]
        self.get_debug = _is_no_debug_mode  # type: ignore[method-assign]  # called for each future and each task

    def run(self, main: Coroutine[Any, Any, T], limit_s: float = 3600.0) -> T:
        """Run ``main`` to its end, and close the loop.

        Args:
            limit_s: virtual seconds that it may take.
        Raises:
            Deadlock: ``main`` waits for something that can never happen.
            VirtualTimeout: ``main`` did not finish in time.
        """
        try:
            return self.advance(main, limit_s)
        finally:
            self.end()

    def advance(self, main: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Like :meth:`run`, but keeps the loop open; call :meth:`end` after the last use."""
        asyncio.set_event_loop(self)
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            self._limit_s = limit_s
            return self.run_until_complete(self.create_task(main, name="main"))
        finally:
            asyncio.set_event_loop(None)
            if was_collecting:
                gc.enable()

    def end(self) -> None:
        """Close the loop. Tasks that still wait never resume, and their clean-up does not run."""
        self.set_exception_handler(lambda loop, context: None)
        asyncio.set_event_loop(self)
        disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # clean-up without a loop fails and logs errors
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001
            coro = task.get_coro()
            if isinstance(coro, Coroutine):
                _close_quietly(coro)
        logging.disable(disabled)
        self._queue.clear()
        self._timers.clear()
        asyncio.set_event_loop(None)
        self.close()

    def tasks_of(self, life: Life | None) -> list[asyncio.Task[Any]]:
        """Unfinished tasks that were started in one life, oldest first."""
        return [task for task in self._all_tasks() if task.life is life]

    def who_waits(self) -> str:
        """All unfinished tasks that could resume, and the line on which each waits."""
        tasks = [task for task in self._all_tasks() if task.life is None or task.life.is_running]
        return "waiting: " + "; ".join(f"{task.get_name()} at {where(task)}" for task in tasks)

    def _all_tasks(self) -> list[NumberedTask]:
        tasks = (task for task in asyncio.all_tasks(self) if isinstance(task, NumberedTask))
        return sorted(tasks, key=hash)

    # events

    def _run_once(self) -> None:
        """Run events until the loop is stopped."""
        queue = self._queue
        num_rounds = 0
        while not self._stopping:  # type: ignore[attr-defined]
            if not queue:
                if self.on_settled is not None:
                    self.on_settled()
                self._begin_next_timer()
                num_rounds = 0
            elif num_rounds >= PATIENCE:
                self._let_others_in(num_rounds)
            num_rounds += 1
            for _ in range(len(queue)):
                handle = queue.popleft()
                if handle.is_cancelled:
                    continue
                life = handle.life
                if life is not None and not life.is_running:
                    life.hold(handle)
                    continue
                self.num_callbacks += 1
                try:
                    handle.context.run(handle.callback, *handle.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 (as every asyncio loop does)
                    self._failed(handle.callback, error)

    def _begin_next_timer(self) -> None:
        """Queue the handle of the next timer; a callback of no host runs at once."""
        timers = self._timers
        while timers and (handle := timers[0][2]) is not None and handle.is_cancelled:
            heapq.heappop(timers)
            self.num_cancelled -= 1
        if not timers:
            raise Deadlock("no timer is left that could wake a task; " + self.who_waits())
        if timers[0][0] > self._limit_s:
            raise VirtualTimeout(f"not done after {self._limit_s:g} virtual seconds; " + self.who_waits())
        if self.num_callbacks >= self._collect_at:
            self._collect()
        due, _, handle, callback, args = heapq.heappop(timers)
        if due > self.now:
            self.now = due
        self.last_timer = handle
        if handle is not None:
            handle.is_timer = False
            self._queue.append(handle)
            return
        self.num_callbacks += 1
        try:
            callback(*args)
        except Exception as error:  # noqa: BLE001 (as every asyncio loop does)
            self._failed(callback, error)

    def _failed(self, callback: Callable[..., Any], error: BaseException) -> None:
        name = getattr(callback, "__qualname__", callback)
        self.call_exception_handler({"message": f"exception in callback {name}", "exception": error})

    def _collect(self) -> None:
        self._collect_at = self.num_callbacks + COLLECT_EVERY
        self._num_collections += 1
        gc.collect(1 if self._num_collections % COLLECT_ALL_EVERY else 2)

    def _let_others_in(self, num_rounds: int) -> None:
        """Run another timer of this instant, since callbacks that are ready again and again may wait for it."""
        if self._timers and self._timers[0][0] <= self.now:
            self._begin_next_timer()
        elif num_rounds >= MAX_ROUNDS:
            raise Deadlock(f"time stands still at {self.now:.6f} s: a task runs without end; " + self.who_waits())

    def time(self) -> float:
        return self.now

    # callbacks

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> VirtualHandle:
        if context is None:
            context = contextvars.copy_context()
        handle = VirtualHandle(self, callback, args, context, context.get(current_life), self.now)
        self._queue.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> VirtualHandle:
        return self.call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> VirtualHandle:
        if context is None:
            context = contextvars.copy_context()
        return self._add_timer(VirtualHandle(self, callback, args, context, context.get(current_life), when, True))

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> VirtualHandle:
        if context is None:
            context = contextvars.copy_context()
        due = self.now + delay
        return self._add_timer(VirtualHandle(self, callback, args, context, context.get(current_life), due, True))

    def call_outside(self, when: float, callback: Callable[..., Any], *args: Any) -> None:
        """Like ``call_at``, for a callback that belongs to no host; it must not depend on its context."""
        heapq.heappush(self._timers, (when, next(self._order), None, callback, args))

    def call_in(self, life: Life, callback: Callable[..., Any], *args: Any) -> None:
        """Call at once if a host runs, when it thaws if it is frozen, and never if it is dead.

        The callback must not depend on its context: a call at once runs in the context of the caller.
        """
        if life.is_running:
            callback(*args)
        else:
            life.hold(VirtualHandle(self, callback, args, self._outside, life, self.now))

    def resume(self, handles: Iterable[VirtualHandle]) -> None:
        """Run held callbacks in order."""
        self._queue.extend(handles)

    def _add_timer(self, handle: VirtualHandle) -> VirtualHandle:
        timers = self._timers
        heapq.heappush(timers, (handle.due, next(self._order), handle, _nothing, ()))
        if self.num_cancelled > MIN_CANCELLED and 2 * self.num_cancelled > len(timers):
            timers[:] = [timer for timer in timers if timer[2] is None or not timer[2].is_cancelled]
            heapq.heapify(timers)
            self.num_cancelled = 0
        return handle

    # sources of randomness or threads

    def next_serial(self) -> int:
        """A serial number, unique among the tasks and futures of this loop."""
        return next(self._serial)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, **kwargs: Any
    ) -> asyncio.Task[T]:
        self._check_closed()  # type: ignore[attr-defined]
        return NumberedTask(coro, next(self._serial), loop=self, name=name, **kwargs)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future = self.create_future()
        self.call_later(self._executor_cost_s(func), _run_job, future, func, args)
        return future


def _nothing() -> None:
    """Replaces a cancelled callback."""


def _is_no_debug_mode() -> bool:
    """Replaces ``get_debug``: the loop has no debug mode."""
    return False


def _run_job(future: asyncio.Future[T], func: Callable[..., T], args: tuple[Any, ...]) -> None:
    if future.cancelled():
        return
    try:
        future.set_result(func(*args))
    except Exception as error:  # noqa: BLE001 (raised where the result of the job is awaited)
        future.set_exception(error)


def _close_quietly(coro: Coroutine[Any, Any, Any] | Generator[Any, Any, Any]) -> None:
    try:
        coro.close()
    except BaseException:  # noqa: BLE001 (the clean-up of a task that was abandoned at the end of its world)
        return
