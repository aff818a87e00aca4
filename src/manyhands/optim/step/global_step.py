"""One attempt at a global step: averaging, then the same update on every peer; and what becomes of the peer's samples.

The path of the averaged gradient, from the reducers to the parameters, in one group:

1. ``SpanReducer._average`` (``averaging/allreduce/reducer.py``) computes the mean of its span, chunk by chunk.
2. ``Butterfly._means`` (``averaging/allreduce/butterfly.py``) sends it to the other members, and
   ``Butterfly._rooms_for_means`` receives the means of the other spans.
3. ``Contribution.vote`` (``averaging/round/exchange.py``) keeps the means of all spans.
4. ``RoundRunner._take_part`` (``averaging/rounds.py``) returns them as a ``CommittedRound`` if the round commits.
5. ``StepRounds.average`` (``optim/run/step_rounds.py``) makes an ``Averaged`` of it.
6. ``BlockingRunClient.average``, or ``GlobalStep._average_and_advance`` in the background, stores that as
   ``GlobalStep.outcome``.
7. ``GlobalStep.advance`` gives the vector to ``Replica.advance``, which calls ``guarded_step``.
8. ``guarded_step`` clips the vector, installs it as ``.grad``, and calls ``step()`` of the wrapped optimizer.
9. ``Replica.copy_to_model`` copies the new parameters to the model, if the optimizer works on copies.

Each sample of this peer counts in one step, waits for the next one, or is dropped with the reason in the log. Tests of
each row: ``tests/unit/optim/test_samples.py``; of local steps, ``test_local_steps.py``. The methods are those of
:class:`SampleCounter`. ``Optimizer`` calls them: ``_accumulate`` calls ``add``, ``_make_step`` ``freeze``, ``_count``
``end``, ``_load_state`` and ``_replay`` ``load``, and ``_load_state`` and ``load_state_dict`` ``drop_waiting``.

=====================================================  ========================================  ================
event                                                  the samples of this peer                  method
=====================================================  ========================================  ================
a micro-batch is added                                 wait                                      ``add``
its gradients overflow or are not finite               those of the batch are dropped            ``add``
the same, and with local steps this peer's parameters  all that wait are dropped                 ``add``
are not finite either
an attempt begins                                      all that wait go into the attempt         ``freeze``
the same, but with local steps this peer's parameters  all that wait are dropped                 ``freeze``
are not finite
the round commits, but this peer lacks its means       are used if the manifest has them; else   ``end``
                                                       as in the next row
the attempt ends before the update, by an error or an  wait for the next attempt                 ``end``
interrupt
the wrapped optimizer raises in the update             are dropped; if the group left them out,  ``end``
                                                       they wait
the step is made with them                             are used                                  ``end``
all peers refuse the update, as it would not be        are dropped; if the group left them out,  ``end``
finite: the parameters stay, the position moves on     as in the next two rows
the group leaves them out as they are far too large    are dropped                               ``end``
the group leaves them out for another reason           are carried if certain (below)            ``end``
this peer loads a state, or replays a missed step      are carried if certain (below)            ``load``
this peer reloads, as its parameters have drifted      are dropped                               ``drop_waiting``
this peer loads a checkpoint of another position       are dropped                               ``drop_waiting``
=====================================================  ========================================  ================

*Carried* samples wait for the step after the one that was made without them. They are carried only if it is certain
that they have not counted, and that they are at most one step late; else they are dropped (``_reason_to_drop``). That
is certain if all of this holds:

- The new position is one step after the position at which they waited.
- All of them were computed with the parameters of that position. With ``delay`` some are a step older.
- They were in no attempt, or the step names its contributors, and this peer is not among them.
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
from manyhands.optim.run.progress import sum_of_samples
from manyhands.optim.run.step_rounds import LEFT, Averaged, LacksMeans
from manyhands.optim.step.replica import Replica
from manyhands.runtime.executor import run_to_end

if TYPE_CHECKING:
    from manyhands.optim.run.collaboration import Collaboration

logger = logging.getLogger(__name__)

OUTSIZED = (
    "the others made global step %d without them, as the gradient of this peer was far too large, or not finite, when "
    "it came there. If this goes on, look at its loss and its data: after some such steps it gets no place in the next "
    "three"
)


class GlobalStep:
    """One attempt at a global step with one contribution.

    The training thread makes the step itself, or has the network thread make it and checks :attr:`is_done`.

    Attributes:
        outcome: of the averaging; None before that has ended.
        left_from: the position where the step began.
        error: why the step was not made, or what failed after its update. None while there is no error, if this peer
            has left the run meanwhile, and if a step that was begun early did not become due.
        refusal: why the step left the parameters unchanged; empty if it changed them.
        is_spoiled: the update has begun with the contribution in it. If the update fails, the contribution cannot
            count in another step: the others have counted it, and its memory may be overwritten.
        is_announced: the network thread was told that the step was made.
        waiting: samples of this peer that wait for the next step, as it has told the network thread.
    """

    def __init__(self, replica: Replica, contribution: Contribution) -> None:
        self.contribution = contribution
        self.outcome: Averaged | None = None
        self.left_from = replica.position
        self.error: BaseException | None = None
        self.refusal = ""
        self.is_spoiled = self.is_announced = False
        self.waiting = 0
        self._replica = replica
        self._sketch = Sketch()
        self._task: asyncio.Task[None] | None = None  # makes the step on the network thread

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
        """Whether the network thread makes the step."""
        return self._task is not None

    @property
    def is_done(self) -> bool:
        """Whether the network thread had to make the step, and has finished with it, successfully or not."""
        return self._task is not None and self._task.done()

    def use_own_gradient(self, own_id: PeerId, *, can_lead: bool) -> None:
        """Use this peer's own gradient as the average, for a step alone.

        Args:
            can_lead: whether this peer accepts connections.
        """
        seal = alone_seal(self.left_from.lineage, own_id)
        roster = self._replica.roster.after(Attendance.alone(own_id, can_lead=can_lead))
        samples = round(self.contribution.weight)
        shares = {own_id: self.contribution.weight}
        self.outcome = Averaged(
            self.contribution.mean_N, lineage_of(seal, roster), samples, shares=shares, roster=roster, seal=seal
        )

    def advance(self) -> None:
        """Make the update, on the calling thread; exceptions of the optimizer or the schedule pass through."""
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
        """Tell the collaboration, on the network thread, the position of this peer and the members of its round."""
        assert self.outcome is not None
        replica = self._replica
        collaboration.move(replica.position, replica.lineage_samples, self.outcome, self._sketch, self.waiting)
        self.is_announced = True

    def begin_in_background(self, collaboration: Collaboration, within_s: float) -> None:
        """Begin to make the step on the network thread; raises ``ConfigError`` if this peer has left the run.

        Args:
            within_s: wait so long until the step is due, and do not make it if it is not due by then; 0 makes it now.
        """
        if collaboration.tasks.is_closed:
            raise ConfigError(LEFT)
        making = self._average_and_advance(collaboration, within_s)
        self._task = collaboration.tasks.spawn(making, name="a global step")

    async def _average_and_advance(self, collaboration: Collaboration, within_s: float) -> None:
        try:
            if within_s and not await collaboration.becomes_due(within_s):
                return
            if self.outcome is None:
                self.outcome = await collaboration.step_rounds.average(self.contribution)
            await run_to_end(self.advance)
            self.announce(collaboration)
        except Exception as error:  # noqa: BLE001 (the training thread raises it)
            self.error = clear_tracebacks(error) if isinstance(error, (RoundAborted, Unavailable)) else error


@dataclass
class Statistics:
    """Counts since an optimizer was made.

    Attributes:
        samples_computed: samples passed to ``step`` on this peer.
        samples_used: those of them that are in a committed global step. Steps of a branch of the run that this peer
            has left later, after the network was cut, stay counted.
        samples_counted: the weight of ``samples_used`` in these steps: less than their number where a peer brought more
            than the limits allow (docs/explanation/rounds.md), another number if ``step(weight=...)`` is.
        samples_of_all: the weight of all peers' samples in the steps that this peer made, within the same limits; in
            a grid of groups, the target of each step. This peer's share is ``samples_counted / samples_of_all``.
        samples_dropped: samples that can count in no step; each time the log says why.
        samples_carried: samples that the others made a step without, and that were moved to the next one.
        rounds_committed: global steps that this peer made with others.
        rounds_aborted: attempts at a global step that failed.
        steps_alone: global steps that this peer made alone.
        updates_refused: global steps that left the parameters unchanged, as the update was not finite.
        states_loaded: number of downloads of the state.
        parameters_reloaded: those of them because the majority had other parameters at the same position.
        disagreement: how far apart the parameters of this peer and the majority (in a grid, or without a majority, of
            all peers) were before the last step, by their published sketches. It is the root mean square of their
            distances from their mean, as a fraction of the norm of that. None if unknown.
    """

    samples_computed: int = 0
    samples_used: int = 0
    samples_counted: int = 0
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
        """The counts of samples, for a log line."""
        counts = [f"{counted(self.samples_computed, 'sample')} computed here so far"]
        if self.samples_computed:
            counts.append(f"{self.samples_used} of them used ({self.samples_used / self.samples_computed:.1%})")
        if self.samples_dropped:
            counts.append(f"{self.samples_dropped} dropped")
        return ", ".join(counts)


class SampleCounter:
    """Decides what becomes of the samples of one peer, and counts them; the table above has all cases.

    The accumulator has the gradients, or what else the samples have led to.
    """

    def __init__(self, own_id: PeerId, replica: Replica, accumulator: Accumulator) -> None:
        self._own_id = own_id
        self._replica = replica
        self._accumulator = accumulator
        self.statistics = Statistics()
        self._num_not_finite = 0  # batches dropped because a gradient was not finite

    @property
    def waiting(self) -> int:
        """Number of samples that count in the next step."""
        return self._accumulator.samples

    def add(self, samples: int, weight: float | None, scale: float, at_step: int, *, is_overflow: bool) -> None:
        """Add the gradients of a micro-batch.

        Args:
            is_overflow: a gradient scaler has found gradients that overflowed, so the batch is dropped.
            samples, weight, scale, at_step: see :meth:`manyhands.optim.accumulator.Accumulator.add`.
        """
        is_added = not is_overflow and self._accumulator.add(samples, weight, scale, at_step)  # may raise
        self.statistics.samples_computed += samples
        if not is_added:
            self.statistics.samples_dropped += samples
            self._tell_not_finite(samples, is_overflow=is_overflow)
            self._drop_faulty()

    def freeze(self) -> Contribution:
        """Return the contribution of all waiting samples to a step; none are waiting then."""
        self._drop_faulty()
        return self._accumulator.freeze()

    def end(self, step: GlobalStep) -> None:
        """Decide what becomes of the samples of an attempt that has ended: they are used, wait, or are dropped."""
        contribution = step.contribution
        if reason := self._reason_to_drop_from(step):
            self._count_dropped(contribution.samples, reason)
            self._forget(step)
        elif isinstance(step.error, LacksMeans) and step.error.weight > 0:  # the others make the step with them
            self._count_used(contribution.samples, step.error.weight)
            self._forget(step)
        elif not step.has_moved:
            self._accumulator.take_back(contribution)
        elif step.is_left_out:
            self._accumulator.carry(contribution)
            self._count_carried(contribution.samples)
        else:
            outcome = step.outcome
            assert outcome is not None, "a step that was made has one"
            weight = outcome.shares.get(self._own_id, contribution.weight)  # a grid does not always know it
            self._count_used(contribution.samples, weight)
            self._forget(step)

    def load(self, before: Position) -> None:
        """Carry or drop the waiting samples, after a loaded state or a missed step.

        Args:
            before: the position of this peer until then.
        """
        waiting = self._accumulator
        since_step = waiting.since_step if waiting.samples else before.step
        if reason := self._reason_to_drop(before, since_step, was_out=waiting.was_out):
            self.drop_waiting(reason)
        elif waiting.samples:
            self._count_carried(waiting.samples)

    def drop_waiting(self, reason: str) -> None:
        """Drop all waiting samples; the reason goes to the log."""
        if self.waiting:
            self._count_dropped(self.waiting, reason)
        self._accumulator.drop()

    # the reasons

    def _drop_faulty(self) -> None:
        if fault := self._accumulator.fault():
            self.drop_waiting(fault)

    def _reason_to_drop_from(self, step: GlobalStep) -> str:
        """Why the samples of an attempt that has ended are dropped; empty if they are not."""
        outcome, number = step.outcome, step.left_from.step + 1
        if isinstance(step.error, LacksMeans) and step.error.is_outsized:
            return OUTSIZED % number
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
            before: the position at which they waited.
            since_step: the global step of the parameters that the oldest of them were computed with.
            was_out: some of them were in an attempt at the step that led from there.
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

    def _count_used(self, samples: int, weight: float) -> None:
        self.statistics.samples_used += samples
        self.statistics.samples_counted += sum_of_samples([weight])

    def _count_carried(self, samples: int) -> None:
        self.statistics.samples_carried += samples
        logger.info("The others made global step %d without %s of this peer, which will count in the next one",
                    self._replica.position.step, counted(samples, "sample"))  # fmt: skip

    def _count_dropped(self, samples: int, reason: str) -> None:
        self.statistics.samples_dropped += samples
        logger.warning("Dropped %s: %s", counted(samples, "sample"), reason)

    def _forget(self, step: GlobalStep) -> None:
        """Forget a contribution. After a step alone its memory is not used again: the optimizer may still hold it."""
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
