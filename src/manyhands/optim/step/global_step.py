"""One attempt at a global step: averaging, then the same update on every peer. Counts failed attempts in a row."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING

import torch

from manyhands.averaging.messages import Position
from manyhands.base.errors import ManyhandsError, RoundAborted, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.text import counted
from manyhands.base.tracebacks import clear_tracebacks
from manyhands.optim.accumulator import Contribution
from manyhands.optim.run.drift import Sketch
from manyhands.optim.run.progress import sum_of_samples
from manyhands.optim.run.step_rounds import Averaged
from manyhands.optim.step.replica import Replica
from manyhands.runtime.executor import run_to_end

if TYPE_CHECKING:
    from manyhands.optim.run.collaboration import Collaboration

logger = logging.getLogger(__name__)

FAILURES_UNTIL_ADVICE = 3
"""Attempts in a row: one or two also fail in a healthy run, when a member is lost."""


class GlobalStep:
    """One attempt at a global step with one contribution.

    The training thread makes the step itself, or leaves it to the network thread and checks :attr:`is_done`.

    Attributes:
        contribution: this peer's part. After the update its vector holds no valid values, unless it was left out.
        outcome: of the averaging; None before it ends.
        applied_N: the averaged gradient, clipped, once the update has begun; None if the network thread makes the
            update.
        left_from: the position where the step began.
        error: why there is no step; the contribution counts in the next attempt.
        refusal: why the step left the parameters unchanged; empty if it changed them.
        is_spoiled: the update failed after it had overwritten the contribution.
        has_moved: the replica is at the position after the step.
        is_begun: the step was left to the network thread.
        is_done: nothing here changes any more.
    """

    def __init__(self, replica: Replica, contribution: Contribution) -> None:
        self.contribution = contribution
        self.outcome: Averaged | None = None
        self.applied_N: torch.Tensor | None = None
        self.left_from = replica.position
        self.error: BaseException | None = None
        self.refusal = ""
        self.is_spoiled = False
        self.has_moved = False
        self.is_begun = False
        self.is_done = False
        self._replica = replica
        self._sketch = Sketch()

    @property
    def is_lost(self) -> bool:
        """Whether the others made the step and this peer does not have its result."""
        return self.outcome is not None and self.outcome.mean_N is None and not self.has_moved

    def is_alone(self, own_id: PeerId) -> None:
        """Use this peer's own gradient as the average: no other peer is there."""
        lineage = hashlib.sha256(self.left_from.lineage + b"alone" + own_id.encode()).digest()
        samples = round(self.contribution.weight)
        self.outcome = Averaged(self.contribution.mean_N, lineage, samples, contributors=[own_id])

    def committed(self, averaged: Averaged) -> None:
        """Take over the outcome of the averaging."""
        self.outcome = averaged
        logger.info("Averaged tensors successfully with %s", counted(len(averaged.members), "peer"))

    def advance(self) -> None:
        """Make the update, on any thread; exceptions of the optimizer or the schedule pass through."""
        outcome = self.outcome
        assert outcome is not None
        assert outcome.mean_N is not None, "a step follows a round that committed"
        self.applied_N, outcome.mean_N = outcome.mean_N, None
        parameters_N, outcome.parameters_N = outcome.parameters_N, None
        is_free = outcome.manifest is not None and not outcome.is_left_out
        self.is_spoiled = not outcome.is_left_out
        try:
            self.refusal = self._replica.advance(
                self.applied_N,
                outcome.lineage,
                outcome.samples,
                self.contribution.mean_N if is_free else None,
                parameters_N,
                outcome.contributors,
            )
        finally:
            self.has_moved = self._replica.position != self.left_from
            self.is_spoiled = self.is_spoiled and not self.has_moved
        if outcome.manifest is not None:  # a step alone has no manifest
            self._sketch = self._replica.sketch()

    def announce(self, collaboration: Collaboration) -> None:
        """Record on the network thread where this peer and the others of its round are now."""
        replica, outcome = self._replica, self.outcome
        assert outcome is not None
        if self.is_lost:
            position = Position(replica.position.step + 1, outcome.lineage)
            samples = sum_of_samples([replica.lineage_samples, outcome.samples])
            collaboration.tracker.others_moved(position, samples, outcome.members)
        else:
            collaboration.move(replica.position, replica.lineage_samples, outcome, self._sketch)

    def begin(self, collaboration: Collaboration) -> None:
        """Have the network thread make the step; repeated calls on it have no effect."""
        if not self.is_begun:
            task = collaboration.tasks.spawn(self._make(collaboration), name="a global step")
            self.is_begun = True
            task.add_done_callback(lambda _: self._end())

    async def _make(self, collaboration: Collaboration) -> None:
        """Do the rest of the step, with the update in the loop's executor."""
        try:
            if self.outcome is None:
                contribution = self.contribution
                self.committed(await collaboration.step_rounds.average(contribution.mean_N, contribution.weight))
            if not self.is_lost:
                await run_to_end(self.advance)
                self.applied_N = None
            self.announce(collaboration)
        except (RoundAborted, Unavailable) as error:
            self.error = clear_tracebacks(error)
        except Exception as error:  # noqa: BLE001 (it is the training thread's, which raises it)
            self.error = error
        else:
            self.is_done = True

    def _end(self) -> None:
        """Mark the end of the network thread's work on the step."""
        if not self.is_done and self.error is None:
            self.error = ManyhandsError("this peer left the run")
        self.is_done = True


class Failures:
    """Counts failed attempts in a row, and tells the user what to do about them.

    Args:
        allow_solo: step alone after several failures.
    """

    def __init__(self, *, allow_solo: bool) -> None:
        self._allow_solo = allow_solo
        self._in_a_row = 0

    @property
    def is_time_to_go_alone(self) -> bool:
        """Whether to stop trying with the others, as the user allows."""
        return self._allow_solo and self._in_a_row >= FAILURES_UNTIL_ADVICE

    def add(self, error: BaseException, samples: int) -> None:
        """Count a failed attempt while ``samples`` of this peer wait.

        Raises:
            BaseException: the error of the attempt, if the other peers did not cause it.
        """
        if not isinstance(error, (RoundAborted, Unavailable)):
            raise error
        self._in_a_row += 1
        logger.warning("Skipped averaging: %s; the %d samples of this peer count in the next attempt", error, samples)
        if self._in_a_row % FAILURES_UNTIL_ADVICE == 0:
            logger.warning(
                "%d attempts failed in a row: other peers of the run are seen, but no round with them succeeds. %s; "
                "manyhands doctor --initial-peers ... says whether it can reach them, and they can reach it",
                self._in_a_row,
                "It goes on alone" if self._allow_solo else "This peer does not step alone",
            )

    def end(self) -> None:
        """A step was made."""
        self._in_a_row = 0
