"""Looks for the group of the next global step while its last samples are still computed.

Near the target each peer asks the leader for a place, ahead of its values. So the connections are there, and who is
gone was found out, when the target is reached and the gradients are frozen; the first peer that comes with its values
has the leader call the others. Until the group stands, training goes on: what is computed meanwhile counts in this step
too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import Position
from manyhands.averaging.round_trigger import RoundTrigger, Stage
from manyhands.averaging.rounds import RoundRunner
from manyhands.base.errors import RoundAborted
from manyhands.optim.run.tracker import ProgressTracker
from manyhands.runtime import TaskOwner

T = TypeVar("T")

AHEAD_S = 6.0
"""So long before the predicted target the search begins by itself: a dial to a machine that is gone takes 5 s."""
HELD_UP_S = 1.0
"""A search that has not ended by then waits for somebody who is perhaps gone."""
SLACK_S = 10.0
"""Beyond what a round bounds itself to."""


class RoundScheduler(Generic[T]):
    """Plans the next round of one peer, or the next rounds in a grid. Lives on the network thread.

    Args:
        tasks: owns the search and the round.
        batch_size_lead: look for the group so many samples before the target, by the predicted speed; 0 never does it
            ahead. By default ``AHEAD_S`` before the predicted time of the target.
    """

    def __init__(
        self,
        rounds: RoundRunner,
        tracker: ProgressTracker,
        tasks: TaskOwner,
        config: AveragingConfig,
        batch_size_lead: int | None,
    ) -> None:
        self._rounds = rounds
        self._tracker = tracker
        self._tasks = tasks
        self._lead = batch_size_lead
        self._bound_s = 2 * config.averaging_timeout_s + config.in_doubt_timeout_s + SLACK_S
        self._trigger: RoundTrigger[T] | None = None
        self._planned_at: Position | None = None
        self._is_closed = False
        rounds.on_called_ahead.append(self._called_ahead)

    def close(self) -> None:
        """Plan nothing more."""
        self._is_closed = True
        self._drop()

    def look_ahead(self) -> None:
        """Plan the next round by when the target will be reached, as far as is known now."""
        if self._trigger is not None and self._planned_at != self._tracker.position():
            self._drop()
        if self._lead == 0 or self._is_closed or self._tracker.outlook.num_peers == 1 or self._tracker.lacks_leader():
            return
        lead, ahead_s = (0, AHEAD_S) if self._lead is None else (self._lead, 0.0)
        left_s = self._tracker.seconds_until(self._tracker.target_batch_size - lead) - ahead_s
        if left_s < math.inf:
            self._plan().schedule(asyncio.get_running_loop().time() + max(left_s, 0.0))

    def search_lasts_until(self) -> float:
        """Until when a search that is held up will have found out who is gone (loop time); -inf if there is none."""
        trigger, now = self._trigger, asyncio.get_running_loop().time()
        if trigger is None or trigger.stage is not Stage.SEARCHING or trigger.searching_since is None:
            return -math.inf
        is_held_up = now - trigger.searching_since >= HELD_UP_S and not self._rounds.group_stands
        return trigger.searching_since + AHEAD_S if is_held_up and not self._tracker.is_called else -math.inf

    async def begin(self, attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """One attempt, in the group that was found ahead if there is one.

        Args:
            attempt: at a round, such as :meth:`manyhands.averaging.rounds.RoundRunner.average` with its vector.
        Raises:
            RoundAborted: no value was changed.
        """
        trigger = self._trigger
        if trigger is None or trigger.stage in (Stage.DONE, Stage.CANCELLED):
            self._trigger, self._planned_at = None, None
            trigger = self._plan()
        trigger.schedule(asyncio.get_running_loop().time())
        trigger.allow(attempt)
        try:
            return await trigger.result(self._bound_s)
        except asyncio.TimeoutError as error:
            raise RoundAborted(f"the round did not end within {self._bound_s:.3g} s") from error
        except BaseException:
            if self._trigger is trigger:
                self._drop()  # the next attempt is planned anew
            raise
        finally:
            trigger.cancel()
            await trigger.over()

    def _plan(self) -> RoundTrigger[T]:
        if self._trigger is None:
            search = self._rounds.hold_place if self._lead != 0 else None
            self._trigger, self._planned_at = RoundTrigger(self._tasks, search), self._tracker.position()
        return self._trigger

    def _drop(self) -> None:
        if self._trigger is not None:
            self._trigger.cancel()
        self._trigger, self._planned_at = None, None

    def _called_ahead(self) -> None:
        """Another peer predicts the target to be near."""
        if self._lead != 0 and not self._is_closed and self._planned_at in (None, self._tracker.position()):
            self._plan().schedule(asyncio.get_running_loop().time())
