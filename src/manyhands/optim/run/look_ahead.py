"""Finds the group of the next global step while the last samples for it are still being computed.

Shortly before the target, each peer asks the leader for a place in the group, ahead of its values. When the target is
reached and the gradients are frozen, the connections exist, and peers that are gone are known. Training goes on until
the group stands; samples computed meanwhile also count in this step.
"""

from __future__ import annotations

import asyncio
import math

from manyhands.averaging.messages import Position
from manyhands.averaging.rounds import RoundRunner
from manyhands.optim.run.tracker import ProgressTracker
from manyhands.runtime import TaskOwner

AHEAD_S = 6.0
"""Default time from the beginning of the search to the predicted target: a dial to a dead machine takes 5 s."""
HELD_UP_S = 1.0
"""A search that has not found all peers by then waits for one that may be gone."""


class LookAhead:
    """Holds a place in the group of the next step, from shortly before its target on. Lives on the network thread.

    Args:
        tasks: owns the search.
        batch_size_lead: begin this many samples before the target, at the predicted speed; 0 never searches ahead.
            Default: ``AHEAD_S`` before the predicted time of the target.
    """

    def __init__(
        self, rounds: RoundRunner, tracker: ProgressTracker, tasks: TaskOwner, batch_size_lead: int | None
    ) -> None:
        self._rounds = rounds
        self._tracker = tracker
        self._tasks = tasks
        self._lead = batch_size_lead
        self._position: Position | None = None  # of the step whose group is looked for
        self._is_over = False  # an attempt at that step has begun
        self._timer: asyncio.TimerHandle | None = None
        self._search: asyncio.Task[None] | None = None
        self._searching_since = math.inf  # loop time
        rounds.on_called_ahead.append(self._begin)

    def plan(self) -> None:
        """Schedule the search by what is known of the others now; call this on any news of them."""
        if not self._may_search() or self._search is not None:
            return
        if self._tracker.outlook.num_peers == 1 or self._tracker.lacks_leader():
            return
        lead, ahead_s = (0, AHEAD_S) if self._lead is None else (self._lead, 0.0)
        left_s = self._tracker.seconds_until(self._tracker.target_batch_size - lead) - ahead_s
        if left_s == math.inf:
            return
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(loop.time() + max(left_s, 0.0), self._begin)

    def _may_search(self) -> bool:
        if self._position != self._tracker.position():
            self.resume()
        return self._lead != 0 and not self._is_over and not self._tasks.is_closed

    def _begin(self) -> None:
        """Begin: the time has come, or another peer predicts the target to be near."""
        if self._may_search() and self._search is None:
            self._searching_since = asyncio.get_running_loop().time()
            self._search = self._tasks.spawn(self._rounds.hold_place(), name="looking for a group ahead of time")

    async def end(self) -> None:
        """End the search as an attempt begins, which takes the place that was found."""
        search = self._search
        self.stop()
        self._position, self._is_over = self._tracker.position(), True
        if search is not None:
            await asyncio.wait([search])

    def resume(self) -> None:
        """Schedule again, after a failed attempt or at another position."""
        self.stop()
        self._position, self._is_over = self._tracker.position(), False

    def stop(self) -> None:
        """Cancel the search and its schedule."""
        if self._timer is not None:
            self._timer.cancel()
        if self._search is not None:
            self._tasks.cancel(self._search)
        self._timer = self._search = None

    def lasts_until(self) -> float:
        """When a delayed search will know which peers are gone (loop time); -inf if there is none."""
        held_up_s = asyncio.get_running_loop().time() - self._searching_since
        if self._search is None or held_up_s < HELD_UP_S or self._rounds.group_stands or self._tracker.is_called:
            return -math.inf
        return self._searching_since + AHEAD_S
