"""What becomes of the samples of one peer: each is used once, waits, or was dropped for a reason that the log names."""

from __future__ import annotations

import logging

from manyhands.averaging.messages import Position
from manyhands.base.identity import PeerId
from manyhands.optim.accumulator import Contribution, GradientAccumulator, GradientSum
from manyhands.optim.health import Statistics
from manyhands.optim.step.global_step import GlobalStep
from manyhands.optim.step.replica import Replica
from manyhands.optim.step.staleness import reason_to_drop

logger = logging.getLogger(__name__)


class SampleCounter:
    """The gradients of one peer, and the counts of the samples behind them. Belongs to the training thread.

    Attributes:
        statistics: the counts.
    """

    def __init__(self, own_id: PeerId, replica: Replica, *, is_delayed: bool) -> None:
        self._own_id = own_id
        self._replica = replica
        self._accumulator = GradientAccumulator(replica.model_parameters, is_delayed=is_delayed)
        self.statistics = Statistics()

    @property
    def waiting(self) -> int:
        """Those that count in the next step."""
        return self._accumulator.samples

    def add(self, samples: int, weight: float | None, scale: float, at_step: int, *, is_overflow: bool) -> None:
        """Count the gradients of a micro-batch in.

        Args:
            scale: by which the loss was multiplied.
            at_step: global step of the parameters that it was computed on.
            is_overflow: with that scale it has become infinite.
        """
        self.statistics.samples_computed += samples
        if is_overflow:
            self.statistics.samples_dropped += samples
            logger.info("the scaled gradients overflowed: the %d samples of this micro-batch are dropped", samples)
        elif not self._accumulator.add(samples, weight, scale, at_step):
            self.statistics.samples_dropped += samples
            logger.warning("a gradient of this micro-batch is not finite; its %d samples are dropped", samples)

    def freeze(self) -> Contribution:
        """Hand out what waits, for a step."""
        return self._accumulator.freeze()

    def give_up(self, step: GlobalStep) -> None:
        """A step was not made: its contribution counts in the next attempt, if it is still there."""
        if step.is_spoiled:
            self._drop(step)
            logger.warning("The update of global step %d broke off; its %d samples of this peer are dropped",
                           self._replica.position.step + 1, step.contribution.samples)  # fmt: skip
        else:
            self._accumulator.take_back(step.contribution)

    def count(self, step: GlobalStep) -> None:
        """A step was made, by this peer or by the others without it."""
        contribution, counts = step.contribution, self.statistics
        counts.rounds_committed += step.manifest is not None
        counts.steps_alone += step.manifest is None
        counts.updates_refused += bool(step.refusal)
        counts.disagreement = step.disagreement
        counts.samples_of_all += 0 if step.is_lost else step.samples
        if step.refusal and not step.is_left_out:
            self._drop(step)
            logger.warning("Global step %d changes nothing: %s. All its samples are dropped",
                           self._replica.position.step, step.refusal)  # fmt: skip
        elif not step.is_left_out:
            counts.samples_used += contribution.samples
            self._recycle(step)
        elif step.is_outsized:
            self._drop(step)
            logger.warning("The gradient of this peer was far too large beside those of the others, which made global "
                           "step %d without it; its %d samples are dropped. If this goes on, look at its loss and its "
                           "data: the others give it no place for 10 minutes after three such steps",
                           step.left_from.step + 1, contribution.samples)  # fmt: skip
        elif step.is_lost:  # once the state is loaded it is known where they can count
            self._accumulator.take_back(contribution)
        elif reason := self._reason_to_drop(contribution.since_step, step.left_from, was_in_group=True):
            self._drop(step)
            logger.warning("The group made global step %d without this peer; its %d samples are dropped: %s",
                           self._replica.position.step, contribution.samples, reason)  # fmt: skip
        else:
            self._accumulator.take_back(contribution)
            self._carried(contribution.samples)

    def load(self, before: Position, in_group_from: Position | None) -> None:
        """The state of others was loaded: what waits counts there if it surely was not counted yet.

        Args:
            before: where this peer was.
            in_group_from: from where the last round led on in whose group it was.
        """
        for part in self._accumulator.parts:
            was_in_group = part.was_out and in_group_from == before
            if reason := self._reason_to_drop(part.since_step, before, was_in_group=was_in_group):
                self._drop_waiting(part, reason)
            else:
                self._carried(part.samples)

    def reload(self) -> None:
        """The state of others was loaded, as this peer held other parameters than they at the same position."""
        self.statistics.parameters_reloaded += 1
        self.drop_waiting("they were computed on parameters that are not those of the run")

    def drop_waiting(self, reason: str) -> None:
        """The parameters are not those any more that the gradients so far were computed on."""
        for part in self._accumulator.parts:
            self._drop_waiting(part, reason)

    def _drop_waiting(self, part: GradientSum, reason: str) -> None:
        self.statistics.samples_dropped += part.samples
        logger.warning("%d samples are dropped: %s", part.samples, reason)
        self._accumulator.drop(part)

    def _drop(self, step: GlobalStep) -> None:
        self.statistics.samples_dropped += step.contribution.samples
        self._recycle(step)

    def _recycle(self, step: GlobalStep) -> None:
        """Use the memory of a contribution again; of a step alone the wrapped optimizer has it, and may keep it."""
        if step.manifest is not None:
            self._accumulator.recycle(step.contribution)

    def _reason_to_drop(self, since_step: int, before: Position, *, was_in_group: bool) -> str:
        after, origin = self._replica.position, self._replica.origin
        return reason_to_drop(
            self._own_id, since_step, was_in_group=was_in_group, before=before, after=after, origin=origin
        )

    def _carried(self, samples: int) -> None:
        self.statistics.samples_carried += samples
        logger.info("The others made global step %d without %d samples of this peer; they count in the next one",
                    self._replica.position.step, samples)  # fmt: skip
