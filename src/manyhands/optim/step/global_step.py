"""One attempt at a global step: averaging, then the same update on every peer; and what becomes of its samples.

Each sample of this peer counts in one step, waits for the next one, or is dropped with the reason in the log. Tests of
each row: ``tests/unit/optim/test_samples.py``; of local steps, ``test_local_steps.py``.

=====================================================  =============================  ================================
event                                                  the samples of this peer       method of :class:`SampleCounter`
=====================================================  =============================  ================================
a micro-batch is added                                 wait                           ``add``
its gradients overflow or are not finite               those of the batch: dropped    ``add``
local steps: also this peer's parameters are not       all that wait: dropped         ``add``
an attempt begins                                      all that wait are in it        ``freeze``
local steps: this peer's parameters are not finite     all that wait: dropped         ``freeze``
it ends before the update, by an error or interrupt    wait for the next attempt      ``end``
the wrapped optimizer raises in the update             dropped; not in it: wait       ``end``
the step is made with them                             used                           ``end``
all peers refuse its update                            dropped; not in it: as below   ``end``
the group makes it without them, as far too large      dropped                        ``end``
the group makes it without them for another reason     carried if certain (below)     ``end``
this peer loads a state, or makes a missed step        carried if certain (below)     ``load``
it loads one because its parameters drifted            dropped                        ``drop_waiting``
it loads a checkpoint of another position              dropped                        ``drop_waiting``
=====================================================  =============================  ================================

*Carried* samples wait for the step after the one that was made without them. They are dropped instead unless it is
certain that they have not counted, and that they are one step late at most (``_reason_to_drop``):

- The new position is one step after the one where they waited.
- All of them were computed at that position. With ``delay`` some are a step older.
- Those that were in an attempt are not in the step: it names its contributors, and this peer is none of them.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from manyhands.averaging.messages import Position
from manyhands.averaging.roster import Attendance, lineage_of
from manyhands.base.errors import ConfigError, RoundAborted, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.text import counted
from manyhands.base.tracebacks import clear_tracebacks
from manyhands.optim.accumulator import Accumulator, Contribution
from manyhands.optim.metrics import alone_seal
from manyhands.optim.run.drift import Sketch
from manyhands.optim.run.step_rounds import LEFT, Averaged
from manyhands.optim.step.replica import Replica
from manyhands.runtime.executor import run_to_end

if TYPE_CHECKING:
    from manyhands.optim.run.collaboration import Collaboration

logger = logging.getLogger(__name__)

OUTSIZED = (
    "the others made global step %d without them, as the gradient of this peer was far too large beside theirs. If "
    "this goes on, look at its loss and its data: after some such steps it gets no place in the next three"
)


class GlobalStep:
    """One attempt at a global step with one contribution.

    The training thread makes the step itself, or leaves it to the network thread and checks :attr:`is_done`.

    Attributes:
        outcome: of the averaging; None before it ends.
        left_from: the position where the step began.
        error: why there is no step; None also if this peer has left the run meanwhile.
        refusal: why the step left the parameters unchanged; empty if it changed them.
        is_spoiled: the update has begun, and the contribution is in it: the others count it, and it may be overwritten.
        is_announced: the network thread knows that the step was made.
    """

    def __init__(self, replica: Replica, contribution: Contribution) -> None:
        self.contribution = contribution
        self.outcome: Averaged | None = None
        self.left_from = replica.position
        self.error: BaseException | None = None
        self.refusal = ""
        self.is_spoiled = self.is_announced = False
        self._replica = replica
        self._sketch = Sketch()
        self._task: asyncio.Task[None] | None = None  # in the background

    @property
    def has_moved(self) -> bool:
        """Whether the replica is at the position after the step."""
        return self._replica.position != self.left_from

    @property
    def is_left_out(self) -> bool:
        """Whether the contribution is not in the average."""
        return self.outcome is not None and self.outcome.is_left_out

    @property
    def is_in_background(self) -> bool:
        """Whether the step was left to the network thread."""
        return self._task is not None

    @property
    def is_done(self) -> bool:
        """Whether the network thread, to which it was left, changes nothing here any more."""
        return self._task is not None and self._task.done()

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
        self.is_announced = True

    def begin_in_background(self, collaboration: Collaboration) -> None:
        """Have the network thread make the step; raises ``ConfigError`` if this peer has left the run."""
        if collaboration.tasks.is_closed:
            raise ConfigError(LEFT)
        self._task = collaboration.tasks.spawn(self._average_and_advance(collaboration), name="a global step")

    async def _average_and_advance(self, collaboration: Collaboration) -> None:
        try:
            if self.outcome is None:
                self.outcome = await collaboration.step_rounds.average(self.contribution)
            await run_to_end(self.advance)
            self.announce(collaboration)
        except Exception as error:  # noqa: BLE001 (it is the training thread's, which raises it)
            self.error = clear_tracebacks(error) if isinstance(error, (RoundAborted, Unavailable)) else error


@dataclass
class Statistics:
    """Counts since an optimizer was made.

    Attributes:
        samples_computed: passed to ``step`` on this peer.
        samples_used: of these, in committed global steps.
        samples_of_all: of all peers, in the steps that this peer made; by weight where that is not samples.
        samples_dropped: after an overflow, a refused update, or a load of another branch's state.
        samples_carried: left out of a step that the others made, and moved to the next one.
        steps_alone: global steps made while no other peer was there.
        updates_refused: global steps that left the parameters unchanged, since the update was not finite.
        states_loaded: how often the state was downloaded.
        parameters_reloaded: of these, because the majority held other parameters at the same position.
        disagreement: distance between the parameters of this peer and the majority (in a grid, or without one, of all
            peers) before the last step, as a fraction of their size, by what they published; None if unknown.
    """

    samples_computed: int = 0
    samples_used: int = 0
    samples_of_all: int = 0
    samples_dropped: int = 0
    samples_carried: int = 0
    rounds_committed: int = 0
    rounds_aborted: int = 0
    steps_alone: int = 0
    updates_refused: int = 0
    states_loaded: int = 0
    parameters_reloaded: int = 0
    disagreement: float | None = None

    def summary(self) -> str:
        """For a log line."""
        counts = [f"{counted(self.samples_computed, 'sample')} computed here so far"]
        if self.samples_computed:
            counts.append(f"{self.samples_used} of them used ({self.samples_used / self.samples_computed:.1%})")
        if self.samples_dropped:
            counts.append(f"{self.samples_dropped} dropped")
        return ", ".join(counts)


class SampleCounter:
    """Decides what becomes of the samples of one peer, and counts them; the table above has all cases.

    The accumulator holds what they have led to, such as gradients.
    """

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
        if not is_added:
            self.statistics.samples_dropped += samples
            self._tell_not_finite(samples, is_overflow=is_overflow)
            self._drop_faulty()

    def freeze(self) -> Contribution:
        """Return what is waiting as the contribution to a step."""
        self._drop_faulty()
        return self._accumulator.freeze()

    def end(self, step: GlobalStep) -> None:
        """Count the samples of an attempt that has ended, have them wait, or drop them."""
        contribution = step.contribution
        if reason := self._reason_to_drop_from(step):
            self._count_dropped(contribution.samples, reason)
            self._forget(step)
        elif not step.has_moved:
            self._accumulator.take_back(contribution)
        elif step.is_left_out:
            self._accumulator.carry(contribution)
            self._count_carried(contribution.samples)
        else:
            self.statistics.samples_used += contribution.samples
            self._forget(step)

    def load(self, before: Position) -> None:
        """Carry or drop the waiting samples after a loaded state or a missed step replaced the position ``before``."""
        waiting = self._accumulator
        since_step = waiting.since_step if waiting.samples else before.step
        if reason := self._reason_to_drop(before, since_step, was_out=waiting.was_out):
            self.drop_waiting(reason)
        elif waiting.samples:
            self._count_carried(waiting.samples)

    def drop_waiting(self, reason: str) -> None:
        """Drop all waiting samples: their parameters have changed."""
        if self.waiting:
            self._count_dropped(self.waiting, reason)
        self._accumulator.drop()

    # the reasons

    def _drop_faulty(self) -> None:
        if fault := self._accumulator.fault():
            self.drop_waiting(fault)

    def _reason_to_drop_from(self, step: GlobalStep) -> str:
        """Why the samples of an attempt that has ended neither count nor wait; empty if they do."""
        outcome, number = step.outcome, step.left_from.step + 1
        if outcome is None or not step.has_moved:
            return f"the update of global step {number} broke off" if step.is_spoiled else ""
        if not outcome.is_left_out:
            return f"global step {number} changes nothing: {step.refusal}" if step.refusal else ""
        if outcome.is_outsized:
            return OUTSIZED % number
        if reason := self._reason_to_drop(step.left_from, step.contribution.since_step, was_out=True):
            return f"the group made global step {number} without this peer, and {reason}"
        return ""

    def _reason_to_drop(self, before: Position, since_step: int, *, was_out: bool) -> str:
        """Why samples that waited at a position cannot count at this peer's new one; empty if they can.

        Args:
            since_step: of the parameters that the oldest of them was computed on.
            was_out: some were in an attempt at the step, which may have committed.
        """
        origin = self._replica.origin
        if origin is None or origin.parent != before:
            return "they were computed on other parameters"
        if since_step < before.step:
            return f"they would be {self._replica.position.step - since_step} steps late"
        if was_out and (origin.contributors is None or self._own_id in origin.contributors):
            return "the others may have made the step with them"
        return ""

    # counts and log lines

    def _count_carried(self, samples: int) -> None:
        self.statistics.samples_carried += samples
        logger.info("The others made global step %d without %s of this peer, which will count in the next one",
                    self._replica.position.step, counted(samples, "sample"))  # fmt: skip

    def _count_dropped(self, samples: int, reason: str) -> None:
        self.statistics.samples_dropped += samples
        logger.warning("Dropped %s: %s", counted(samples, "sample"), reason)

    def _forget(self, step: GlobalStep) -> None:
        """Forget a contribution, whose memory the wrapped optimizer may still hold after a step alone."""
        is_free = step.outcome is not None and step.outcome.manifest is not None
        self._accumulator.release(step.contribution, is_free=is_free)

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
