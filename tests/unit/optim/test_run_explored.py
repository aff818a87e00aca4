"""The run among a few peers as values: all orders of batches, reads, rounds, deaths and restarts.

Rounds are ideal: all peers at one position that wait for a round, and see each other, make it. Records are as old as
their last read. No connection is cut, so there is only ever one branch.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import Position
from manyhands.base.identity import PeerId
from manyhands.optim.run.progress import View
from manyhands.optim.run.run_machine import (
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
    Stepped,
    Tell,
    WaitUntilDue,
)
from tests.sweeps import few_of

TARGET = 2  # batches
START = Position(0, b"")
NOBODY = View({}, START)
CONFIG = AveragingConfig()
LAST_STEP = 2
LIVELY_EVENTS = 60
"""After so many events without further faults all peers have made another step together."""


@dataclass(frozen=True)
class Record:
    position: Position
    samples: int


def order_of(position: Position) -> tuple[int, bytes]:
    return position.step, position.lineage


@dataclass
class Peer:
    """One peer, and what it knows."""

    machine: RunMachine = field(default_factory=lambda: RunMachine(CONFIG))
    position: Position = START
    samples: int = 0
    view: dict[int, Record] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    met: set[int] = field(default_factory=set)
    called: bool = False
    doing: Action | None = None  # what its machine waits for
    averages: bool = False
    is_alive: bool = True

    def copied(self) -> Peer:
        other = copy.copy(self)
        other.machine = copy.copy(self.machine)
        other.view, other.missing, other.met = dict(self.view), set(self.missing), set(self.met)
        return other

    def key(self) -> object:
        return (
            self.is_alive, self.position, self.samples, tuple(sorted(self.view.items())), frozenset(self.missing),
            frozenset(self.met), self.called, self.averages, type(self.doing), self.machine.stage,
        )  # fmt: skip

    def mates(self) -> set[int]:
        return {other for other, record in self.view.items() if record.position == self.position}

    @property
    def best(self) -> Position:
        able = [record.position for other, record in self.view.items() if other not in self.missing]
        return max([self.position, *able], key=order_of)

    @property
    def has_better_branch(self) -> bool:
        return self.best != self.position

    @property
    def is_due(self) -> bool:
        return self.called or self.samples + sum(self.view[other].samples for other in self.mates()) >= TARGET

    @property
    def can_meet(self) -> bool:
        return self.called or bool(self.mates() - self.missing)

    @property
    def is_alone(self) -> bool:
        return not self.mates() and not self.has_better_branch

    def situation(self) -> Situation:
        return Situation(
            self.position, NOBODY, 0, (), is_worth_a_look=False, has_better_branch=self.has_better_branch,
            lacks_state="", differs=False, is_near=False, is_due=self.is_due, eta_s=math.inf,
            can_meet=self.can_meet, is_alone=self.is_alone, has_newcomers=False,
        )  # fmt: skip


@dataclass
class Run:
    peers: list[Peer]
    records: dict[int, Record]  # that have not expired
    num_deaths: int = 0
    num_restarts: int = 0

    @classmethod
    def of(cls, num_peers: int, num_deaths: int, num_restarts: int) -> Run:
        peers = [Peer() for _ in range(num_peers)]
        return cls(
            peers, {number: Record(peer.position, 0) for number, peer in enumerate(peers)}, num_deaths, num_restarts
        )

    def copied(self) -> Run:
        return Run([peer.copied() for peer in self.peers], dict(self.records), self.num_deaths, self.num_restarts)

    def key(self) -> object:
        peers = tuple(peer.key() for peer in self.peers)
        return peers, tuple(sorted(self.records)), self.num_deaths, self.num_restarts

    # events

    def events(self) -> Iterator[tuple[str, int]]:
        for number, peer in enumerate(self.peers):
            if not peer.is_alive:
                if number in self.records:
                    yield "expires", number
                if self.num_restarts:
                    yield "restarts", number
                continue
            if peer.averages:
                if event := self.round_of(number):
                    yield event, number
            elif peer.doing is not None:
                yield "is done", number
            else:
                yield "computes", number
                if peer.view != self.seen_by(number):
                    yield "reads", number
            if self.num_deaths:
                yield "dies", number

    def seen_by(self, number: int) -> dict[int, Record]:
        return {other: record for other, record in self.records.items() if other != number}

    def group_of(self, number: int) -> list[int]:
        """The peers that wait for a round where this one is."""
        here = self.peers[number].position
        return [one for one, peer in enumerate(self.peers) if peer.is_alive and peer.averages and peer.position == here]

    def round_of(self, number: int) -> str:
        """What the round of a peer that waits for one can do now; empty if that is to wait on."""
        group, here = self.group_of(number), self.peers[number].position
        is_first = number == group[0]
        coming = [
            one for one, peer in enumerate(self.peers)
            if peer.is_alive and one not in group and peer.position == here
            and any(one in self.peers[mate].mates() for mate in group)
        ]  # fmt: skip
        if coming or not is_first:
            return ""
        return "averages" if len(group) > 1 else "is left"

    def happen(self, event: str, number: int) -> None:
        peer = self.peers[number]
        match event:
            case "computes":
                peer.samples = min(peer.samples + 1, TARGET)
                self.publish(number)
                self.on(number, Batch(peer.samples, 0.0, may_wait=False))
            case "reads":
                self.read(number)
            case "is done":
                doing, peer.doing = peer.doing, None
                if isinstance(doing, Look) or (isinstance(doing, AskOthers) and not peer.mates()):
                    self.read(number)
                if isinstance(doing, AskOthers):
                    self.ask_hidden(number)
                self.on(number, Done())
            case "averages":
                group = self.group_of(number)
                for one in group:
                    self.step(one, group)
            case "is left":  # it has waited for the dead, or for those that went on
                peer.averages = peer.called = False
                gone = {mate for mate in peer.mates() if not self.peers[mate].is_alive}
                self.read(number)
                peer.missing = gone
            case "dies":
                peer.is_alive, self.num_deaths = False, self.num_deaths - 1
            case "expires":
                del self.records[number]
            case "restarts":
                self.num_restarts -= 1
                self.peers[number] = Peer()
                self.publish(number)
                self.read(number)
                self.load(number)

    def on(self, number: int, event: Event) -> None:
        peer = self.peers[number]
        for action in peer.machine.on(event, 0.0, peer.situation()):
            match action:
                case Decide(Decision.LOAD_STATE):
                    self.load(number)
                case Decide(Decision.AVERAGE):
                    peer.averages = True
                    for mate in peer.mates():
                        other = self.peers[mate]
                        other.called = other.called or (other.is_alive and other.position == peer.position)
                case Decide(Decision.GO_ALONE):
                    self.step(number, [number])
                case Look() | AskOthers() | WaitUntilDue():
                    peer.doing = action
                case Decide() | Tell():
                    pass
                case _:
                    raise AssertionError(action)

    def publish(self, number: int) -> None:
        peer = self.peers[number]
        self.records[number] = Record(peer.position, peer.samples)

    def read(self, number: int) -> None:
        peer, seen = self.peers[number], self.seen_by(number)
        peer.missing = {other for other in peer.missing if seen.get(other) == peer.view.get(other)}
        peer.view = seen

    def ask_hidden(self, number: int) -> None:
        peer = self.peers[number]
        for other in peer.met - peer.view.keys():
            if self.peers[other].is_alive:
                peer.view[other] = Record(self.peers[other].position, self.peers[other].samples)

    def step(self, number: int, group: list[int]) -> None:
        peer = self.peers[number]
        peer.position = Position(peer.position.step + 1, peer.position.lineage + bytes(group))
        peer.samples, peer.called, peer.averages, peer.doing = 0, False, False, None
        peer.met |= set(group) - {number}
        peer.view |= {mate: Record(peer.position, 0) for mate in group if mate != number}
        self.publish(number)
        peer.machine.on(Stepped([PeerId(str(one)) for one in group]), 0.0, peer.situation())

    def load(self, number: int) -> None:
        """From a peer that is there; whoever is not has no state to send."""
        peer = self.peers[number]
        best = peer.best
        holders = [other for other, record in peer.view.items() if record.position == best]
        if any(self.peers[other].is_alive for other in holders):
            peer.position, peer.samples, peer.called = best, 0, False
            self.publish(number)
        elif best != peer.position:
            peer.missing |= set(holders)

    # promises

    def check(self) -> None:
        by_step: dict[int, set[bytes]] = {}
        for peer in self.peers:
            if peer.is_alive:
                by_step.setdefault(peer.position.step, set()).add(peer.position.lineage)
        assert all(len(lineages) == 1 for lineages in by_step.values()), f"the run has split: {by_step}"

    def check_goes_on(self) -> None:
        """Without further faults all peers that live make another step, together."""
        run = self.copied()
        run.num_deaths = run.num_restarts = 0
        first = max((peer.position.step for peer in run.peers if peer.is_alive), default=0)
        living = [peer for peer in run.peers if peer.is_alive]
        happened: dict[tuple[str, int], int] = {}
        for turn in range(LIVELY_EVENTS):
            if not (events := list(run.events())):
                break
            event = min(events, key=lambda one: happened.get(one, -1))  # each in its turn
            happened[event] = turn
            run.happen(*event)
            steps = {peer.position for peer in living}
            if len(steps) == 1 and living[0].position.step > first:
                return
        assert not living, f"it stands still: {run.key()}"


def explore(run: Run) -> int:
    """Check all states that can come about; returns their number."""
    seen, todo = {run.key()}, [run]
    while todo:
        one = todo.pop()
        one.check()
        one.check_goes_on()
        if max(peer.position.step for peer in one.peers) >= LAST_STEP:
            continue
        for event in one.events():
            following = one.copied()
            following.happen(*event)
            if (key := following.key()) not in seen:
                seen.add(key)
                todo.append(following)
    return len(seen)


@pytest.mark.parametrize(
    ("num_peers", "num_deaths", "num_restarts", "least"),
    few_of([(1, 1, 1, 10), (2, 0, 0, 50), (2, 1, 1, 500), (3, 0, 0, 1000)], 3, pytest.mark.long),
)
def test_peers_never_split_nor_stand_still(num_peers: int, num_deaths: int, num_restarts: int, least: int) -> None:
    assert explore(Run.of(num_peers, num_deaths, num_restarts)) >= least


@pytest.mark.sweep
@pytest.mark.parametrize(("num_peers", "num_deaths", "num_restarts"), [(2, 2, 2), (3, 1, 0)])
def test_with_more_faults_peers_never_split_nor_stand_still(num_peers: int, num_deaths: int, num_restarts: int) -> None:
    explore(Run.of(num_peers, num_deaths, num_restarts))


@pytest.mark.parametrize("seed", range(20))
def test_more_peers_never_split_nor_stand_still_in_random_orders(seed: int) -> None:
    rng = random.Random(seed)
    run = Run.of(4, 2, 2)
    for _ in range(200):
        run.happen(*rng.choice(list(run.events())))
        run.check()
        run.check_goes_on()
