"""What a peer does after a batch, as a state machine. Pure.

Events come in with :meth:`RunMachine.on`, actions come out. A :class:`Situation` says what the peer knows just then.

=============  =============================================  =============  ===========================================
state          event                                          next           actions
=============  =============================================  =============  ===========================================
any            a batch is done; the target should be          reading        read the others' records
               reached, though the records do not say so
any            a batch is done                                *              as below
reading        done                                           *              as below
waiting        done; the others' batches reach the target     *              as below, at the target
waiting        done; they do not                              reading        read the others' records; no other wait in
                                                                             this step
alone          done; another peer is there, or this one has   computing      ``ACCUMULATE``
               no samples, or newcomers load the state
alone          done; nobody is there                          asking mates   ask the peers of earlier rounds
asking mates   done; one answers                              computing      ``ACCUMULATE``
asking mates   done; this peer has made no step yet, has      asking anyone  ask whoever it knows in the DHT
               known others, and a round's time is not over
asking mates   done                                           computing      ``GO_ALONE``
asking anyone  done; somebody answers                         computing      ``GO_ALONE``
asking anyone  done; nobody does                              computing      ``ACCUMULATE``: its link may be down
any            a step was made                                computing      a wait that goes on ends in ``ACCUMULATE``
=============  =============================================  =============  ===========================================

``*``: the first of these that holds decides after a batch. Near the target the peer also tells the others what it has.

=======================================================  ==============================================================
a better branch has a state to load: the run has gone    ``LOAD_STATE``: the step from here, if a peer has kept it;
on without this peer, say                                else the state
this peer has learnt nothing, and cannot use the state   it fails, with the reason
of those that are ahead
this peer has no state, and has seen a run that has      ``ACCUMULATE``, until a peer has that state
its parameters differ from those of the majority         ``RELOAD``
the target is not reached, but the others will reach it  waiting; once in a step, and for half of the matchmaking time
well before another batch of this peer ends              at most
the target is not reached                                ``ACCUMULATE``
-------------------------------------------------------  --------------------------------------------------------------
at the target
-------------------------------------------------------  --------------------------------------------------------------
another peer can come to the round                       ``AVERAGE``; ``ACCUMULATE`` while there is time for another
                                                         batch, or newcomers load the state
others are there, but cannot be reached                  ``ACCUMULATE``; this peer dials them, to find the dead
no other peer is there                                   alone: it reads the others' records
=======================================================  ==============================================================

A peer that lacks a step takes it from a peer that has kept it (``StepRounds.step_towards``), and loads the state if
none has. That holds for a newcomer whose state is some steps old, for a member that missed a round, and, at once, for
one that lacks the means of a round in which it was.
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
"""A peer waits for the others rather than begin another batch if they reach the target within this share of it. What it
would compute then is less than what the others lose who wait for it (docs/dev/log.md has other shares)."""


class Decision(enum.Enum):
    """What to do after a micro-batch."""

    ACCUMULATE = "the target is not reached"
    AVERAGE = "the target is reached: average with the others"
    GO_ALONE = "the target is reached, and nobody else is there"
    LOAD_STATE = "the run is elsewhere: take its step from here if a peer has kept it, else load its state"
    RELOAD = "most peers at this position hold other parameters: load their state"


class Stage(enum.Enum):
    """What a peer does before it decides."""

    COMPUTING = "computing"
    READING = "reading"
    WAITING = "waiting"
    ALONE = "alone"
    ASKING_MATES = "asking mates"
    ASKING_ANYONE = "asking anyone"


@dataclass(frozen=True)
class Situation:
    """The run as a peer knows it when an event comes; :meth:`.tracker.ProgressTracker.situation` makes it.

    Attributes:
        position: of this peer.
        others: those at this position.
        missing_samples: what the others must have for the target to be reached.
        members: of the roster: once there are any, only their batches are predicted.
        is_worth_a_look: the target should be reached, although the last records do not say so.
        has_better_branch: a better branch has a state that this peer can load.
        refusal: why this peer, which has learnt nothing, must not go on; empty if it may.
        has_lost_run: this peer has no state, has seen a run that has one, and knows of nobody there any more.
        differs: its parameters are not those of the majority, and it has not tried to load these yet.
        is_near: the target is at most two batches away, and the peers are few enough to tell each other.
        is_due: the target is reached by the published samples; or another peer calls, and ``CALLED_SHARE`` of the
            target is predicted.
        eta_s: predicted seconds until the target.
        can_meet: another peer has called; or one is expected, and it or this one can be dialled.
        is_alone: waiting would bring no other peer to the step.
        newcomers: peers that load the state here.
        late_newcomers: those of them whose last download took longer than a step.
        knew_others: this peer has known others in the DHT before.
    """

    position: Position
    others: View
    missing_samples: int
    members: Collection[PeerId]
    is_worth_a_look: bool
    has_better_branch: bool
    refusal: str
    has_lost_run: bool
    differs: bool
    is_near: bool
    is_due: bool
    eta_s: float
    can_meet: bool
    is_alone: bool
    newcomers: Collection[PeerId]
    late_newcomers: Collection[PeerId]
    knew_others: bool


# events


@dataclass(frozen=True)
class Batch:
    """The training loop has finished a batch."""

    samples: int  # waiting here, with it
    batch_s: float
    may_wait: bool  # for the others' batches


@dataclass(frozen=True)
class Done:
    """What the peer did before it decides is done."""

    is_there: bool = False  # somebody has answered


@dataclass(frozen=True)
class Stepped:
    """This peer has made a step, with the members of a round or alone."""

    members: Collection[PeerId]


Event: TypeAlias = Batch | Done | Stepped


# actions: all but the last one of those that come out are done at once; the last one ends with a decision or with Done


@dataclass(frozen=True)
class Decide:
    """Answer the training loop."""

    decision: Decision


@dataclass(frozen=True)
class Fail:
    """Answer the training loop that this peer cannot go on."""

    reason: str


@dataclass(frozen=True)
class Look:
    """Read the others' records."""

    timeout_s: float


@dataclass(frozen=True)
class WaitUntilDue:
    """Wait until the target is reached."""

    timeout_s: float


@dataclass(frozen=True)
class AskMates:
    """Ask the peers of earlier rounds, which the DHT hides, whether they are there."""


@dataclass(frozen=True)
class AskAnyone:
    """Ask whoever was known in the DHT whether it is there."""


@dataclass(frozen=True)
class Tell:
    """Tell the others what this peer has accumulated."""


@dataclass(frozen=True)
class DialMissing:
    """Dial the peers that do not come to rounds, to find out which are gone."""


@dataclass(frozen=True)
class SayItWaits:
    """Tell the user that this peer waits for a peer that has the run's state."""


Action: TypeAlias = Decide | Fail | Look | WaitUntilDue | AskMates | AskAnyone | Tell | DialMissing | SayItWaits


class RunMachine:
    """The decisions of one peer, batch by batch.

    Attributes:
        lull_until: the training loop need not report a batch before this time; nothing is due then.
    """

    def __init__(self, config: AveragingConfig) -> None:
        self._config = config
        self.stage = Stage.COMPUTING
        self.lull_until = -math.inf
        self._batch = Batch(0, 0.0, may_wait=False)
        self._has_stepped = False
        self._due_from: Position | None = None  # where a step is due
        self._due_since = -math.inf
        self._waited_in_vain_at: Position | None = None
        self._awaited: set[PeerId] = set()  # peers that load the state, for which this step has waited
        self._pause_until = -math.inf  # no step waits for such peers before

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
            case _:  # somebody of its rounds answers, or nobody at all does
                return [Decide(Decision.ACCUMULATE)]

    def _first(self, stage: Stage, action: Action) -> list[Action]:
        """Do this before the decision."""
        self.stage = stage
        return [action]

    def _choose(self, now: float, run: Situation) -> list[Action]:
        """Decide after a batch; the second table at the head of this file."""
        if run.has_better_branch:
            return [Decide(Decision.LOAD_STATE)]
        if run.refusal:
            return [Fail(run.refusal)]
        if run.has_lost_run:
            return [SayItWaits(), Decide(Decision.ACCUMULATE)]
        if run.differs:
            return [Decide(Decision.RELOAD)]
        batch = self._batch
        tell: list[Action] = [Tell()] if batch.samples and batch.may_wait and run.is_near else []
        if run.is_due:
            return tell + self._at_target(now, run)
        if batch.may_wait and (wait_s := self._wait_s(now, run)):
            return tell + self._first(Stage.WAITING, WaitUntilDue(wait_s))
        return tell + self._not_due(now, run)

    def _wait_s(self, now: float, run: Situation) -> float:
        """How long to wait for the others to reach the target; 0 if another batch of this peer is worth more."""
        batch_s = self._batch.batch_s
        if not run.is_near or self._waited_in_vain_at == run.position or batch_s <= 0:
            return 0.0
        within_s = min(WAIT_SHARE * batch_s, self._config.matchmaking_time_s / 2)
        arrival_s = run.others.arrives_in_s(run.missing_samples, within_s, now, run.members)
        return arrival_s + min(batch_s, MOMENT_S) if arrival_s < math.inf else 0.0

    def _not_due(self, now: float, run: Situation) -> list[Action]:
        if TWO_DIALS_S < run.eta_s < math.inf:  # far from it not each batch is reported: that wakes two threads
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
        """Whether this peer can compute another batch before the others finish theirs and come to the round."""
        batch_s = self._batch.batch_s
        until = min(run.others.busy_until(self._due_since), self._due_since + self._config.matchmaking_time_s / 2)
        return batch_s > 0 and now + BATCH_MARGIN * batch_s <= until

    def _waits_for_newcomers(self, now: float, run: Situation, *, is_alone: bool) -> bool:
        """Go on computing while others load the state, which a step would make out of date; returns whether to.

        A lone peer waits for anyone. In a group, where the others wait for this peer, it waits as long as for one that
        computes, and only for those whose last download took longer than a step: they would never take part else.
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
        return self._first(Stage.ASKING_ANYONE, AskAnyone())  # else it may begin a branch of its own

    # from position to position

    def _stepped(self, members: Collection[PeerId], now: float) -> None:
        self._has_stepped = True
        if self._awaited and self._awaited.isdisjoint(members):
            self._pause_until = now + IDLE_S  # it waited in vain for those that load the state
        self._awaited = set()
