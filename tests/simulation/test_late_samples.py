"""Samples of a peer that a step was made without count in the next one, if they surely were not counted: never twice.

Each micro-batch has a parameter of its own, which only it changes; so the parameters say which batches have counted,
and in which step.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from manyhands.averaging.allreduce.butterfly import Butterfly
from manyhands.averaging.matchmaking.matchmaker import Matchmaker
from manyhands.averaging.messages import Position, Vote
from manyhands.averaging.round.exchange import Contribution
from manyhands.averaging.round.round_machine import Round
from manyhands.averaging.rounds import CommittedRound
from manyhands.optim.step.global_step import Statistics
from manyhands.testing import Fault, at, between
from tests.phases import Average, around_averages, change_first_vote
from tests.simulation.swarm_of_trainers import Member, Swarm, together
from tests.sweeps import few_of

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("p0", "p1", "p2", "p3")
MAX_BATCHES = 1000
BATCH_SIZE = 4
TARGET = 256
"""Four peers take 8 s for it."""


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("manyhands").setLevel(logging.ERROR)


def new_model() -> torch.nn.Module:
    return torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(len(NAMES) * MAX_BATCHES))])


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


@dataclass
class Marked:
    """A swarm in which each batch leaves its mark.

    Attributes:
        made: to each position that somebody was at the one before it, and the parameters there.
        num_batches: that each peer has computed.
        last_step: of each peer.
        missed_several: the peers that have missed more than one step at a time.
        after_batch: called after each batch of a peer.
    """

    swarm: Swarm
    made: dict[Position, tuple[Position | None, torch.Tensor]] = field(default_factory=dict)
    num_batches: dict[str, int] = field(default_factory=dict)
    last_step: dict[str, int] = field(default_factory=dict)
    missed_several: set[str] = field(default_factory=set)
    after_batch: Callable[[Member], None] = lambda member: None

    def train_until(self, member: Member, until_s: float) -> None:
        first, number = NAMES.index(member.name) * MAX_BATCHES, 0
        (parameter,) = member.model.parameters()
        self._note(member)
        while member.peer.time() < until_s:
            member.peer.sleep(0.5)
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[first + number] = 1.0
            number += 1
            self.num_batches[member.name] = number
            member.optimizer.step()
            member.optimizer.zero_grad()
            member.check_samples()
            self._note(member)
            self.after_batch(member)
        member.optimizer.settle()
        self._note(member)

    def _note(self, member: Member) -> None:
        replica = member.optimizer.replica
        if not member.optimizer.is_stepping:
            parent = replica.origin.parent if replica.origin is not None else None
            self.made.setdefault(replica.position, (parent, replica.flat_parameters()))
            step = replica.position.step
            if step > self.last_step.get(member.name, 0) + 1:
                self.missed_several.add(member.name)
            self.last_step[member.name] = step

    def _marks_of(self, position: Position, parent: Position) -> torch.Tensor:
        return (self.made[position][1] != self.made[parent][1]).nonzero().flatten()

    def marks(self) -> tuple[Position, list[torch.Tensor]]:
        """The batches that have counted in each step of the longest lineage."""
        end = position = max(self.made, key=lambda one: one.step)
        steps = []
        while (parent := self.made[position][0]) is not None:
            steps.append(self._marks_of(position, parent))
            position = parent
        assert position.step == 0, "the lineage is known from its begin"
        return end, steps

    def marks_of_all_branches(self) -> torch.Tensor:
        """The batches that have counted in a step of any branch."""
        steps = [self._marks_of(position, parent) for position, (parent, _) in self.made.items() if parent is not None]
        return torch.cat(steps).unique()

    def check(self) -> dict[str, Statistics]:
        """No batch has counted in two steps; what peers say of theirs is true, or else that it is not known.

        A peer counts its samples in a step of a branch that it has left later as used.
        """
        end, steps = self.marks()
        everything = torch.cat(steps)
        assert len(everything) == len(everything.unique()), "a batch has counted twice"
        counts = {name: member.optimizer.statistics for name, member in self.swarm.members.items()}
        in_steps = self.marks_of_all_branches()
        for name, one in counts.items():
            num_samples = num_of(name, in_steps) * BATCH_SIZE
            if self.swarm.members[name].optimizer.replica.position == end:
                assert one.samples_used <= num_samples <= one.samples_used + one.samples_dropped, (name, one)
        return counts


def num_of(name: str, marks: torch.Tensor) -> int:
    """How many of the batches are a peer's."""
    return int((marks // MAX_BATCHES == NAMES.index(name)).sum())


def start(marked: Marked, until_s: float, **options: Any) -> None:
    def train(member: Member) -> None:
        together(len(NAMES), member)
        marked.train_until(member, until_s)

    for name in NAMES:
        marked.swarm.start(
            name, new_model, sgd, train, **{"target_batch_size": TARGET, "batch_size_per_step": BATCH_SIZE, **options}
        )


PHASES: dict[str, tuple[type, str]] = {
    "looking for a group": (Matchmaker, "find_group"),
    "averaging": (Butterfly, "run"),
    "voting": (Round, "_exchanged"),
}
FROZEN_S = 14.0


def freeze_with_waiting(marked: Marked, num_batches: int) -> None:
    """Freeze p3 over one step, as soon as it has computed so many batches for the third one."""
    world = marked.swarm.world
    is_frozen: list[bool] = []

    def freeze(member: Member) -> None:
        is_due = member.optimizer.global_step == 2 and member.optimizer.samples_accumulated == num_batches * BATCH_SIZE
        if member.name == "p3" and is_due and not is_frozen:
            is_frozen.append(True)
            world.loop.call_soon(world.freeze, "p3")
            world.loop.call_outside(world.loop.time() + FROZEN_S, world.thaw, "p3")

    marked.after_batch = freeze


@pytest.mark.parametrize("num_batches", few_of([14, 1, 5, 10]))
def test_a_peer_that_froze_over_one_step_drops_no_samples(num_batches: int) -> None:
    """It was in no group, or in one that left it out: the samples that it had count in the next step."""
    swarm = Swarm(seed=41)
    marked = Marked(swarm)
    start(marked, 80.0)
    freeze_with_waiting(marked, num_batches)
    swarm.run()
    counts = marked.check()
    assert sum(one.samples_dropped for one in counts.values()) == 0
    assert counts["p3"].states_loaded == 1
    assert counts["p3"].samples_carried >= num_batches * BATCH_SIZE
    assert counts["p3"].samples_used >= 8 * BATCH_SIZE


def lack_means_of_the_third_round(**options: Any) -> Marked:
    """A run in which p3 lacks the means of its third round, with these options of the optimizers."""
    marked = Marked(Swarm(seed=44))
    rounds: list[Vote] = []

    def lose_the_third(contribution: Contribution, vote: Vote) -> None:
        rounds.append(vote)
        if len(rounds) == 3:
            contribution.means = contribution.manifest = None

    async def as_if_one_was_lost(average: Average, *arguments: Any, **options: Any) -> CommittedRound:
        return replace(await average(*arguments, **options), may_be_lacking=True)

    for name in NAMES:
        peer_id = marked.swarm.world.identity(name).peer_id
        if name == "p3":
            change_first_vote(peer_id, lose_the_third)
        else:
            around_averages(peer_id, as_if_one_was_lost)
    start(marked, 60.0, **options)
    marked.swarm.run()
    return marked


def test_a_member_that_lacks_the_means_of_its_round_makes_the_step_from_what_others_keep_and_drops_nothing() -> None:
    marked = lack_means_of_the_third_round()
    counts = marked.check()
    assert (counts["p3"].rounds_aborted, counts["p3"].states_loaded) == (0, 0)
    assert sum(one.samples_dropped for one in counts.values()) == 0
    assert num_of("p3", torch.cat(marked.marks()[1])) * BATCH_SIZE == counts["p3"].samples_used


@pytest.mark.long
def test_the_half_of_a_split_run_that_loses_still_counts_the_samples_of_its_lost_steps_as_used() -> None:
    swarm = Swarm(seed=43)
    marked = Marked(swarm)
    start(marked, 120.0)
    swarm.world.schedule(between(20.0, 60.0).partition({"p0", "p1"}, {"p2", "p3"}))
    swarm.run()
    counts = marked.check()
    in_lineage = torch.cat(marked.marks()[1])
    lost = {name: one.samples_used - num_of(name, in_lineage) * BATCH_SIZE for name, one in counts.items()}
    losers = {name for name, one in counts.items() if one.states_loaded}
    assert losers in ({"p0", "p1"}, {"p2", "p3"})
    for name in NAMES:
        assert (lost[name] > 0) == (name in losers), lost


@pytest.mark.parametrize("from_s", few_of([16.0, 20.0, 22.0]))
def test_with_a_delay_those_that_wait_together_are_dropped_once(from_s: float) -> None:
    """Some of them, computed while the last step was made in the background, would be two steps late."""
    swarm = Swarm(seed=41)
    marked = Marked(swarm)
    start(marked, 80.0, delay="gradients")
    swarm.world.schedule(between(from_s, from_s + FROZEN_S).freeze("p3"))
    swarm.run()
    counts = marked.check()
    dropped = {name: one.samples_dropped for name, one in counts.items() if one.samples_dropped}
    assert dropped.keys() <= {"p3"}
    assert sum(dropped.values()) <= TARGET // len(NAMES), "a step's share of this peer"
    assert counts["p3"].states_loaded == 1


@pytest.mark.parametrize("rank", few_of([0, 3], 1, pytest.mark.long), ids=["leader", "follower"])
@pytest.mark.parametrize("phase", few_of(PHASES))
def test_a_peer_that_froze_in_a_phase_of_a_step_drops_only_samples_in_doubt(
    phase: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the others made of what it had sent, and whether or not it has heard of that."""
    swarm = Swarm(seed=42)
    marked = Marked(swarm)
    victim = sorted(NAMES, key=lambda name: swarm.world.identity(name).peer_id)[rank]
    owner, method = PHASES[phase]
    original: Callable[..., Any] = getattr(owner, method)
    is_frozen: list[bool] = []

    def freezing(self: Any, *args: Any, **kwargs: Any) -> Any:
        member = swarm.members.get(victim)
        if not is_frozen and member is not None and member.optimizer.global_step == 2 and swarm.is_running(victim):
            is_frozen.append(True)
            loop = swarm.world.loop
            loop.call_soon(swarm.world.freeze, victim)
            loop.call_outside(loop.time() + FROZEN_S, swarm.world.thaw, victim)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, freezing)
    start(marked, 100.0)
    swarm.run()
    assert is_frozen
    counts = marked.check()
    for name, one in counts.items():
        is_in_doubt = name == victim and phase != "looking for a group"  # what it had sent may have counted
        assert one.samples_dropped == 0 or is_in_doubt, (name, one)
    assert counts[victim].rounds_committed >= 5


def chance(seed: int) -> list[Fault]:
    """Freezes, cuts and resets, as long as a step or two."""
    rng = random.Random(f"late {seed}")
    faults: list[Fault] = []
    for _ in range(6):
        start_s = rng.uniform(12.0, 100.0)
        during = between(start_s, start_s + rng.uniform(2.0, 20.0))
        name = rng.choice(NAMES)
        kind = rng.randrange(4)
        if kind == 0:
            faults.append(during.freeze(name))
        elif kind == 1:
            faults.append(during.partition({name}, set(NAMES) - {name}))
        elif kind == 2:
            faults.append(during.partition({name}, {rng.choice([other for other in NAMES if other != name])}))
        else:
            faults.append(at(start_s).reset(*rng.sample(NAMES, 2)))
    return faults


@pytest.mark.long
@pytest.mark.parametrize(
    "delay", [pytest.param(None, marks=pytest.mark.long), "gradients"], ids=["synchronous", "delayed"]
)
@pytest.mark.parametrize("seed", few_of(range(12)))
def test_after_any_faults_no_batch_has_counted_twice(seed: int, delay: str | None) -> None:
    swarm = Swarm(seed=seed)
    marked = Marked(swarm)
    start(marked, 160.0, delay=delay)
    swarm.world.schedule(*chance(seed))
    swarm.run()
    counts = marked.check()
    if delay is None:  # else most of them would be two steps late
        assert all(one.samples_carried or one.samples_dropped for one in counts.values() if one.states_loaded)
        in_doubt = sum(one.samples_dropped for name, one in counts.items() if name not in marked.missed_several)
        assert in_doubt <= 0.05 * sum(one.samples_computed for one in counts.values())
