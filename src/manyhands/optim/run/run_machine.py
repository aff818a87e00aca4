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
alone          ``Done``; another peer is there after all, or  computing      ``ACCUMULATE``
               this one has no samples, or newcomers
               download the state
alone          ``Done``; nothing of that holds                asking mates   ``AskMates``: call the peers of earlier
                                                                             rounds
asking mates   ``Done``; one of them has answered             computing      ``ACCUMULATE``
asking mates   ``Done``; none has, and this peer has made no  asking anyone  ``AskAnyone``: ping nodes of the DHT
               step yet, was given initial peers or knows
               some from an earlier start, and has waited
               for less than ``averaging_timeout_s``
asking mates   ``Done``; none has, otherwise                  computing      ``GO_ALONE``
asking anyone  ``Done``; a node has answered                  computing      ``GO_ALONE``
asking anyone  ``Done``; none has: this peer's own link may   computing      ``ACCUMULATE``
               be down
any            ``Stepped``                                    computing      none; the ``Done`` of an action that is
                                                                             still carried out gives ``ACCUMULATE``
=============  =============================================  =============  ===========================================

``*``: the first of these conditions that holds decides. From the fifth one on, a peer near the target also sends the
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
                                                         ends before those of the others, or for late newcomers
others are there, but cannot be reached                  ``DialMissing``, to find out which are gone; ``ACCUMULATE``
no other peer is there                                   alone: ``Look``
=======================================================  ==============================================================

On ``LOAD_STATE`` the optimizer first asks for the committed steps from its position (``StepRounds.step_towards``), and
downloads the state only if no peer has kept them. So a newcomer whose state is some steps old and a member that missed
a round usually need no second download. A member of a round that committed without it holding the means does not wait
for this decision: ``StepRounds.average`` fetches the step at once.
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
from manyhands.averaging.timing import DIAL_S, IDLE_S, LOOK_S, MOMENT_S, TWO_DIALS_S
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
    ALONE = "alone"
    ASKING_MATES = "asking mates"
    ASKING_ANYONE = "asking anyone"


@dataclass(frozen=True)
class Situation:
    """The run as a peer knows it when an event comes; :meth:`.tracker.ProgressTracker.situation` makes it.

    - The *target* is the number of samples of one global step. Samples are *published* if they are in records; they are
      *predicted* if they are extrapolated from the records to now.
    - A *branch* is a position that some peers hold; the better one of two has more steps (see :mod:`.branches`).
    - A peer is *expected* at the next round if its record says that it is at this position, and it is not missing.
    - Another peer *calls* when it has begun a round here, and this peer has not come to it.
    - *Newcomers* are future trainers that download the state from this peer, or did so until a moment ago.

    Attributes:
        position: of this peer.
        others: the other peers at this position.
        missing_samples: how many samples the others must have for the target to be reached: the target minus the
            samples of this peer.
        members: the members of the roster at this position. If there are any, only their batches are predicted, and
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
            and the only trainer there. A peer in client mode is alone only if no other peer of the run trains, or if
            ``allow_solo`` is set and no peer of the run accepts connections.
        newcomers: all newcomers of this peer.
        late_newcomers: the newcomers whose last download took longer than a step of the run, but those with faults in
            the roster: they come back, and would hold up a step each time.
        knew_others: this peer was given initial peers, or knows peers from an earlier start.
    """

    position: Position
    others: View
    missing_samples: int
    members: Collection[PeerId]
    is_worth_a_look: bool
    has_better_branch: bool
    lacks_state: str
    differs: bool
    is_near: bool
    is_due: bool
    eta_s: float
    can_meet: bool
    is_alone: bool
    newcomers: Collection[PeerId]
    late_newcomers: Collection[PeerId]
    knew_others: bool


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

    is_there: bool = False  # after AskMates or AskAnyone: a peer has answered


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
class AskMates:
    """Ask peers of earlier rounds of which the DHT has no record now whether they are still in the run."""


@dataclass(frozen=True)
class AskAnyone:
    """Ping some nodes of the DHT, of any run: if none answers, this peer's own link may be down."""


@dataclass(frozen=True)
class Tell:
    """Tell the expected peers how many samples this one has accumulated."""


@dataclass(frozen=True)
class DialMissing:
    """Dial the missing peers, which did not come to rounds, to find out which are gone."""


Action: TypeAlias = Decide | Look | WaitUntilDue | AskMates | AskAnyone | Tell | DialMissing


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
        self._awaited: set[PeerId] = set()  # newcomers for which the next step has waited
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
            case Done(is_there):
                return self._go_on(stage, now, run, is_there=is_there)

    def _go_on(self, stage: Stage, now: float, run: Situation, *, is_there: bool) -> list[Action]:
        match stage:
            case Stage.READING:
                return self._choose(now, run)
            case Stage.WAITING if run.is_due:
                return self._at_target(now, run)
            case Stage.WAITING:
                self._waited_in_vain_at = run.position
                return self._first(Stage.READING, Look(MOMENT_S))
            case Stage.ALONE:
                return self._still_alone(now, run)
            case Stage.ASKING_MATES if not is_there:
                return self._nobody_answered(now, run)
            case Stage.ASKING_ANYONE if is_there:
                return [Decide(Decision.GO_ALONE)]
            case _:  # a peer of earlier rounds has answered, or no node of the DHT has, or a step was made meanwhile
                return [Decide(Decision.ACCUMULATE)]

    def _first(self, stage: Stage, action: Action) -> list[Action]:
        """Enter a stage: carry this action out before the decision."""
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
        if not (self._batch.samples and run.can_meet) or run.late_newcomers:
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
        arrival_s = run.others.arrives_in_s(run.missing_samples, within_s, now, run.members)
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
            goes_on = self._has_time(now, run) or self._waits_for_newcomers(now, run, is_alone=False)
            return [Decide(Decision.ACCUMULATE if goes_on else Decision.AVERAGE)]
        if not run.is_alone:
            return [DialMissing(), Decide(Decision.ACCUMULATE)]
        return self._first(Stage.ALONE, Look(DIAL_S))

    def _has_time(self, now: float, run: Situation) -> bool:
        """Whether this peer can compute another batch before the others finish theirs and come to the round.

        If the round is made in the background, it computes that batch in any case.
        """
        if not self._batch.may_wait:
            return False
        batch_s = self._batch.batch_s
        others_until = run.others.busy_until(self._due_since, run.members)
        until = min(others_until, self._due_since + self._config.matchmaking_time_s / 2)
        return batch_s > 0 and now + BATCH_MARGIN * batch_s <= until

    def _waits_for_newcomers(self, now: float, run: Situation, *, is_alone: bool) -> bool:
        """Whether to put the step off while newcomers download the state, which the step would make out of date.

        A lone peer waits for all newcomers. In a group, where the others wait for this peer, it waits no longer than
        for a peer that computes, and only for late newcomers: these could never take part otherwise.
        """
        longest_s = self._config.averaging_timeout_s if is_alone else self._config.matchmaking_time_s / 2
        if now - self._due_since >= longest_s or now < self._pause_until:
            return False
        newcomers = run.newcomers if is_alone else run.late_newcomers
        self._awaited.update(newcomers)
        return bool(newcomers)

    # alone

    def _still_alone(self, now: float, run: Situation) -> list[Action]:
        if not run.is_alone or run.can_meet or not self._batch.samples:
            return [Decide(Decision.ACCUMULATE)]
        if self._waits_for_newcomers(now, run, is_alone=True):
            return [Decide(Decision.ACCUMULATE)]
        return self._first(Stage.ASKING_MATES, AskMates())

    def _nobody_answered(self, now: float, run: Situation) -> list[Action]:
        has_waited = now - self._due_since >= self._config.averaging_timeout_s
        if self._has_stepped or not run.knew_others or has_waited:
            return [Decide(Decision.GO_ALONE)]
        # with a link that is down, this peer would begin a branch of its own
        return self._first(Stage.ASKING_ANYONE, AskAnyone())

    # from position to position

    def _stepped(self, members: Collection[PeerId], now: float) -> None:
        self._has_stepped = True
        if self._awaited and self._awaited.isdisjoint(members):
            self._pause_until = now + IDLE_S  # it waited in vain for newcomers
        self._awaited = set()
