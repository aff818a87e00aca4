"""Decides what a peer does after a micro-batch: go on computing, step with the others or alone, or load their state."""

from __future__ import annotations

import asyncio
import enum
import logging
import math
from collections.abc import Collection

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import Position
from manyhands.base.errors import ManyhandsError
from manyhands.base.identity import PeerId
from manyhands.optim.run.contacts import Contacts
from manyhands.optim.run.drift import Drift
from manyhands.optim.run.tracker import ProgressTracker
from manyhands.optim.state.transfer import StateServer
from manyhands.peer import Presence
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

NEAR_TIMEOUT_S = 1.0
"""The longest wait of a training loop to learn whether the target is reached."""
NEWCOMER_S = 3.0
"""After downloading the state, a peer has this long to appear before a lone peer moves on."""
LULL_S = 0.25
"""Far from the target, the shortest time between two reports: each report wakes two threads."""
FAR_S = 10.0
"""Beyond this predicted time to the target no peer looks for a group yet."""
BATCH_MARGIN = 1.25
"""A peer begins another batch before a round if this factor times its duration ends before the others' batches."""
PAUSE_S = 60.0
MAX_PAUSE_S = 600.0


class Decision(enum.Enum):
    """What to do after a micro-batch."""

    ACCUMULATE = "the target is not reached"
    AVERAGE = "the target is reached: average with the others"
    GO_ALONE = "the target is reached, and nobody else is there"
    LOAD_STATE = "the run is on another branch: load its state"
    RELOAD = "most peers at this position hold other parameters: load their state"


class StepDecisions:
    """Decides after each of a peer's micro-batches. Lives on the network thread.

    Args:
        tasks: call other peers in the background.
        allow_solo: step alone if no peer can be dialled.
    """

    def __init__(
        self,
        presence: Presence,
        run_id: str,
        tracker: ProgressTracker,
        server: StateServer,
        drift: Drift,
        averaging: AveragingConfig,
        tasks: TaskOwner,
        *,
        allow_solo: bool,
    ) -> None:
        self._endpoint = presence.endpoint
        self._tracker = tracker
        self._server = server
        self._drift = drift
        self._averaging = averaging
        self._allow_solo = allow_solo
        self._tasks = tasks
        self._contacts = Contacts(presence, run_id, tracker, tasks)
        self._courtesy = Courtesy()
        self._lull_until = -math.inf  # loop time
        self._lull_samples = 0
        self._due_at: tuple[Position, float] | None = (
            None  # at which position a step is due, and since when (loop time)
        )
        self._waited_in_vain_at: Position | None = None

    def close(self) -> None:
        self._lull_until = -math.inf
        self._contacts.close()

    def on_news(self) -> None:
        """There is news of the others."""
        self._lull_until = -math.inf
        self._contacts.connect_to_those_in_need()

    def note_step(self, members: Collection[PeerId]) -> None:
        """These peers have made the step, with this one."""
        self._courtesy.note_step(members, asyncio.get_running_loop().time())

    async def decide(
        self, samples: int, samples_per_second: float, batch_s: float = 0.0, *, may_wait: bool = False
    ) -> Decision:
        """Report what this peer has accumulated and the duration of a batch; returns what to do next.

        Args:
            may_wait: wait for the others' batches if these reach the target, rather than compute one more.

        Raises:
            ConfigError: another process with this peer's identity began earlier.
            ManyhandsError: this peer has left the run.
        """
        if self._tasks.is_closed:
            raise ManyhandsError("this peer left the run")
        tracker = self._tracker
        tracker.twin.check(asyncio.get_running_loop().time())
        tracker.report(samples, samples_per_second, batch_s)
        self._contacts.warn_if_stranded()
        if tracker.is_worth_a_look():
            await self._tracker.look(NEAR_TIMEOUT_S)
        if tracker.should_load_state():
            return Decision.LOAD_STATE
        if self._drift.should_load():
            return Decision.RELOAD
        is_arriving = may_wait and tracker.is_arriving()
        if is_arriving and samples:
            self._contacts.tell(tracker.view.reachable)
        if not tracker.is_due() and not (is_arriving and await self._reaches_target(batch_s)):
            self._note_lull(samples)
            return Decision.ACCUMULATE
        if self._due_at is None or self._due_at[0] != tracker.position():
            self._due_at = tracker.position(), asyncio.get_running_loop().time()
        if tracker.can_meet_somebody():
            is_time = self._has_time_for(batch_s) or self._waits_for_newcomers(is_alone=False)
            return Decision.ACCUMULATE if is_time else Decision.AVERAGE
        if not self._is_alone():  # but the peers that are there cannot be reached now
            return Decision.ACCUMULATE
        await tracker.look()  # before a step alone
        if not self._is_alone() or tracker.can_meet_somebody():
            return Decision.ACCUMULATE
        if not samples or self._waits_for_newcomers(is_alone=True) or await self._contacts.anyone_answers():
            return Decision.ACCUMULATE
        return Decision.GO_ALONE

    async def rest(self, seconds: float) -> None:
        """Rest for this time, or until a step becomes due."""
        if self._tracker.is_due():
            await asyncio.sleep(seconds)  # its obstacle is still there
        else:
            await self._tracker.wait_until_due(seconds)

    # far from the target

    def is_lull(self, samples: int, now: float) -> bool:
        """Whether a batch need not be reported and nothing is due; safe to call from any thread."""
        is_wanted = self._tracker.is_called or self._tracker.twin.is_older
        return now < self._lull_until and samples < self._lull_samples and not is_wanted

    def _note_lull(self, samples: int) -> None:
        progress, outlook = self._tracker.progress, self._tracker.outlook
        if FAR_S < min(progress.eta_s, outlook.eta_s) < math.inf:
            missing = self._tracker.target_batch_size - max(progress.samples, outlook.samples)
            self._lull_until = asyncio.get_running_loop().time() + LULL_S
            self._lull_samples = samples + missing // 2

    # at the target

    async def _reaches_target(self, batch_s: float) -> bool:
        """Wait for the others' current batches, which reach the target; returns whether they did.

        Otherwise each peer would compute one more batch, and a step would have that many samples too many. A wait in
        vain is not repeated before the next step.
        """
        now, tracker, position = asyncio.get_running_loop().time(), self._tracker, self._tracker.position()
        if self._waited_in_vain_at == position or batch_s <= 0:
            return False
        busy_until = tracker.view.busy_until(now)
        if busy_until - now > min(BATCH_MARGIN * batch_s, self._averaging.matchmaking_time_s / 2):
            return False  # another batch of this peer ends before theirs, or theirs take too long
        await tracker.wait_until_due(busy_until + min(batch_s, NEAR_TIMEOUT_S) - now)
        if not tracker.is_due():
            await self._tracker.look(NEAR_TIMEOUT_S)
        if not tracker.is_due():
            self._waited_in_vain_at = position
        return tracker.is_due()

    def _has_time_for(self, batch_s: float) -> bool:
        """Whether this peer can compute another batch before the others finish theirs and come to the round."""
        assert self._due_at is not None
        now, due_at = asyncio.get_running_loop().time(), self._due_at[1]
        until = min(self._tracker.view.busy_until(due_at), due_at + self._averaging.matchmaking_time_s / 2)
        return batch_s > 0 and now + BATCH_MARGIN * batch_s <= until

    def _is_alone(self) -> bool:
        """Whether waiting would bring no other peer to the step; a client begins no branch of its own."""
        if self._endpoint.client_mode and self._tracker.reader.trainers():
            return self._allow_solo and self._tracker.is_stranded
        return self._tracker.num_peers_here() == 1 and self._tracker.is_on_best_branch()

    # peers that load the state

    def _waits_for_newcomers(self, *, is_alone: bool) -> bool:
        """Whether to go on computing while others load the state, which a step would make out of date.

        A lone peer waits for anyone. In a group, where the others wait for this peer, it waits as long as for one that
        computes, and only for those whose last download took longer than a step: they would never take part else.
        """
        assert self._due_at is not None
        config, now = self._averaging, asyncio.get_running_loop().time()
        if now - self._due_at[1] >= (config.averaging_timeout_s if is_alone else config.matchmaking_time_s / 2):
            return False
        return self._courtesy.is_due(self._server.followers(NEWCOMER_S, by_latecomers=not is_alone), now)


class Courtesy:
    """Limits how often this peer waits for others that load the state and then miss the round. Times are loop times.

    After a wait in vain this peer waits for no peer for one minute, then twice as long each further time, up to ten
    minutes. So a peer that keeps downloading the state delays the others little, whatever identities it takes.
    """

    def __init__(self) -> None:
        self._followers: set[PeerId] = set()  # peers that this step has waited for
        self._in_vain = 0
        self._pause_until = -math.inf

    def is_due(self, followers: Collection[PeerId], now: float) -> bool:
        """Whether to wait for these peers, which load the state."""
        if not followers or now < self._pause_until:
            return False
        self._followers |= set(followers)
        return True

    def note_step(self, members: Collection[PeerId], now: float) -> None:
        """These peers have made the step."""
        if self._followers and self._followers.isdisjoint(members):
            self._in_vain += 1
            self._pause_until = now + min(PAUSE_S * 2.0 ** (self._in_vain - 1), MAX_PAUSE_S)
        elif self._followers:
            self._in_vain = 0
        self._followers = set()
