"""One attempt at a global step: averaging, then the same update on every peer; and what becomes of its samples.

Each sample of this peer is used once, waits, or is dropped with the reason in the log. The others may make a step
without some samples of this peer. It then loads their state, or has made the same step. The samples count in the next
step if they surely did not count in the last one and are at most one step late, as with ``delay``; see
:meth:`SampleCounter._reason_to_drop`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from manyhands.averaging.messages import Position
from manyhands.averaging.roster import Attendance, lineage_of
from manyhands.base.errors import ConfigError, RoundAborted, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.text import counted
from manyhands.base.tracebacks import clear_tracebacks
from manyhands.optim.accumulator import Accumulator, Contribution
from manyhands.optim.health import Statistics
from manyhands.optim.metrics import alone_seal
from manyhands.optim.run.drift import Sketch
from manyhands.optim.run.step_rounds import LEFT, Averaged
from manyhands.optim.step.replica import Replica
from manyhands.runtime.executor import run_to_end

if TYPE_CHECKING:
    from manyhands.optim.run.collaboration import Collaboration

logger = logging.getLogger(__name__)

MAX_STEPS_LATE = 1
OUTSIZED = (
    "the others made global step %d without them, as the gradient of this peer was far too large beside theirs. If "
    "this goes on, look at its loss and its data: from the second such step on, it gets no place in the next three"
)


class GlobalStep:
    """One attempt at a global step with one contribution.

    The training thread makes the step itself, or leaves it to the network thread and checks :attr:`is_done`.

    Attributes:
        outcome: of the averaging; None before it ends.
        left_from: the position where the step began.
        error: why there is no step; None also if this peer has left the run meanwhile.
        refusal: why the step left the parameters unchanged; empty if it changed them.
        is_spoiled: the update has begun, and the others made the step with the contribution.
        is_in_background: the step was left to the network thread.
        is_done: nothing here changes any more.
    """

    def __init__(self, replica: Replica, contribution: Contribution) -> None:
        self.contribution = contribution
        self.outcome: Averaged | None = None
        self.left_from = replica.position
        self.error: BaseException | None = None
        self.refusal = ""
        self.is_spoiled = self.is_in_background = self.is_done = False
        self._replica = replica
        self._sketch = Sketch()

    @property
    def has_moved(self) -> bool:
        """Whether the replica is at the position after the step."""
        return self._replica.position != self.left_from

    def use_own_gradient(self, own_id: PeerId, *, can_lead: bool) -> None:
        """Use this peer's own gradient as the average: no other peer is there.

        Args:
            can_lead: it can be dialled.
        """
        seal = alone_seal(self.left_from.lineage, own_id)
        roster = self._replica.roster.after(Attendance.alone(own_id, can_lead=can_lead))
        samples = round(self.contribution.weight)
        shares = {own_id: self.contribution.weight}
        self.outcome = Averaged(
            self.contribution.mean_N, lineage_of(seal, roster), samples, shares=shares, roster=roster, seal=seal
        )

    def advance(self) -> None:
        """Make the update, on any thread; exceptions of the optimizer or the schedule pass through."""
        outcome = self.outcome
        assert outcome is not None
        mean_N, outcome.mean_N = outcome.mean_N, None
        assert mean_N is not None, "a step follows a round that committed"
        if outcome.is_left_out and self.contribution.refill is not None:  # the round may have overwritten it
            self.contribution = replace(self.contribution, mean_N=self.contribution.refill())
        self.is_spoiled = not outcome.is_left_out
        self.refusal = self._replica.advance(mean_N, outcome)
        if outcome.manifest is not None:  # a step alone has no manifest
            self._sketch = self._replica.sketch()

    def announce(self, collaboration: Collaboration) -> None:
        """Record on the network thread where this peer and the others of its round are now."""
        assert self.outcome is not None
        collaboration.move(self._replica.position, self._replica.lineage_samples, self.outcome, self._sketch)

    def begin_in_background(self, collaboration: Collaboration) -> None:
        """Have the network thread make the step; raises ``ConfigError`` if this peer has left the run."""
        if collaboration.tasks.is_closed:
            raise ConfigError(LEFT)
        task = collaboration.tasks.spawn(self._average_and_advance(collaboration), name="a global step")
        self.is_in_background = True
        task.add_done_callback(self._on_done)

    def _on_done(self, _: asyncio.Task[None]) -> None:
        self.is_done = True

    async def _average_and_advance(self, collaboration: Collaboration) -> None:
        try:
            if self.outcome is None:
                self.outcome = await collaboration.step_rounds.average(self.contribution)
            await run_to_end(self.advance)
            self.announce(collaboration)
        except Exception as error:  # noqa: BLE001 (it is the training thread's, which raises it)
            self.error = clear_tracebacks(error) if isinstance(error, (RoundAborted, Unavailable)) else error


class SampleCounter:
    """What becomes of the samples of one peer; the accumulator holds what they have led to, such as gradients."""

    def __init__(self, own_id: PeerId, replica: Replica, accumulator: Accumulator) -> None:
        self._own_id = own_id
        self._replica = replica
        self._accumulator = accumulator
        self.statistics = Statistics()
        self._num_not_finite = 0  # batches

    @property
    def waiting(self) -> int:
        """Samples that count in the next step."""
        return self._accumulator.samples

    def add(self, samples: int, weight: float | None, scale: float, at_step: int, *, is_overflow: bool) -> None:
        """Add the gradients of a micro-batch; see :meth:`manyhands.optim.accumulator.Accumulator.add`."""
        is_added = not is_overflow and self._accumulator.add(samples, weight, scale, at_step)  # may raise
        self.statistics.samples_computed += samples
        if is_added:
            return
        self.statistics.samples_dropped += samples
        self._tell_not_finite(samples, is_overflow=is_overflow)
        if fault := self._accumulator.fault():
            self.drop_waiting(fault)

    def _tell_not_finite(self, samples: int, *, is_overflow: bool) -> None:
        """Log the first dropped batch, then the second, the fourth, the eighth and so on."""
        self._num_not_finite += 1
        number = self._num_not_finite
        if number & (number - 1):
            return
        level, what = logging.WARNING, "a gradient is not finite"
        if is_overflow:
            level, what = logging.INFO, "the scaled gradients overflowed"
        so_far = f"; {number} such batches so far" if number > 1 else ""
        advice = (
            ". Look at the loss, the learning rate and the data of this peer" if number > 1 and not is_overflow else ""
        )
        logger.log(level, "%s: this micro-batch of %s is dropped%s%s", what, counted(samples, "sample"), so_far, advice)

    def freeze(self) -> Contribution:
        """Return what is waiting as the contribution to a step."""
        if fault := self._accumulator.fault():
            self.drop_waiting(fault)
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
        counts.samples_of_all += outcome.samples
        number = step.left_from.step + 1
        if not outcome.is_left_out and step.refusal:
            self._drop(step, f"global step {number} changes nothing: {step.refusal}")
        elif not outcome.is_left_out:
            counts.samples_used += contribution.samples
            self._forget(step)
        elif outcome.is_outsized:
            self._drop(step, OUTSIZED % number)
        elif reason := self._reason_to_drop(step.left_from, contribution.since_step, was_out=True):
            self._drop(step, f"the group made global step {number} without this peer, and {reason}")
        else:
            self._accumulator.carry(contribution)
            self._carried(contribution.samples)

    def load(self, before: Position) -> None:
        """Carry or drop the waiting samples after a loaded state replaced the position ``before``."""
        waiting = self._accumulator
        since_step = waiting.since_step if waiting.samples else before.step
        if reason := self._reason_to_drop(before, since_step, was_out=waiting.was_out):
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
            since_step: of the parameters that the oldest of them was computed on.
            was_out: some were in an attempt at the step, which may have committed. Then the others' state must say
                whose samples it has.
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
        logger.info("The others made global step %d without %s of this peer, which will count in the next one",
                    self._replica.position.step, counted(samples, "sample"))  # fmt: skip

    def _drop(self, step: GlobalStep, reason: str) -> None:
        self._count_dropped(step.contribution.samples, reason)
        self._forget(step)

    def _count_dropped(self, samples: int, reason: str) -> None:
        self.statistics.samples_dropped += samples
        logger.warning("Dropped %s: %s", counted(samples, "sample"), reason)

    def _forget(self, step: GlobalStep) -> None:
        """Forget a contribution, whose memory the wrapped optimizer may still hold after a step alone."""
        is_free = step.outcome is not None and step.outcome.manifest is not None
        self._accumulator.release(step.contribution, is_free=is_free)
