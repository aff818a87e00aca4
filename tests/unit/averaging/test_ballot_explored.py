"""The protocol of a round, explored: members, a leader and messages as values, in thousands of random orders."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass

import msgspec
import pytest

from manyhands.averaging.commit.votes import VoteCount
from manyhands.averaging.messages import Accusation, Order, RoundManifest, SpanResult, Verdict, Vote
from tests.sweeps import few_of
from tests.unit.averaging.groups import group_of

NUMEL = 100
SEEDS_OF_ONE_TEST = 1000
LEADER = 0


@dataclass
class Node:
    """One member.

    Attributes:
        is_alive: False once it is dead: it never acts again.
        is_cut: nothing comes from it and nothing reaches it, while it goes on.
        vote: in the ballot that it is in; None while it averages.
        knows: the verdict that it has heard or made.
        has_aborted: it gave the round up in doubt, and tells nobody what it believes.
    """

    rank: int
    ballot: int = 0
    is_alive: bool = True
    is_cut: bool = False
    vote: Vote | None = None
    knows: Verdict | None = None
    has_aborted: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether it has voted, and does not know what follows."""
        return self.is_alive and self.vote is not None and self.knows is None and not self.has_aborted


class Swarm:
    """Members that take one step at a time, and messages that arrive in any order, or never."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        num_members = rng.choice([2, 3, 3, 4, 4, 5, 5, 7])
        clients = [rank for rank in range(1, num_members) if rng.random() < 0.2]
        self.group = group_of(num_members, clients=clients)
        self.nodes = [Node(rank) for rank in range(num_members)]
        self.count = VoteCount(self.group)
        self.votes: list[tuple[int, Vote]] = []
        self.answers: list[tuple[int, Verdict]] = []
        self.committed: dict[bytes, RoundManifest] = {}
        self.cast: defaultdict[tuple[int, bytes, bytes], set[int]] = defaultdict(set)  # who voted for what, by ballot
        self.num_deaths = 0
        self.max_deaths = rng.choice([0, 0, 1, 1, 2])
        self.loss = rng.choice([0.0, 0.0, 0.05, 0.3])
        self.cuts = rng.choice([0.0, 0.02, 0.05, 0.1])
        self.silence = rng.choice([0.0, 0.9])  # of a leader that has just committed: the worst moment
        self.flaw = rng.choice([0.0, 0.0, 0.2, 0.5])
        self.suspicion = rng.choice([0.0, 0.0, 0.02, 0.2])
        self.spoilt = rng.choice([0.0, 0.0, 0.0, 0.1])

    def run(self) -> None:
        """Take steps until nothing can happen any more."""
        for _ in range(600):
            step = self.rng.choice([self.average, self.deliver_vote, self.deliver_vote, self.answer, self.disturb])
            step()
        for node in self.nodes:
            node.is_cut &= node.rank == LEADER and self.rng.random() < 0.5
        self.loss = 0.0
        for _ in range(3000):  # the faults are over; all that is under way arrives
            if not any([self.average(), self.deliver_vote(), self.answer(), self.ask(), self.notice()]):
                break
        else:
            raise AssertionError("it never ends")
        for node in self.nodes:
            assert not node.is_alive or node.knows is not None or node.has_aborted, "it hangs"

    # what members do

    def average(self) -> bool:
        """A member comes to the end of the averaging that it is in, and votes."""
        averaging = [node for node in self.nodes if node.is_alive and node.vote is None and node.knows is None]
        if not averaging:
            return False
        node = self.rng.choice(averaging)
        vote = node.vote = Vote(self.group.group_id, b"", ballot=node.ballot, numel=NUMEL)
        others = [rank for rank in range(len(self.nodes)) if rank != node.rank]
        if self.rng.random() < self.flaw:
            vote.reason, vote.missing = "lost somebody", (self.rng.randrange(NUMEL), NUMEL)
            vote.accusations = [Accusation(self.rng.choice(others), "lost", self.rng.random() < 0.3)]
        else:
            vote.digest = b"means of %d" % node.ballot + (b"!" if self.rng.random() < self.spoilt else b"")
            vote.parts = [SpanResult(0, NUMEL, 0, [1])] if node.ballot else []
        self.cast[node.ballot, vote.digest, msgspec.msgpack.encode(vote.parts)].add(node.rank)
        self.send_vote(node)
        return True

    def send_vote(self, node: Node) -> None:
        """It arrives, perhaps twice."""
        assert node.vote is not None
        self.votes += [(node.rank, over_the_wire(node.vote))] * (2 if self.rng.random() < 0.05 else 1)

    def deliver_vote(self) -> bool:
        if not self.votes:
            return False
        rank, vote = self.votes.pop(self.rng.randrange(len(self.votes)))
        leader, order = self.nodes[LEADER], self.count.order
        if self.rng.random() < self.loss or not leader.is_alive or self.is_between(rank):
            return True
        if leader.knows is not None:
            self.answers.append((rank, leader.knows))
            return True
        if order is not None and vote.ballot < order.ballot and rank in order.members:
            self.answers.append((rank, Verdict(False, order=order)))
        self.count.add(rank, vote)
        self.decide()
        return True

    def decide(self) -> None:
        leader, before = self.nodes[LEADER], set(self.count.votes)
        decision = self.count.decide()
        if isinstance(decision, Order):
            self.answers += [(rank, Verdict(False, order=decision)) for rank in before | set(decision.members)]
        elif decision is not None:
            if decision.manifest is not None:
                self.check_is_held_by_most(decision.manifest)
            self.learn(leader, decision)
            if decision.manifest is not None and self.rng.random() < self.silence:
                leader.is_cut, leader.is_alive = True, self.rng.random() < 0.5
            else:
                self.answers += [(rank, decision) for rank in range(len(self.nodes))]

    def check_is_held_by_most(self, manifest: RoundManifest) -> None:
        """More than half of the group have voted for it, in the last ballot, and none that was left out counts."""
        held = self.cast[self.count.ballot, manifest.digest, msgspec.msgpack.encode(manifest.parts)]
        order = self.count.order
        counted = held if order is None else held & set(order.members)
        assert 2 * len(counted) > len(self.nodes), f"{sorted(held)} hold it, of {len(self.nodes)}"

    def answer(self) -> bool:
        """A member hears from the leader."""
        if not self.answers:
            return False
        rank, verdict = self.answers.pop(self.rng.randrange(len(self.answers)))
        node, order = self.nodes[rank], verdict.order
        if not node.is_alive or self.rng.random() < self.loss or self.is_between(rank):
            return True
        if verdict.is_known and not node.has_aborted:
            self.learn(node, verdict)
        elif order is not None and node.is_waiting and order.ballot > node.ballot and rank in order.members:
            node.ballot, node.vote = order.ballot, None
        return True

    def learn(self, node: Node, verdict: Verdict) -> None:
        if node.knows is None:
            node.knows = verdict
            if verdict.manifest is not None:
                self.committed[verdict.manifest.fingerprint()] = verdict.manifest

    # faults

    def is_between(self, rank: int) -> bool:
        """Whether what a member and the leader send does not reach the other one."""
        return rank != LEADER and (self.nodes[rank].is_cut or self.nodes[LEADER].is_cut)

    def disturb(self) -> None:
        """Somebody dies, is cut off or comes back, is believed to be dead, or gives the round up in doubt."""
        if self.rng.random() < self.cuts:
            node = self.rng.choice([self.nodes[LEADER], self.rng.choice(self.nodes)])
            node.is_cut = not node.is_cut
        if self.num_deaths < self.max_deaths and self.rng.random() < 0.02:
            node = self.rng.choice(self.nodes)
            node.is_alive = False
            self.num_deaths += 1
            if node.rank == LEADER:
                self.answers = [each for each in self.answers if self.rng.random() < 0.5]
        if self.rng.random() < self.suspicion:
            waiting = [node for node in self.nodes[1:] if node.is_waiting]
            if waiting and self.rng.random() < 0.1:
                self.rng.choice(waiting).has_aborted = True
            if self.nodes[LEADER].is_alive:
                self.count.lose(self.rng.randrange(len(self.nodes)), "it seems to be lost")
                self.decide()

    def notice(self) -> bool:
        """The leader finds out who is gone; members that wait vote again, or abort in doubt when the leader is gone."""
        leader, has_moved = self.nodes[LEADER], False
        is_quiet = not self.votes and not self.answers
        if leader.is_alive and leader.knows is None:
            for rank, node in enumerate(self.nodes):
                is_gone = not node.is_alive or node.has_aborted or self.is_between(rank)
                if is_gone and rank not in self.count.lost and rank not in self.count.votes:
                    self.count.lose(rank, "dead")
                    has_moved = True
            self.decide()
        for node in self.nodes:
            if node.is_waiting and is_quiet:
                if not leader.is_alive or self.is_between(node.rank) or self.rng.random() < 0.02:
                    node.has_aborted = node.rank != LEADER
                else:
                    self.send_vote(node)  # again: it was lost, or is still counted
                has_moved = True
        return has_moved

    def ask(self) -> bool:
        """A member that waits hears the verdict from one that knows it."""
        for node in self.nodes:
            others = [other for other in self.nodes if other.is_alive and not other.is_cut and other.knows is not None]
            if node.is_waiting and not node.is_cut and others:
                knows = self.rng.choice(others).knows
                assert knows is not None
                self.learn(node, knows)
                return True
        return False


def over_the_wire(vote: Vote) -> Vote:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(vote), type=Vote)


@pytest.mark.parametrize("first", few_of(range(0, 6 * SEEDS_OF_ONE_TEST, SEEDS_OF_ONE_TEST)))
def test_no_two_members_ever_commit_different_results(first: int) -> None:
    num_committed = 0
    for seed in range(first, first + SEEDS_OF_ONE_TEST):
        swarm = Swarm(seed)
        swarm.run()
        assert len(swarm.committed) <= 1, f"seed {seed}: {list(swarm.committed.values())}"
        verdicts = {node.knows.manifest is not None for node in swarm.nodes if node.knows is not None}
        assert len(verdicts) <= 1, f"seed {seed}: one is told that it committed, another one that it was aborted"
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
            assert node.knows.manifest == swarm.group.manifest(b"means of 0")
