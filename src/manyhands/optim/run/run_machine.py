"""Decides what a peer does after each batch, as a state machine. Pure.

:meth:`RunMachine.on` takes an event and returns actions. A :class:`Situation` says what the peer knows at that moment.
The driver is :meth:`.collaboration.Collaboration.decide`: it hands the events in, and carries the actions out.

===========  ==========================================================================================================
event        raised by
===========  ==========================================================================================================
``Batch``    ``Collaboration.decide``, which ``Optimizer.step`` calls through ``BlockingRunClient.decide``: once for
             each call of ``step``, except during a lull and while a step is made in the background
``Done``     ``Collaboration.decide``, when it has carried out the last action of an answer that did not end with
             ``Decide``
``Stepped``  ``Collaboration.move``, which ``GlobalStep.announce`` calls after the update of a global step
===========  ==========================================================================================================

=============  =============================================  =============  ===========================================
state          event                                          next           actions
=============  =============================================  =============  ===========================================
any            ``Batch``; the target should be reached, but   reading        ``Look``: read the others' records
               the records read so far do not say so
any            any other ``Batch``                            *              as below
reading        ``Done``                                       *              as below
waiting        ``Done``; the target is reached                *              as below, at the target
waiting        ``Done``; it is not reached                    reading        ``Look``; no other wait before a step
asking         ``Done``; no other peer is there, this peer    computing      ``GO_ALONE``
               has samples, no newcomers download the state
               (for ``averaging_timeout_s``; after a wait in
               vain not again for ``IDLE_S``), and its link
               is not down (checked before its first step,
               for ``averaging_timeout_s``)
asking         ``Done``; otherwise                            computing      ``ACCUMULATE``
any            ``Stepped``                                    computing      none; the ``Done`` of an action that is
                                                                             still carried out gives ``ACCUMULATE``
=============  =============================================  =============  ===========================================

``*``: the first of these conditions that holds decides. From the fourth one on, a peer near the target also sends the
others its number of samples (``Tell``).

=======================================================  ==============================================================
another branch is better, and this peer can load its     ``LOAD_STATE``
state: the run may have gone on without this peer
this peer is at step 0, the run was seen beyond it, and  ``ACCUMULATE`` with the reason, until a peer with a state that
neither a state that it can use nor a trainer at its     it can use appears
own position is there
this peer's parameters differ from the majority's        ``RELOAD``
the target is not reached, but the others are predicted  waiting: ``WaitUntilDue``, for about half of the matchmaking
to reach it well before another batch of this peer ends  time at most, and once between two global steps
the same before the end of that batch, and the round is  ``AVERAGE_WHEN_DUE``, once between two global steps: the
made in the background                                   samples so far count in this step, those of the batch in the
                                                         next one
the target is not reached                                ``ACCUMULATE``
-------------------------------------------------------  --------------------------------------------------------------
at the target
-------------------------------------------------------  --------------------------------------------------------------
another peer can come to the round                       ``AVERAGE``; but ``ACCUMULATE`` if another batch of this peer
                                                         ends before those of the others
no other peer is there, or none that can be reached      asking: ``AskOthers``
=======================================================  ==============================================================

On ``LOAD_STATE`` the optimizer first asks for the committed steps from its position (``state/catching_up.py``), and
downloads the state only if no peer has kept them. So a newcomer whose state is some steps old and a member that missed
a round usually need no download. A member that lacks the means of its own round asks for them within the round
(``StepRounds.average``).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.matchmaking.patience import BATCH_MARGIN
from manyhands.averaging.messages import Position
from manyhands.averaging.timing import IDLE_S, LOOK_S, MOMENT_S, TWO_DIALS_S
from manyhands.base.identity import PeerId
from manyhands.optim.run.progress import View

WAIT_SHARE = 0.75
"""A peer waits for the others, rather than begin another batch, if they are predicted to reach the target within this
share of its time for a batch. If it began one, the others would have to wait for its end, and lose more than that batch
is worth (docs/dev/log.md has the measurements with other shares)."""


class Decision(enum.Enum):
    """What to do after a micro-batch."""

    ACCUMULATE = "the target is not reached"
    AVERAGE = "the target is reached: average with the others"
    AVERAGE_WHEN_DUE = "the others are predicted to reach the target: average in the background as soon as they have"
    GO_ALONE = "the target is reached, and nobody else is there"
    LOAD_STATE = "the run is at another position: make its steps from here if a peer has kept them, else load its state"
    RELOAD = "most peers at this position hold other parameters: load their state"


class Stage(enum.Enum):
    """What a peer is doing: it computes, or carries out an action on which its decision after a batch depends."""

    COMPUTING = "computing"
    READING = "reading"
    WAITING = "waiting"
    ASKING = "asking"


@dataclass(frozen=True)
class Situation:
    """The run as a peer knows it when an event comes; :meth:`.tracker.ProgressTracker.situation` makes it.

    - The *target* is the number of samples of one global step. Samples are *published* if they are in records; they are
      *predicted* if they are extrapolated from the records to now.
    - A *branch* is a position that some peers hold; the better one of two has more steps (see :mod:`.branches`).
    - A peer is *expected* at the next round if its record says that it is at this position, and it is not missing.
      One that the roster bars counts as if it were at another position.
    - Another peer *calls* when it has begun a round here, and this peer has not come to it.
    - *Newcomers* are future trainers that download the state from this peer, or did so until a moment ago.

    Attributes:
        position: of this peer.
        others: the other peers at this position.
        missing_samples: how many samples the others must have for the target to be reached: the target minus the
            samples of this peer.
        voters: the voters of the roster at this position. If there are any, only their batches are predicted, and
            waited for.
        is_worth_a_look: the target is not reached by the published samples, but should be: another peer calls, or the
            predicted samples reach it and no leader calls this peer in a crowd. The last read is at least
            ``min_refresh_s`` ago.
        has_better_branch: another branch is better, and a peer that this one can reach has its state.
        lacks_state: why this peer, at step 0, must not step; see :meth:`.BranchChoice.lacks_state`. Empty if it may.
        differs: this peer's parameters differ from the majority's, and it should reload; see :meth:`.Drift.compare`.
        is_near: the target is predicted to be at most two batches (of the slowest other trainer) away. False in a grid
            and in a crowd, where each peer would have to tell too many others.
        is_due: the published samples reach the target; or another peer calls, and the predicted samples reach
            ``CALLED_SHARE`` of it.
        eta_s: seconds until the target, by the published or the predicted samples, whichever come earlier.
        can_meet: another peer calls; or one is expected, and it or this one accepts connections.
        is_alone: no other peer would come to the step, however long this one waits: it is on the best known branch,
            and no other trainer there has a record. Records last for 30 s by default; those of peers that have said
            goodbye, or whose machine refuses a dial, go at once. A peer in client mode is alone only if no other peer
            of the run trains, or if ``allow_solo`` is set and no peer of the run accepts connections.
        has_newcomers: whether there are any newcomers of this peer.
    """

    position: Position
    others: View
    missing_samples: int
    voters: Collection[PeerId]
    is_worth_a_look: bool
    has_better_branch: bool
    lacks_state: str
    differs: bool
    is_near: bool
    is_due: bool
    eta_s: float
    can_meet: bool
    is_alone: bool
    has_newcomers: bool


# events; the first table says who raises them


@dataclass(frozen=True)
class Batch:
    """The training loop has finished a batch."""

    samples: int  # of this peer that count in the next step, with those of this batch
    batch_s: float  # seconds that it took; 0 if unknown
    may_wait: bool  # False: rounds are made in the background, so answer without waiting for the others' batches


@dataclass(frozen=True)
class Done:
    """The last action of the previous answer is carried out."""

    is_cut_off: bool = False  # after AskOthers that checks the link: it may be down


@dataclass(frozen=True)
class Stepped:
    """This peer has made a step, with the members of a round or alone."""

    members: Collection[PeerId]


Event: TypeAlias = Batch | Done | Stepped


# actions, carried out in order; the last one of an answer is Decide, or takes time and is followed by Done


@dataclass(frozen=True)
class Decide:
    """Answer the training loop."""

    decision: Decision
    within_s: float = 0.0  # of AVERAGE_WHEN_DUE: if the target is not reached by then, the step is not made
    reason: str = ""  # why this peer only waits, for the log; empty if it need not be told


@dataclass(frozen=True)
class Look:
    """Read the others' records."""

    timeout_s: float


@dataclass(frozen=True)
class WaitUntilDue:
    """Wait until a step is due (see ``Situation.is_due``)."""

    timeout_s: float


@dataclass(frozen=True)
class AskOthers:
    """Find out which peers of the run are there; what they answer is in the next :class:`Situation`."""

    checks_link: bool  # whether to find out, too, if this peer's own link may be down


@dataclass(frozen=True)
class Tell:
    """Tell the expected peers how many samples this one has accumulated."""


Action: TypeAlias = Decide | Look | WaitUntilDue | AskOthers | Tell


class RunMachine:
    """Makes the decisions of one peer; the tables at the head of this file have the rules.

    Attributes:
        lull_until: until this time (of the loop's clock) no step can be due, so batches need not be reported.
    """

    def __init__(self, config: AveragingConfig) -> None:
        self._config = config
        self.stage = Stage.COMPUTING
        self.lull_until = -math.inf
        self._batch = Batch(0, 0.0, may_wait=False)
        self._has_stepped = False
        self._due_from: Position | None = None  # the position from which the last due step leads
        self._due_since = -math.inf
        self._waited_in_vain_at: Position | None = None
        self._has_awaited_newcomers = False  # with the next step
        self._pause_until = -math.inf  # until then no step waits for newcomers

    def on(self, event: Event, now: float, run: Situation) -> list[Action]:
        """Take an event in; returns what to do."""
        stage, self.stage = self.stage, Stage.COMPUTING
        match event:
            case Stepped(members):
                self._stepped(members, now)
                return []
            case Batch():
                self._batch = event
                if run.is_worth_a_look:
                    return self._first(Stage.READING, Look(MOMENT_S))
                return self._choose(now, run)
            case Done(is_cut_off):
                return self._go_on(stage, now, run, is_cut_off=is_cut_off)

    def _go_on(self, stage: Stage, now: float, run: Situation, *, is_cut_off: bool) -> list[Action]:
        match stage:
            case Stage.READING:
                return self._choose(now, run)
            case Stage.WAITING if run.is_due:
                return self._at_target(now, run)
            case Stage.WAITING:
                self._waited_in_vain_at = run.position
                return self._first(Stage.READING, Look(MOMENT_S))
            case Stage.ASKING if run.is_alone and not run.can_meet and not is_cut_off and self._batch.samples:
                return [Decide(Decision.ACCUMULATE if self._waits_for_newcomers(now, run) else Decision.GO_ALONE)]
            case _:  # also if a step was made meanwhile
                return [Decide(Decision.ACCUMULATE)]

    def _first(self, stage: Stage, action: Action) -> list[Action]:
        """Enter a stage and order its action; the decision follows when the action is done."""
        self.stage = stage
        return [action]

    def _choose(self, now: float, run: Situation) -> list[Action]:
        """Decide after a batch; the second table at the head of this file."""
        if run.has_better_branch:
            return [Decide(Decision.LOAD_STATE)]
        if run.lacks_state:
            return [Decide(Decision.ACCUMULATE, reason=run.lacks_state)]
        if run.differs:
            return [Decide(Decision.RELOAD)]
        batch = self._batch
        tell: list[Action] = [Tell()] if batch.samples and run.is_near else []
        if run.is_due:
            return tell + self._at_target(now, run)
        if wait_s := self._wait_s(now, run):
            return tell + (
                self._first(Stage.WAITING, WaitUntilDue(wait_s)) if batch.may_wait else self._early(run, wait_s)
            )
        return tell + self._not_due(now, run)

    def _early(self, run: Situation, wait_s: float) -> list[Action]:
        """Begin a step in the background before it is due."""
        if not (self._batch.samples and run.can_meet):
            return [Decide(Decision.ACCUMULATE)]
        self._waited_in_vain_at = run.position
        return [Decide(Decision.AVERAGE_WHEN_DUE, wait_s)]

    def _wait_s(self, now: float, run: Situation) -> float:
        """Seconds to wait for the others to reach the target; 0 to compute another batch instead."""
        batch_s = self._batch.batch_s
        if not run.is_near or self._waited_in_vain_at == run.position or batch_s <= 0:
            return 0.0
        share = WAIT_SHARE if self._batch.may_wait else 1.0
        within_s = min(share * batch_s, self._config.matchmaking_time_s / 2)
        arrival_s = run.others.arrives_in_s(run.missing_samples, within_s, now, run.voters)
        if arrival_s == math.inf:
            return 0.0
        return arrival_s + min(batch_s, MOMENT_S)

    def _not_due(self, now: float, run: Situation) -> list[Action]:
        if TWO_DIALS_S < run.eta_s < math.inf:  # far from the target: each report would wake two threads
            self.lull_until = now + LOOK_S
        return [Decide(Decision.ACCUMULATE)]

    def _at_target(self, now: float, run: Situation) -> list[Action]:
        if self._due_from != run.position:
            self._due_from, self._due_since = run.position, now
        if run.can_meet:
            return [Decide(Decision.ACCUMULATE if self._has_time(now, run) else Decision.AVERAGE)]
        is_early = now - self._due_since < self._config.averaging_timeout_s
        # with a link that is down, this peer would begin a branch of its own
        return self._first(Stage.ASKING, AskOthers(checks_link=is_early and not self._has_stepped))

    def _has_time(self, now: float, run: Situation) -> bool:
        """Whether this peer can compute another batch before the others finish theirs and come to the round.

        If the round is made in the background, it computes that batch in any case.
        """
        if not self._batch.may_wait:
            return False
        batch_s = self._batch.batch_s
        others_until = run.others.busy_until(self._due_since, run.voters)
        until = min(others_until, self._due_since + self._config.matchmaking_time_s / 2)
        return batch_s > 0 and now + BATCH_MARGIN * batch_s <= until

    def _waits_for_newcomers(self, now: float, run: Situation) -> bool:
        """Whether to put the step off while newcomers download the state, which the step would make out of date."""
        is_over = now - self._due_since >= self._config.averaging_timeout_s or now < self._pause_until
        waits = run.has_newcomers and not is_over
        self._has_awaited_newcomers |= waits
        return waits

    # from position to position

    def _stepped(self, members: Collection[PeerId], now: float) -> None:
        self._has_stepped = True
        if self._has_awaited_newcomers and not members:
            self._pause_until = now + IDLE_S  # it waited in vain
        self._has_awaited_newcomers = False
