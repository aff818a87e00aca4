"""The protocol of a round, explored: members, coordinators and messages as values, in thousands of random orders."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from manyhands.averaging.commit.votes import STAGES, HeldResult, VoteCount, Voter, coordinators, held_of
from manyhands.averaging.messages import Accusation, Group, Order, RoundManifest, SpanResult, Verdict, Vote
from tests.sweeps import few_of
from tests.unit.averaging.groups import group_of

NUMEL = 100
SEEDS_OF_ONE_TEST = 1000


@dataclass
class Node:
    """One member, and the counts that it keeps.

    Attributes:
        is_alive: False once it is dead: it never acts again.
        is_cut: nothing comes from it and nothing reaches it, while it goes on.
        is_averaging: it has not said yet what came of the ballot that it is in.
        knows: the verdict that it has heard or made.
    """

    voter: Voter
    is_alive: bool = True
    is_cut: bool = False
    is_averaging: bool = True
    has_given_up: bool = False
    counts: dict[int, VoteCount] = field(default_factory=dict)
    knows: Verdict | None = None


class Swarm:
    """Members that take one step at a time, and messages that arrive in any order, or never."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        num_members = rng.choice([2, 3, 3, 4, 4, 5, 5, 7])
        clients = [rank for rank in range(1, num_members) if rng.random() < 0.2]
        self.group = group_of(num_members, clients=clients)
        self.ranks = coordinators(self.group)
        self.nodes = [Node(Voter(self.group, rank, NUMEL)) for rank in range(num_members)]
        self.nodes[self.ranks[0]].counts[0] = VoteCount(self.group)
        self.votes: list[tuple[int, Vote]] = []
        self.answers: list[tuple[int, int, int, Verdict]] = []
        self.committed: dict[bytes, RoundManifest] = {}
        self.num_deaths = 0
        self.max_deaths = rng.choice([0, 0, 1, 1, 2])
        self.loss = rng.choice([0.0, 0.0, 0.05, 0.3])
        self.cuts = rng.choice([0.0, 0.02, 0.05, 0.1])
        self.silence = rng.choice([0.0, 0.9])  # of a coordinator that has just committed: the worst moment
        self.flaw = rng.choice([0.0, 0.0, 0.2, 0.5])
        self.suspicion = rng.choice([0.0, 0.0, 0.02, 0.2])
        self.spoilt = rng.choice([0.0, 0.0, 0.0, 0.1])

    def run(self) -> None:
        """Take steps until nothing can happen any more."""
        for _ in range(600):
            step = self.rng.choice([self.average, self.deliver_vote, self.deliver_vote, self.answer, self.disturb])
            step()
        leader = self.ranks[0]
        for rank, node in enumerate(self.nodes):
            node.is_cut &= rank == leader and self.rng.random() < 0.5
        self.loss = 0.0
        for _ in range(3000):  # the faults are over; all that is under way arrives
            if not any([self.average(), self.deliver_vote(), self.answer(), self.notice(), self.ask()]):
                return
        raise AssertionError("it never ends")

    # what members do

    def average(self) -> bool:
        """A member comes to the end of the averaging that it is in, and votes."""
        node = self.some(lambda node: node.is_averaging)
        if node is None:
            return False
        node.is_averaging = False
        voter = node.voter
        others = [rank for rank in range(len(self.nodes)) if rank != voter.rank]
        if self.rng.random() < self.flaw:
            start = self.rng.randrange(NUMEL)
            accused = [Accusation(self.rng.choice(others), "lost", self.rng.random() < 0.3)]
            voter.averaged(None, (start, NUMEL), "lost somebody", accused)
        else:
            spoilt = b"!" if self.rng.random() < self.spoilt else b""
            parts = [SpanResult(0, NUMEL, 0, [1])] if voter.ballot else []
            voter.averaged(HeldResult(b"means of %d" % voter.ballot + spoilt, parts), (0, 0))
        self.vote(node)
        return True

    def vote(self, node: Node) -> None:
        voter = node.voter
        self.send(self.votes, (voter.rank, over_the_wire(voter.vote())))

    def send(self, queue: list, message: object) -> None:
        """It arrives, perhaps twice."""
        queue.append(message)
        if self.rng.random() < 0.05:
            queue.append(message)

    def deliver_vote(self) -> bool:
        if not self.votes:
            return False
        rank, vote = self.votes.pop(self.rng.randrange(len(self.votes)))
        term = vote.ballot // STAGES
        node = self.nodes[self.ranks[term]]
        if self.rng.random() < self.loss or not node.is_alive or self.is_between(rank, node.voter.rank):
            return True
        if node.knows is not None:
            self.answers.append((node.voter.rank, rank, term, node.knows))
            return True
        count = node.counts.setdefault(term, VoteCount(self.group, term))
        if count.order is not None and vote.ballot < count.order.ballot and rank in count.order.members:
            self.answers.append((node.voter.rank, rank, term, Verdict(False, order=count.order)))
        count.add(rank, vote)
        self.decide(node, count)
        return True

    def decide(self, node: Node, count: VoteCount) -> None:
        before = set(count.votes)
        decision = count.decide()
        if isinstance(decision, Verdict):
            self.learn(node, decision)
            if decision.manifest is not None and self.rng.random() < self.silence:
                node.is_cut, node.is_alive = True, self.rng.random() < 0.5
                return
            self.answers += [(node.voter.rank, rank, count.term, decision) for rank in range(len(self.nodes))]
        elif isinstance(decision, Order):
            told = before | set(decision.members)
            answer = Verdict(False, order=decision)
            self.answers += [(node.voter.rank, rank, count.term, answer) for rank in told]

    def answer(self) -> bool:
        """A member hears from the coordinator of its term."""
        if not self.answers:
            return False
        sender, rank, term, verdict = self.answers.pop(self.rng.randrange(len(self.answers)))
        node = self.nodes[rank]
        if not node.is_alive or self.rng.random() < self.loss or self.is_between(rank, sender):
            return True
        if verdict.is_known:
            self.learn(node, verdict)
        elif term == node.voter.term and not node.is_averaging and node.knows is None:
            if verdict.order is None:
                self.step_up(node)
            elif node.voter.follow(over_the_wire(verdict.order)):
                if verdict.order.adopted is None:
                    node.is_averaging = True
                else:
                    self.vote(node)
        return True

    def step_up(self, node: Node) -> None:
        if node.voter.next_coordinator() is None:
            node.has_given_up = True
        else:
            self.vote(node)

    def learn(self, node: Node, verdict: Verdict) -> None:
        if not verdict.is_known or node.knows is not None:
            return
        node.knows = verdict
        if verdict.manifest is not None:
            self.committed[verdict.manifest.fingerprint()] = verdict.manifest

    # faults

    def is_between(self, one: int, other: int) -> bool:
        """Whether what one sends does not reach the other."""
        return one != other and (self.nodes[one].is_cut or self.nodes[other].is_cut)

    def disturb(self) -> None:
        """Somebody dies, is cut off or comes back, or is believed to be dead."""
        if self.rng.random() < self.cuts:
            leader = self.nodes[self.ranks[0]]
            node = leader if self.rng.random() < 0.5 else self.rng.choice(self.nodes)
            node.is_cut = not node.is_cut
        if self.num_deaths < self.max_deaths and self.rng.random() < 0.02:
            node = self.some(lambda node: True)
            if node is not None:
                node.is_alive = False
                self.num_deaths += 1
                self.answers = [each for each in self.answers if each[0] != node.voter.rank or self.rng.random() < 0.5]
        if self.rng.random() < self.suspicion:
            node = self.some(lambda node: node.knows is None and not node.is_averaging and not node.has_given_up)
            if node is not None:
                self.step_up(node)
            counting = self.some(lambda node: bool(node.counts))
            if counting is not None:
                count = self.rng.choice(list(counting.counts.values()))
                count.lose(self.rng.randrange(len(self.nodes)), "it seems to be lost")
                self.decide(counting, count)

    def notice(self) -> bool:
        """Those who live find out who does not; who waits for a dead coordinator goes to the next one."""
        has_moved = False
        for node in self.nodes:
            for count in [] if not node.is_alive else list(node.counts.values()):
                for rank, other in enumerate(self.nodes):
                    is_gone = not other.is_alive or other.has_given_up or other.voter.term > count.term
                    is_gone |= self.is_between(rank, node.voter.rank)
                    if is_gone and rank not in count.lost and count.verdict is None:
                        count.lose(rank, "dead")
                        has_moved = True
                self.decide(node, count) if count.verdict is None else None
            is_waiting = node.is_alive and node.knows is None and not node.is_averaging and not node.has_given_up
            if is_waiting and not self.votes and not self.answers:
                coordinator = self.nodes[self.ranks[node.voter.term]]
                is_gone = not coordinator.is_alive or coordinator.has_given_up
                if is_gone or self.is_between(node.voter.rank, coordinator.voter.rank) or self.rng.random() < 0.02:
                    self.step_up(node)
                else:
                    self.vote(node)  # again: it was lost, or is still counted
                has_moved = True
        return has_moved

    def ask(self) -> bool:
        """Who does not know asks who does."""
        for node in self.nodes:
            others = [other for other in self.nodes if not self.is_between(node.voter.rank, other.voter.rank)]
            known = [other.knows for other in others if other.is_alive and other.knows is not None]
            if node.is_alive and node.knows is None and known:
                self.learn(node, self.rng.choice(known))
                return True
        return False

    def some(self, fits: object) -> Node | None:
        nodes = [node for node in self.nodes if node.is_alive and fits(node)]  # type: ignore[operator]
        return self.rng.choice(nodes) if nodes else None


def over_the_wire(message: msgspec.Struct) -> msgspec.Struct:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


@pytest.mark.parametrize("first", few_of(range(0, 6 * SEEDS_OF_ONE_TEST, SEEDS_OF_ONE_TEST)))
def test_no_two_members_ever_commit_different_results(first: int) -> None:
    num_committed = 0
    for seed in range(first, first + SEEDS_OF_ONE_TEST):
        swarm = Swarm(seed)
        swarm.run()
        assert len(swarm.committed) <= 1, f"seed {seed}: {list(swarm.committed.values())}"
        num_committed += bool(swarm.committed)
    assert num_committed > SEEDS_OF_ONE_TEST // 4, "else nothing was explored"


def test_without_faults_all_commit() -> None:
    for seed in range(200):
        swarm = Swarm(seed)
        swarm.max_deaths = 0
        swarm.loss = swarm.silence = swarm.cuts = swarm.flaw = swarm.suspicion = swarm.spoilt = 0.0
        swarm.run()
        for node in swarm.nodes:
            assert node.knows is not None
            assert node.knows.manifest is not None
            assert node.voter.result == held_of(node.knows.manifest)


def test_members_of_one_group_have_coordinators_in_one_order() -> None:
    group: Group = group_of(5, clients=[1])
    assert coordinators(group) == [0, 2, 3, 4]
