"""A round that is planned ahead of time: its group is looked for first, and it begins once its values are there."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from manyhands.base.errors import RoundAborted, Unavailable
from manyhands.base.forgetting import without_frames
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Stage(enum.Enum):
    """Where a planned round is. From each stage one may only go on to later ones."""

    PLANNED = "waiting for its time"
    SEARCHING = "its group is looked for; it waits for leave to begin"
    RUNNING = "under way"
    DONE = "over; it has a result, or a reason why it has none"
    CANCELLED = "called off by this peer; the others go on without it"


class RoundTrigger(Generic[T]):
    """One planned round. All calls may be repeated; a later one that comes too late changes nothing.

    Lives on the network thread. Whoever plans a round and does not need it any more calls it off.

    Args:
        tasks: owns the round while it is under way.
        search: looks for the group from the planned time on, until it is cancelled, such as
            :meth:`manyhands.averaging.rounds.RoundRunner.hold_place`; without it nothing is done ahead.

    Attributes:
        stage: where it is.
        searching_since: when the search began (loop time); None before that.
    """

    def __init__(self, tasks: TaskOwner, search: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        self._tasks = tasks
        self._search = search
        self._begin: Callable[[], Coroutine[Any, Any, T]] | None = None
        self._searching: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_due = False
        self.stage = Stage.PLANNED
        self.searching_since: float | None = None
        self._result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._result.add_done_callback(lambda result: result.cancelled() or result.exception())

    def schedule(self, at: float) -> None:
        """Look for the group from this time (of the loop) on, and begin with leave; may be moved until then."""
        if self.stage is not Stage.PLANNED or self._is_due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._due)

    def allow(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """The values are there. The first leave counts.

        Args:
            begin: makes the attempt, such as :meth:`manyhands.averaging.rounds.RoundRunner.average` with its vector; it
                bounds itself.
        """
        if self.stage in (Stage.PLANNED, Stage.SEARCHING) and self._begin is None:
            self._begin = begin
            self._go_on()

    def cancel(self) -> None:
        """Do not begin, or leave a round that is under way; one that is over stays as it is."""
        if self.stage in (Stage.DONE, Stage.CANCELLED):
            return
        self.stage = Stage.CANCELLED
        if self._timer is not None:
            self._timer.cancel()
        for task in (self._searching, self._running):
            if task is not None:
                self._tasks.cancel(task)
        if not self._result.done():
            self._result.set_exception(RoundAborted("this peer called the round off"))

    async def result(self, timeout_s: float) -> T:
        """What the round came to; waiting may be given up and begun again.

        Raises:
            TimeoutError: it is not over by then.
            RoundAborted: it was called off; and whatever ``begin`` raises.
        """
        return await asyncio.wait_for(asyncio.shield(self._result), timeout_s)

    async def over(self) -> None:
        """Once it is over or called off: wait until nothing of it runs any more, which has been cancelled."""
        tasks = [task for task in (self._searching, self._running) if task is not None]
        if tasks:
            await asyncio.wait(tasks)

    def _due(self) -> None:
        self._timer = None  # which would keep this round, and its mean, until the collector comes
        self._is_due = True
        self._go_on()

    def _go_on(self) -> None:
        if not self._is_due or self.stage not in (Stage.PLANNED, Stage.SEARCHING):
            return
        if self._begin is not None:
            self.stage = Stage.RUNNING
            self._running = self._tasks.spawn(self._run(self._begin), name="a planned round")
        elif self.stage is Stage.PLANNED:
            self.stage = Stage.SEARCHING
            self.searching_since = asyncio.get_running_loop().time()
            if self._search is not None:
                self._searching = self._tasks.spawn(self._search(), name="looking for a group ahead of time")

    async def _run(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> None:
        try:
            if self._searching is not None:
                self._tasks.cancel(self._searching)
                await asyncio.wait([self._searching])
            outcome = await begin()
        except asyncio.CancelledError:
            self.cancel()
            raise
        except Exception as error:  # noqa: BLE001 (raised where the result is awaited)
            if self.stage is Stage.RUNNING:
                self.stage = Stage.DONE
                is_expected = isinstance(error, (RoundAborted, Unavailable))
                self._result.set_exception(without_frames(error) if is_expected else error)
        else:
            if self.stage is Stage.RUNNING:
                self.stage = Stage.DONE
                self._result.set_result(outcome)
