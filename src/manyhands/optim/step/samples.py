"""Tracks the samples of one peer: each is used once, waits, or is dropped with the reason in the log.

The others may make a step without some samples of this peer. It then loads their state, or has made the same step. The
samples count in the next step if they surely did not count in the last one and are at most one step late, as with
``delay``; see :meth:`SampleCounter._reason_to_drop`.
"""

from __future__ import annotations

import logging

from manyhands.averaging.messages import Position
from manyhands.base.identity import PeerId
from manyhands.optim.accumulator import Contribution, GradientAccumulator
from manyhands.optim.health import Statistics
from manyhands.optim.step.global_step import GlobalStep
from manyhands.optim.step.replica import Replica

logger = logging.getLogger(__name__)

MAX_STEPS_LATE = 1
OUTSIZED = (
    "the others made global step %d without them, as the gradient of this peer was far too large beside theirs. If "
    "this goes on, look at its loss and its data: the others give it no place for 10 minutes after three such steps"
)


class SampleCounter:
    """The gradients of one peer, and the counts of the samples behind them. Belongs to the training thread.

    Attributes:
        statistics: the counts.
    """

    def __init__(self, own_id: PeerId, replica: Replica) -> None:
        self._own_id = own_id
        self._replica = replica
        self._accumulator = GradientAccumulator(replica.model_parameters)
        self.statistics = Statistics()

    @property
    def waiting(self) -> int:
        """Samples that count in the next step."""
        return self._accumulator.samples

    def add(self, samples: int, weight: float | None, scale: float, at_step: int, *, is_overflow: bool) -> None:
        """Add the gradients of a micro-batch.

        Args:
            scale: factor of the loss.
            at_step: global step of the parameters that it was computed on.
            is_overflow: the scaled loss has become infinite.
        """
        self.statistics.samples_computed += samples
        if is_overflow:
            self.statistics.samples_dropped += samples
            logger.info("the scaled gradients overflowed: the %d samples of this micro-batch are dropped", samples)
        elif not self._accumulator.add(samples, weight, scale, at_step):
            self.statistics.samples_dropped += samples
            logger.warning("a gradient of this micro-batch is not finite; its %d samples are dropped", samples)

    def freeze(self) -> Contribution:
        """Return the waiting gradients as the contribution to a step."""
        return self._accumulator.freeze()

    def give_up(self, step: GlobalStep) -> None:
        """Put the contribution of a step that was not made back, if it is intact; it counts in the next attempt."""
        if step.is_spoiled:
            self._drop(step, f"the update of global step {step.left_from.step + 1} broke off")
        else:
            self._accumulator.take_back(step.contribution)

    def count(self, step: GlobalStep) -> None:
        """Count the samples of a step that was made, by this peer or by the others without it."""
        outcome, contribution, counts = step.outcome, step.contribution, self.statistics
        assert outcome is not None
        counts.rounds_committed += outcome.manifest is not None
        counts.steps_alone += outcome.manifest is None
        counts.updates_refused += bool(step.refusal)
        counts.disagreement = outcome.disagreement
        counts.samples_of_all += 0 if step.is_lost else outcome.samples
        number = step.left_from.step + 1
        if not outcome.is_left_out and step.refusal:
            self._drop(step, f"global step {number} changes nothing: {step.refusal}")
        elif not outcome.is_left_out:
            counts.samples_used += contribution.samples
            self._recycle(step)
        elif outcome.is_outsized:
            self._drop(step, OUTSIZED % number)
        elif step.is_lost:  # the loaded state will show where they can count
            self._accumulator.take_back(contribution)
        elif reason := self._reason_to_drop(step.left_from, contribution.since_step, was_out=True):
            self._drop(step, f"the group made global step {number} without this peer, and {reason}")
        else:
            self._accumulator.take_back(contribution)
            self._carried(contribution.samples)

    def load(self, before: Position) -> None:
        """Carry or drop the waiting samples after a loaded state replaced the position ``before``."""
        waiting = self._accumulator
        if reason := self._reason_to_drop(before, waiting.since_step, was_out=waiting.was_out):
            self.drop_waiting(reason)
        elif waiting.samples:
            self._carried(waiting.samples)

    def reload(self) -> None:
        """Drop the waiting samples after a reload that corrected this peer's parameters."""
        self.statistics.parameters_reloaded += 1
        self.drop_waiting("they were computed on parameters that are not those of the run")

    def drop_waiting(self, reason: str) -> None:
        """Drop all waiting samples: their parameters have changed."""
        if self.waiting:
            self._count_dropped(self.waiting, reason)
            self._accumulator.drop()

    def _reason_to_drop(self, before: Position, since_step: int, *, was_out: bool) -> str:
        """Why samples cannot count at this peer's new position; empty if they can.

        Args:
            before: this peer's position before.
            since_step: of the parameters that the oldest of them was computed on.
            was_out: some of them were in an attempt at the step, which may have committed without this peer's
                knowledge. Then the others' state must say whose samples it has.
        """
        after, origin = self._replica.position, self._replica.origin
        if origin is None or origin.parent != before:
            return "they were computed on other parameters"
        if after.step - since_step > MAX_STEPS_LATE:
            return f"they would be {after.step - since_step} steps late"
        if was_out and (origin.contributors is None or self._own_id in origin.contributors):
            return "the others may have made the step with them"
        return ""

    def _carried(self, samples: int) -> None:
        self.statistics.samples_carried += samples
        logger.info("The others made global step %d without %d samples of this peer; they count in the next one",
                    self._replica.position.step, samples)  # fmt: skip

    def _drop(self, step: GlobalStep, reason: str) -> None:
        self._count_dropped(step.contribution.samples, reason)
        self._recycle(step)

    def _count_dropped(self, samples: int, reason: str) -> None:
        self.statistics.samples_dropped += samples
        logger.warning("%d samples are dropped: %s", samples, reason)

    def _recycle(self, step: GlobalStep) -> None:
        """Reuse the memory of a contribution; after a step alone the wrapped optimizer may still hold it."""
        if step.outcome is not None and step.outcome.manifest is not None:
            self._accumulator.recycle(step.contribution)
