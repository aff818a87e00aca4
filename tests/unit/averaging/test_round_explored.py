"""A round among a few members as values: all orders of its events, with deaths, broken links, duplicates and a liar."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from manyhands.averaging.messages import Complaint, Group, Verdict, VerdictQuery, Vote
from manyhands.averaging.round.round_machine import (
    Action,
    BeginExchange,
    Event,
    Exchanged,
    Finish,
    GaveUp,
    LastAreLate,
    Lost,
    NobodyKnows,
    Round,
    SendVote,
    State,
    StopExchange,
    TimeOver,
    Told,
    Voted,
)
from tests.sweeps import few_of
from tests.unit.averaging.groups import group_of

LEADER = 0


@dataclass(frozen=True)
class Faults:
    """How many faults of each kind may still happen."""

    deaths: int = 0
    stuck: int = 0  # members that answer, and whose exchange never ends
    breaks: int = 0  # pairs of members that do not hear each other in an exchange
    duplicates: int = 0  # votes that arrive twice
    departures: int = 0  # a leader that ends its round early
    timeouts: int = 0
    unlike: int = 0  # members that get other means from the liar than the rest


@dataclass
class World:
    """The members of one round, and what is on its way between them."""

    group: Group
    rounds: list[Round]
    faults: Faults
    alive: frozenset[int]
    liar: int | None = None  # a reducer, if it sends different means
    stuck: frozenset[int] = frozenset()
    exchanging: frozenset[int] = frozenset()
    in_exchange: dict[int, frozenset[int]] = field(default_factory=dict)  # who takes part, by number
    votes: tuple[tuple[int, Vote], ...] = ()
    cast: dict[bytes, frozenset[int]] = field(default_factory=dict)  # who voted for what
    outcomes: dict[int, Verdict] = field(default_factory=dict)
    trace: tuple[str, ...] = ()

    def copy(self, what: str) -> World:
        other = copy.copy(self)
        other.rounds = [_copied(one) for one in self.rounds]
        other.in_exchange, other.cast, other.outcomes = dict(self.in_exchange), dict(self.cast), dict(self.outcomes)
        other.trace = (*self.trace, what)
        return other

    def key(self) -> object:
        """Equal for worlds that go on in the same way."""
        return (
            tuple(map(_key_of_round, self.rounds)), self.faults, self.liar, self.alive, self.stuck, self.exchanging,
            tuple(sorted((rank, _key_of_vote(vote)) for rank, vote in self.votes)),
            tuple(sorted(self.outcomes)),
        )  # fmt: skip

    def feed(self, rank: int, event: Event) -> World:
        """Let a member take an event in, and carry out what it decides."""
        self.carry_out(rank, self.rounds[rank].on(event))
        return self

    def carry_out(self, rank: int, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case BeginExchange(number, members):
                    assert rank in members, "it exchanges values where it takes no part"
                    expected = self.in_exchange.setdefault(number, frozenset(members))
                    assert expected == frozenset(members), "members exchange in different groups"
                    self.exchanging |= {rank}
                case StopExchange():
                    self.exchanging -= {rank}
                case SendVote(vote):
                    self.votes += ((rank, vote),)
                case Finish(verdict):
                    assert rank not in self.outcomes, "two verdicts for one member"
                    self.outcomes[rank] = verdict
                    self.exchanging -= {rank}
                    self.check(rank, verdict)

    def check(self, rank: int, verdict: Verdict) -> None:
        """A round commits once, and only what more than half of the voters hold."""
        if verdict.manifest is None:
            assert verdict.reason, "an abort without a reason"
            return
        for other in self.outcomes.values():
            assert other.manifest in (None, verdict.manifest), "two results of one round"
        voters = self.rounds[rank].voters
        assert 2 * len(self.cast[verdict.manifest.digest] & voters) > len(voters)

    # what may happen next

    def next(self) -> Iterator[World]:
        yield from self.ordinary()
        yield from self.mishaps()

    def ordinary(self) -> Iterator[World]:
        for rank in sorted(self.alive):
            one = self.rounds[rank]
            if rank in self.exchanging and rank not in self.stuck:
                yield from self.ends_of_exchange(rank)
            if one.state is State.OVER or rank == LEADER:
                continue
            if LEADER not in self.alive:
                if one.state is not State.IN_DOUBT:
                    yield self.copy(f"{rank} notices").feed(rank, Lost(LEADER, "it is gone"))
            elif (told := self.answer(LEADER, rank)) is not None:  # also one that was on its way
                yield self.copy(f"{rank} is told").feed(rank, Told(LEADER, told))
            if one.state is State.IN_DOUBT:
                others = [other for other in self.alive - {rank, LEADER} if self.answer(other, rank) is not None]
                for other in others:
                    told = self.answer(other, rank)
                    assert told is not None
                    if told.is_known:
                        yield self.copy(f"{other} tells {rank}").feed(rank, Told(other, told))
                if len(others) == len(self.alive - {rank, LEADER}):  # all have answered
                    yield self.copy(f"{rank} knows no more").feed(rank, NobodyKnows())
        if LEADER in self.alive:
            for at, (rank, vote) in enumerate(self.votes):
                after = self.copy(f"vote of {rank}")
                after.votes = self.votes[:at] + self.votes[at + 1 :]
                yield after.feed(LEADER, Voted(rank, vote))
            count = self.rounds[LEADER].count
            assert count is not None
            left = {rank for rank, verdict in self.outcomes.items() if verdict.manifest is None}  # in doubt
            for rank in (set(range(len(self.rounds))) - self.alive | left) - count.lost.keys():
                if self.rounds[LEADER].state is not State.OVER:
                    yield self.copy(f"leader notices {rank}").feed(LEADER, Lost(rank, "it is gone"))

    def answer(self, of: int, to: int) -> Verdict | None:
        asking = self.rounds[to]
        verdict = self.rounds[of].answer(to, VerdictQuery(b"group", asking.exchange))
        if self.rounds[of].state is State.OVER and verdict is None:
            return Verdict(False)  # this round is not known there any more
        return copy.copy(verdict)

    def ends_of_exchange(self, rank: int) -> Iterator[World]:
        """Its exchange ends: with a result, or without the means of members that are gone, stuck, or not heard."""
        number = self.rounds[rank].exchange
        members = self.in_exchange[number]
        gone = members - self.alive - {rank}
        stalled = members & self.stuck - {rank}
        if not stalled:  # a dead member may have sent its means before
            yield self.voting(rank, number, ())
            if self.faults.unlike and self.liar in members:
                after = self.voting(rank, number, (), is_victim=True)
                after.faults = replace(self.faults, unlike=self.faults.unlike - 1)
                yield after
        if gone | stalled:
            yield self.voting(rank, number, tuple(gone | stalled))
        if self.faults.breaks:
            for other in members - gone - stalled - {rank}:
                after = self.voting(rank, number, (other,))
                after.faults = replace(self.faults, breaks=self.faults.breaks - 1)
                yield after

    def voting(self, rank: int, number: int, lost: tuple[int, ...], *, is_victim: bool = False) -> World:
        after = self.copy(f"{rank} votes {number}, complains of {lost}{', is a victim' if is_victim else ''}")
        after.exchanging -= {rank}
        said = [Complaint(other, f"{other} sent nothing", is_stalled=True) for other in lost]
        reducers = {other for other in self.in_exchange[number] if not self.group.members[other].is_client}
        digests = [b"means of %d" % number if other in reducers else b"" for other in range(len(self.rounds))]
        if is_victim:
            assert self.liar is not None
            digests[self.liar] = b"means for %d" % rank
        reason = "something is missing" if lost else ""
        vote = Vote(b"group", number, [] if lost else digests, reason=reason, complaints=said)
        if not lost:
            after.cast[vote.digest] = after.cast.get(vote.digest, frozenset()) | {rank}
        return after.feed(rank, Exchanged(vote))

    def mishaps(self) -> Iterator[World]:
        faults = self.faults
        if len(self.outcomes) == len(self.rounds):
            return
        for rank in sorted(self.alive):
            if faults.deaths:
                after = self.copy(f"{rank} dies")
                after.faults, after.alive = replace(faults, deaths=faults.deaths - 1), self.alive - {rank}
                after.exchanging -= {rank}
                yield after
            if faults.stuck and rank in self.exchanging:
                after = self.copy(f"{rank} gets stuck")
                after.faults, after.stuck = replace(faults, stuck=faults.stuck - 1), self.stuck | {rank}
                yield after
            if faults.timeouts and self.rounds[rank].state in (State.VOTED, State.IN_DOUBT):
                after = self.copy(f"time is over for {rank}")
                after.faults = replace(faults, timeouts=faults.timeouts - 1)
                yield after.feed(rank, TimeOver("no vote") if rank == LEADER else Lost(LEADER, "no answer"))
        if faults.departures and LEADER in self.alive and self.rounds[LEADER].state is not State.OVER:
            after = self.copy("the leader leaves")
            after.faults = replace(faults, departures=faults.departures - 1)
            yield after.feed(LEADER, GaveUp("it leaves"))
        if faults.duplicates and LEADER in self.alive:
            for rank, vote in self.votes:
                after = self.copy(f"vote of {rank}, not for the last time")
                after.faults = replace(faults, duplicates=faults.duplicates - 1)
                yield after.feed(LEADER, Voted(rank, vote))

    def is_quiet(self) -> bool:
        return next(self.ordinary(), None) is None

    def pass_time(self) -> None:
        """Nothing else happens: the last votes are too late, and nobody is in doubt for ever."""
        if LEADER in self.alive and (count := self.rounds[LEADER].count) is not None:
            self.feed(LEADER, LastAreLate(count.exchange))
        for rank in sorted(self.alive):
            self.feed(rank, NobodyKnows())


def _copied(one: Round) -> Round:
    other = copy.copy(one)
    if one.count is not None:
        other.count = copy.copy(one.count)
        other.count.votes, other.count.lost = dict(one.count.votes), dict(one.count.lost)
    return other


def _key_of_vote(vote: Vote) -> object:
    return vote.exchange, tuple(vote.digests), tuple(said.about for said in vote.complaints)


def _key_of_round(one: Round) -> object:
    count = one.count
    counted = count and (
        count.exchange,
        count.members,
        tuple(sorted((rank, _key_of_vote(vote)) for rank, vote in count.votes.items())),
        frozenset(count.lost),
        count.is_closed,
    )
    is_committed = one.verdict is not None and one.verdict.manifest is not None
    return one.state, one.exchange, is_committed, one.verdict is None, counted


def explore(
    num_members: int, faults: Faults, clients: tuple[int, ...] = (), num_guests: int = 0
) -> tuple[int, list[World]]:
    """All worlds that can be reached; returns how many, and those in which nothing happens any more."""
    group = group_of(num_members, clients=list(clients))
    voters, everybody = frozenset(range(num_members - num_guests)), frozenset(range(num_members))
    rounds = [Round(group, rank, voters=voters) for rank in range(num_members)]
    start = World(group, rounds, faults, everybody, liar=num_members - 1 if faults.unlike else None)
    for rank, one in enumerate(start.rounds):
        start.carry_out(rank, one.begin())
    seen, todo, ended = {start.key()}, [start], list[World]()
    while todo:
        world = todo.pop()
        for after in world.next():
            if (key := after.key()) not in seen:
                seen.add(key)
                todo.append(after)
        if world.is_quiet():
            ended.append(world)
    return len(seen), ended


def settled(world: World) -> World:
    """What comes of a world in which nothing happens, as time passes."""
    world = world.copy("time passes")
    for _ in range(4):
        world.pass_time()
        while (after := next(world.ordinary(), None)) is not None:
            world = after
    return world


@pytest.mark.parametrize(
    ("num_members", "faults"),
    [
        (2, Faults(deaths=1, breaks=1, duplicates=1, departures=1, timeouts=1)),
        (3, Faults(deaths=1, duplicates=1)),
        (3, Faults(stuck=1)),
        (3, Faults(breaks=1, duplicates=1)),
        pytest.param(3, Faults(deaths=1, departures=1, timeouts=1), marks=pytest.mark.long),
        pytest.param(4, Faults(deaths=1), marks=pytest.mark.long),
        (3, Faults(unlike=3)),
        (4, Faults(unlike=2)),
    ],
)
def test_in_all_orders_one_result_at_most_commits_and_every_survivor_learns_how_it_ended(
    num_members: int, faults: Faults
) -> None:
    """The rules that hold in each state are checked as it is reached."""
    check_all_orders(num_members, faults)


@pytest.mark.parametrize(
    ("num_members", "num_guests", "faults"),
    few_of(
        [(4, 1, Faults(stuck=1)), (3, 1, Faults(unlike=2)), (3, 2, Faults(breaks=1)), (4, 2, Faults(deaths=1))],
        3,
        pytest.mark.long,
    ),
)
def test_guests_that_die_or_get_stuck_or_lie_stop_no_members(num_members: int, num_guests: int, faults: Faults) -> None:
    check_all_orders(num_members, faults, num_guests)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("num_members", "faults"),
    [
        (3, Faults(deaths=1, breaks=1, duplicates=1, departures=1, timeouts=1)),
        (4, Faults(stuck=1, timeouts=1)),
        (4, Faults(breaks=1, deaths=1)),
        (4, Faults(deaths=2)),
        (5, Faults(deaths=1)),
        (3, Faults(unlike=3, deaths=1, duplicates=1)),
        (4, Faults(unlike=2, deaths=1)),
    ],
)
def test_in_all_orders_one_result_commits_also_with_more_members_and_faults(num_members: int, faults: Faults) -> None:
    check_all_orders(num_members, faults)


def check_all_orders(num_members: int, faults: Faults, num_guests: int = 0) -> None:
    """Explore all worlds; in each that ends every survivor knows how, and commits where the promise says so."""
    voters = set(range(num_members - num_guests))
    num_worlds, ended = explore(num_members, faults, num_guests=num_guests)
    print(f"{num_members} members, {faults}: {num_worlds} worlds, {len(ended)} ends")
    num_committed = 0
    for end in ended:
        world = settled(end)
        waiting = [rank for rank in world.alive - world.stuck if world.rounds[rank].state is not State.OVER]
        assert not waiting, world.trace
        committed = {rank for rank, verdict in world.outcomes.items() if verdict.manifest is not None}
        num_committed += bool(committed)
        lost = set(range(num_members)) - world.alive | world.stuck
        is_promised = not (faults.breaks or faults.departures or faults.timeouts or LEADER in lost)
        lost |= {world.liar} - {None}
        if is_promised and 2 * len(lost & voters) < len(voters):
            assert committed >= (world.alive - lost) & voters, world.trace
    assert num_committed
