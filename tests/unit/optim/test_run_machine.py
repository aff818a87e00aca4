"""What a peer does after a batch: each combination of what it knows, in each state of its machine."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields, replace

import pytest

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import Position
from manyhands.averaging.timing import IDLE_S, LOOK_S, MOMENT_S
from manyhands.base.identity import PeerId
from manyhands.optim.run.progress import View
from manyhands.optim.run.run_machine import (
    WAIT_SHARE,
    Action,
    AskOthers,
    Batch,
    Decide,
    Decision,
    Done,
    Event,
    Look,
    RunMachine,
    Situation,
    Stage,
    Stepped,
    Tell,
    WaitUntilDue,
)
from tests.sweeps import few_of

CONFIG = AveragingConfig(matchmaking_time_s=16.0, averaging_timeout_s=60.0)
MATE = PeerId("mate")
HERE = Position(3, b"here")
BATCH = Batch(8, 1.0, may_wait=True)
LASTING = (Look, WaitUntilDue, AskOthers)
MOST_ACTIONS = len(Stage)  # it may read twice
ACCUMULATE, AVERAGE, ALONE = Decide(Decision.ACCUMULATE), Decide(Decision.AVERAGE), Decide(Decision.GO_ALONE)
ASK, ASK_AND_CHECK = AskOthers(checks_link=False), AskOthers(checks_link=True)


class Others(View):
    """Others whose batches end, and reach the target, when a test says so."""

    def __init__(self, busy_s: float, arrives_s: float) -> None:
        super().__init__({}, HERE)
        self._busy_s = busy_s
        self._arrives_s = arrives_s

    def busy_until(self, instant: float, voters: Collection[PeerId] = ()) -> float:
        return instant + self._busy_s

    def arrives_in_s(self, samples: int, within_s: float, now: float, voters: Collection[PeerId] = ()) -> float:
        return self._arrives_s if self._arrives_s <= within_s else math.inf


@dataclass(frozen=True)
class Facts(Situation):
    """A situation that is written down."""

    position: Position = HERE
    others: View = field(init=False)
    missing_samples: int = 0
    voters: Collection[PeerId] = ()
    is_worth_a_look: bool = False
    has_better_branch: bool = False
    lacks_state: str = ""
    differs: bool = False
    is_near: bool = False
    is_due: bool = False
    eta_s: float = math.inf
    can_meet: bool = False
    is_alone: bool = False
    has_newcomers: bool = False
    arrives_s: float = math.inf  # until the others reach the target
    busy_s: float = 0.0  # of the others' batches

    def __post_init__(self) -> None:
        object.__setattr__(self, "others", Others(self.busy_s, self.arrives_s))


def outcome_of(machine: RunMachine, batch: Batch, now: float, *facts: Facts, is_cut_off: bool = False) -> list[Action]:
    """All actions after a batch; the situation changes with each event, and the last one stays."""
    situations = itertools.chain(facts, itertools.repeat(facts[-1]))
    actions = machine.on(batch, now, next(situations))
    while isinstance(actions[-1], LASTING):
        checks_link = isinstance(actions[-1], AskOthers) and actions[-1].checks_link
        actions += machine.on(Done(is_cut_off and checks_link), now, next(situations))
    return actions


def after(*facts: Facts, batch: Batch = BATCH, is_cut_off: bool = False) -> list[Action]:
    return outcome_of(RunMachine(CONFIG), batch, 100.0, *facts, is_cut_off=is_cut_off)


# one batch


def test_before_the_target_the_peer_computes_on_and_far_from_it_reports_seldom() -> None:
    machine = RunMachine(CONFIG)
    assert outcome_of(machine, BATCH, 100.0, Facts(eta_s=5.0)) == [ACCUMULATE]
    assert machine.lull_until == -math.inf
    assert outcome_of(machine, BATCH, 100.0, Facts(eta_s=60.0)) == [ACCUMULATE]
    assert machine.lull_until == 100.0 + LOOK_S


def test_old_records_are_read_before_the_decision() -> None:
    assert after(Facts(is_worth_a_look=True), Facts(has_better_branch=True)) == [
        Look(MOMENT_S), Decide(Decision.LOAD_STATE),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "actions"),
    [
        (Facts(has_better_branch=True, differs=True, is_due=True), [Decide(Decision.LOAD_STATE)]),
        (
            Facts(lacks_state="its state is unusable", is_due=True),
            [Decide(Decision.ACCUMULATE, reason="its state is unusable")],
        ),
        (Facts(differs=True, is_due=True, can_meet=True), [Decide(Decision.RELOAD)]),
        (Facts(is_due=True, can_meet=True), [AVERAGE]),
        (Facts(is_due=True, can_meet=True, is_near=True), [Tell(), AVERAGE]),
        (Facts(is_due=True), [ASK_AND_CHECK, ACCUMULATE]),
        (Facts(is_due=True, is_alone=True), [ASK_AND_CHECK, ALONE]),
    ],
)
def test_the_first_applicable_rule_decides_at_the_end_of_a_batch(facts: Facts, actions: list[Action]) -> None:
    assert after(facts) == actions


def test_a_peer_waits_for_others_that_reach_the_target_well_before_its_next_batch_would_end() -> None:
    arriving = Facts(is_near=True, arrives_s=0.5)
    wait = WaitUntilDue(0.5 + MOMENT_S)
    assert after(arriving, replace(arriving, is_due=True, can_meet=True)) == [Tell(), wait, AVERAGE]
    assert after(arriving, arriving, replace(arriving, is_due=True, can_meet=True)) == [
        Tell(), wait, Look(MOMENT_S), Tell(), AVERAGE,
    ]  # fmt: skip
    assert after(replace(arriving, arrives_s=WAIT_SHARE))[1] == WaitUntilDue(WAIT_SHARE + MOMENT_S)
    assert after(replace(arriving, arrives_s=WAIT_SHARE + 0.01)) == [Tell(), ACCUMULATE]


def test_a_peer_that_averages_in_the_background_begins_before_the_batch_in_which_the_target_is_reached() -> None:
    """It does not wait, and that batch counts in the next step."""
    batch = Batch(8, 1.0, may_wait=False)
    arriving = Facts(is_near=True, arrives_s=0.9, can_meet=True)
    early = Decide(Decision.AVERAGE_WHEN_DUE, 0.9 + MOMENT_S)
    assert after(arriving, batch=batch) == [Tell(), early]
    assert after(replace(arriving, arrives_s=1.1), batch=batch) == [Tell(), ACCUMULATE]
    assert after(replace(arriving, can_meet=False), batch=batch) == [Tell(), ACCUMULATE]
    assert after(arriving, batch=replace(batch, samples=0)) == [ACCUMULATE]
    machine = RunMachine(CONFIG)
    assert outcome_of(machine, batch, 100.0, arriving) == [Tell(), early]
    assert outcome_of(machine, batch, 101.0, arriving) == [Tell(), ACCUMULATE], "it was in vain"
    due = Facts(is_due=True, can_meet=True, busy_s=9.0)
    assert after(due, batch=batch) == [AVERAGE], "to compute another batch first would only make the step larger"


def test_a_wait_in_vain_is_not_repeated_before_the_next_step() -> None:
    machine, arriving = RunMachine(CONFIG), Facts(is_near=True, arrives_s=0.5)
    assert outcome_of(machine, BATCH, 100.0, arriving)[-1] == ACCUMULATE
    assert outcome_of(machine, BATCH, 101.0, arriving) == [Tell(), ACCUMULATE]
    there = replace(arriving, position=Position(4, b"there"))
    assert isinstance(outcome_of(machine, BATCH, 102.0, there)[1], WaitUntilDue)


def test_a_peer_computes_another_batch_that_ends_before_those_of_the_others() -> None:
    due = Facts(is_due=True, can_meet=True, busy_s=1.5)
    assert after(due) == [ACCUMULATE]
    assert after(replace(due, busy_s=1.2)) == [AVERAGE]
    assert after(due, batch=Batch(8, 0.0, may_wait=True)) == [AVERAGE], "it does not know how long a batch takes"


def test_a_peer_goes_alone_only_if_nobody_is_there_after_it_has_asked() -> None:
    alone = Facts(is_due=True, is_alone=True)
    assert after(alone)[1:] == [ALONE]
    assert after(alone, replace(alone, is_alone=False))[1:] == [ACCUMULATE]
    assert after(alone, batch=Batch(0, 1.0, may_wait=True))[1:] == [ACCUMULATE]
    assert after(replace(alone, is_alone=False), alone)[1:] == [ALONE], "the others are gone"


def test_a_peer_that_may_be_cut_off_begins_no_branch_for_a_round_s_time() -> None:
    machine, alone = RunMachine(CONFIG), Facts(is_due=True, is_alone=True)
    assert outcome_of(machine, BATCH, 100.0, alone, is_cut_off=True) == [ASK_AND_CHECK, ACCUMULATE]
    assert outcome_of(machine, BATCH, 159.0, alone, is_cut_off=True) == [ASK_AND_CHECK, ACCUMULATE]
    assert outcome_of(machine, BATCH, 160.0, alone, is_cut_off=True) == [ASK, ALONE]


def test_a_step_that_is_made_while_the_peer_waits_ends_the_wait() -> None:
    machine, arriving = RunMachine(CONFIG), Facts(is_near=True, arrives_s=0.5)
    machine.on(BATCH, 100.0, arriving)
    machine.on(Stepped([MATE]), 100.1, arriving)
    assert machine.on(Done(), 100.2, arriving) == [ACCUMULATE]


FIRST = [
    (Facts(has_better_branch=True), Decide(Decision.LOAD_STATE)),
    (Facts(lacks_state="no"), Decide(Decision.ACCUMULATE, reason="no")),
    (Facts(differs=True), Decide(Decision.RELOAD)),
]


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(range(len(FIRST)), 2)))
def test_of_two_reasons_not_to_step_the_first_one_decides(one: int, other: int) -> None:
    fields = {**changed(FIRST[one][0]), **changed(FIRST[other][0])}
    assert after(Facts(is_due=True, can_meet=True, **fields))[-1] == FIRST[one][1]  # type: ignore[arg-type]


def changed(facts: Facts) -> dict[str, object]:
    named = ((one.name, getattr(facts, one.name)) for one in fields(facts) if one.init)
    return {name: value for name, value in named if value != getattr(Facts(), name)}


def test_no_wait_is_longer_than_half_of_the_matchmaking_time_and_a_second() -> None:
    half_s, slow = CONFIG.matchmaking_time_s / 2, Batch(8, 20.0, may_wait=True)
    arriving = Facts(is_near=True, arrives_s=half_s)
    assert after(arriving, batch=slow)[1] == WaitUntilDue(half_s + MOMENT_S)
    assert after(replace(arriving, arrives_s=half_s + 0.1), batch=slow) == [Tell(), ACCUMULATE]
    machine, due = RunMachine(CONFIG), Facts(is_due=True, can_meet=True, busy_s=100.0)
    assert outcome_of(machine, BATCH, 100.0, due) == [ACCUMULATE]
    assert outcome_of(machine, BATCH, 100.0 + half_s - 1.3, due) == [ACCUMULATE]
    assert outcome_of(machine, BATCH, 100.0 + half_s - 1.2, due) == [AVERAGE]


def test_a_peer_waits_for_batches_of_others_from_when_the_step_was_due() -> None:
    """Else peers that compute one batch after the other wait for each other for ever."""
    machine, due = RunMachine(CONFIG), Facts(is_due=True, can_meet=True, busy_s=1.5)
    assert outcome_of(machine, BATCH, 100.0, due) == [ACCUMULATE]
    assert outcome_of(machine, BATCH, 101.0, due) == [AVERAGE]


def test_a_group_waits_for_no_newcomers() -> None:
    assert after(Facts(is_due=True, can_meet=True, has_newcomers=True)) == [AVERAGE]


def test_a_peer_that_can_be_met_after_another_read_is_met() -> None:
    alone = Facts(is_due=True, is_alone=True)
    assert after(alone, replace(alone, can_meet=True))[1:] == [ACCUMULATE]


def test_a_peer_that_has_made_steps_does_not_ask_whether_its_link_is_up() -> None:
    machine, alone = RunMachine(CONFIG), Facts(is_due=True, is_alone=True)
    machine.on(Stepped([MATE]), 90.0, alone)
    assert outcome_of(machine, BATCH, 100.0, alone) == [ASK, ALONE]


def test_a_peer_without_samples_tells_nothing_and_one_that_sees_no_end_reports_each_batch() -> None:
    assert after(Facts(is_near=True), batch=Batch(0, 1.0, may_wait=True)) == [ACCUMULATE]
    machine = RunMachine(CONFIG)
    outcome_of(machine, BATCH, 100.0, Facts(eta_s=math.inf))
    assert machine.lull_until == -math.inf


# newcomers


def test_a_lone_peer_waits_a_limited_time_for_a_peer_that_loads_its_state() -> None:
    machine, alone = RunMachine(CONFIG), Facts(is_due=True, is_alone=True, has_newcomers=True)
    assert outcome_of(machine, BATCH, 100.0, alone)[1:] == [ACCUMULATE]
    assert outcome_of(machine, BATCH, 159.0, alone)[1:] == [ACCUMULATE]
    assert outcome_of(machine, BATCH, 160.0, alone) == [ASK, ALONE]


STEP_S = 10.0


def waits(machine: RunMachine, number: int, members: Collection[PeerId], *, has_newcomers: bool = True) -> bool:
    """A lone peer makes a step, the last one of a number; returns whether it waits for newcomers before."""
    now, here = number * STEP_S, Position(number, b"run")
    facts = Facts(here, is_due=True, is_alone=True, has_newcomers=has_newcomers)
    has_waited = outcome_of(machine, BATCH, now, facts)[-1] == ACCUMULATE
    machine.on(Stepped(members), now, facts)
    return has_waited


def test_newcomers_that_never_come_to_a_round_are_waited_for_once_and_then_rarely() -> None:
    machine = RunMachine(CONFIG)
    times = [number * STEP_S for number in range(400) if waits(machine, number, [])]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps
    assert all(IDLE_S <= gap <= IDLE_S + STEP_S for gap in gaps)


def test_after_newcomers_that_came_to_the_round_the_next_ones_are_waited_for_too() -> None:
    machine = RunMachine(CONFIG)
    assert all(waits(machine, number, [MATE]) for number in range(100))


def test_steps_without_newcomers_do_not_count_as_waiting() -> None:
    machine = RunMachine(CONFIG)
    assert not any(waits(machine, number, [], has_newcomers=False) for number in range(100))
    assert waits(machine, 100, [])


# all states


def situations() -> Iterator[Facts]:
    """All that a peer can know, as far as a decision can depend on it."""
    flags = (False, True)
    yield from (Facts(has_better_branch=True), Facts(lacks_state="no"), Facts(differs=True))
    for old, arriving, due, meet, alone in itertools.product(flags, repeat=5):
        arrives_s = 0.5 if arriving else math.inf
        for loading, busy_s in itertools.product(flags, (0.5, 9.0)):
            yield Facts(
                is_worth_a_look=old, is_near=arriving, arrives_s=arrives_s, is_due=due, can_meet=meet, is_alone=alone,
                has_newcomers=loading, busy_s=busy_s,
            )  # fmt: skip


def key_of(machine: RunMachine, now: float) -> object:
    """All that it holds; of times, what is compared."""

    def key(value: object) -> object:
        if isinstance(value, float):
            waited = now - value
            return waited >= 0.0, waited >= 8.0, waited >= 60.0, waited == math.inf
        return value

    return tuple(key(value) for name, value in vars(machine).items() if name != "lull_until")


@pytest.mark.parametrize("every", few_of([7, 1], 1, pytest.mark.long))
def test_in_every_state_a_batch_ends_in_one_decision_and_the_promises_hold(every: int) -> None:
    """All that a peer can know, in each state that can come about, while it changes from event to event.

    A seventh of what it can know leads to most of these states.
    """
    known = list(situations())[::every]
    batches = [Batch(samples, 1.0, may_wait=may) for samples in (0, 8) for may in (False, True)]
    seen: set[object] = set()
    todo = [(RunMachine(CONFIG), 100.0, 0, Batch(0, 0.0, may_wait=False))]
    num_events = 0
    while todo:
        machine, now, num_actions, last_batch = todo.pop()
        events: list[Event] = [*batches, Stepped([MATE]), Stepped([])]
        if machine.stage is not Stage.COMPUTING:
            events = [Done(), Done(is_cut_off=True), Stepped([MATE])]
        for event, facts in itertools.product(events, known):
            one, batch = copy.copy(machine), event if isinstance(event, Batch) else last_batch
            stage, actions = machine.stage, one.on(event, now, facts)
            num_events += 1
            if isinstance(event, Stepped):
                assert actions == []
            else:
                *at_once, last = actions
                assert not any(isinstance(action, (*LASTING, Decide)) for action in at_once)
                check_promises(one, event, facts, last, stage, batch, num_actions)
            for later in (now, now + 20.0, now + 61.0):
                key = key_of(one, later)
                if key not in seen:
                    seen.add(key)
                    todo.append((one, later, num_actions + 1 if one.stage is not Stage.COMPUTING else 0, batch))
    assert len(seen) > 100
    assert num_events > 10_000


def check_promises(
    machine: RunMachine, event: Event, facts: Facts, last: Action, stage: Stage, batch: Batch, num_actions: int
) -> None:
    assert num_actions <= MOST_ACTIONS, "a batch ends in a decision"
    if isinstance(last, LASTING):
        assert machine.stage is not Stage.COMPUTING
        if isinstance(last, WaitUntilDue):
            assert last.timeout_s <= CONFIG.matchmaking_time_s / 2 + MOMENT_S
        return
    assert machine.stage is Stage.COMPUTING
    if last == AVERAGE:
        assert facts.is_due
        assert facts.can_meet
    if last == ALONE:
        assert batch.samples
        assert facts.is_alone
        assert event == Done()
        assert stage is Stage.ASKING, "it has read the records, and asked"
    if last == Decide(Decision.LOAD_STATE):
        assert facts.has_better_branch
    if isinstance(event, Batch) and facts.has_better_branch:
        assert last == Decide(Decision.LOAD_STATE)
