"""The search for a group among a few peers as values: all orders of its events, with deaths and absent loops."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from manyhands.averaging.attendees import Attendees
from manyhands.averaging.matchmaking.matchmaking_machine import (
    GONE,
    LATE,
    Abort,
    Action,
    Ask,
    Asked,
    Call,
    Called,
    CallFailed,
    CallLoop,
    Check,
    Close,
    Due,
    Event,
    Failed,
    Follows,
    Formed,
    Looked,
    Matchmaking,
    Missing,
    Refuse,
    SendOn,
    SentOn,
    Stage,
    Withdrew,
)
from manyhands.averaging.messages import Member, Position
from manyhands.averaging.roster import Roster, Standing
from manyhands.base.identity import PeerId

HERE = Position(1, b"here")
PATIENCE_S = 8.0


@dataclass(frozen=True)
class Message:
    """On its way; ``what`` is a request or an answer to one."""

    what: str
    sender: PeerId
    to: PeerId
    about: Any = None


@dataclass(frozen=True)
class Faults:
    """How many faults of each kind may still happen."""

    deaths: int = 0


@dataclass
class World:
    """The peers, and what is on its way between them.

    Attributes:
        order: who leads, the first one first.
        roster: None if there are no guests.
        away: peers whose training loop does not come.
        cut: two peers that cannot reach each other.
        attempts: how often each may still look.
        groups: of each peer, in order.
    """

    order: tuple[PeerId, ...]
    roster: Roster | None
    machines: dict[PeerId, Matchmaking]
    faults: Faults
    away: frozenset[PeerId]
    alive: frozenset[PeerId]
    attempts: dict[PeerId, int]
    missing: dict[PeerId, frozenset[PeerId]]
    cut: frozenset[PeerId] = frozenset()
    messages: tuple[Message, ...] = ()
    waiting: frozenset[tuple[PeerId, PeerId]] = frozenset()  # who has asked whom, and is not answered
    groups: dict[PeerId, tuple[tuple[PeerId, ...], ...]] = field(default_factory=dict)
    aborts: dict[PeerId, int] = field(default_factory=dict)
    now: float = 0.0
    has_timed_out: bool = False
    trace: tuple[str, ...] = ()

    def copy(self, what: str) -> World:
        other = copy.copy(self)
        other.machines = {peer: _copied(machine) for peer, machine in self.machines.items()}
        for name in ("attempts", "missing", "groups", "aborts"):
            setattr(other, name, dict(getattr(self, name)))
        other.trace = (*self.trace, what)
        return other

    def key(self) -> object:
        """Equal for worlds that go on in the same way."""
        return (
            tuple(_frozen(vars(machine)) for machine in self.machines.values()), self.faults, self.alive,
            tuple(self.attempts.values()), tuple(self.missing.values()), tuple(sorted(map(repr, self.messages))),
            self.waiting, tuple(self.groups.items()), self.now,
        )  # fmt: skip

    def who(self, peer: PeerId) -> Attendees:
        others = [one for one in self.order if one != peer and one not in self.missing[peer]]
        return Attendees(peer, HERE, dict.fromkeys(others, False), others, roster=self.roster)

    def feed(self, peer: PeerId, event: Event) -> World:
        """Let a peer take an event in, and carry out what it decides."""
        self.carry_out(peer, self.machines[peer].on(event, self.now, self.who(peer)))
        return self

    def send(self, what: str, sender: PeerId, to: PeerId, about: Any = None) -> None:
        self.messages += (Message(what, sender, to, about),)

    def carry_out(self, peer: PeerId, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Ask(leader, _):
                    self.stop_asking(peer)
                    self.send("ask", peer, leader)
                case Check(leader):
                    if leader not in self.alive or {peer, leader} == self.cut:
                        self.stop_asking(peer)
                        self.feed(peer, Failed(leader, GONE, "it is gone"))
                case Call(other):
                    self.send("call", peer, other)
                case CallLoop():
                    pass
                case SendOn(peers, leader):
                    self.answer(peer, peers, "sent on", leader)
                case Refuse(peers, code, _):
                    self.answer(peer, peers, "refused", code)
                case Close(members, _, missing):
                    ids = tuple(member.peer_id for member in members)
                    self.missing[peer] |= missing
                    self.answer(peer, tuple(one for one in ids if one != peer), "group", ids)
                    self.note_group(peer, ids)
                case Missing(other):
                    self.missing[peer] |= {other}
                case Abort(reason, _, _):
                    assert reason, "an abort without a reason"
                    self.stop_asking(peer)
                    self.aborts[peer] = self.aborts.get(peer, 0) + 1

    def stop_asking(self, peer: PeerId) -> None:
        self.messages = tuple(
            one for one in self.messages
            if not (one.what == "ask" and one.sender == peer)
            and not (one.what in ("sent on", "refused") and one.to == peer)
        )  # fmt: skip
        for asker, leader in self.waiting:
            if asker == peer:
                self.send("withdraw", peer, leader)
        self.waiting = frozenset(pair for pair in self.waiting if pair[0] != peer)

    def answer(self, leader: PeerId, peers: tuple[PeerId, ...], what: str, about: Any) -> None:
        for peer in peers:
            if (peer, leader) in self.waiting:
                self.waiting -= {(peer, leader)}
                self.send(what, leader, peer, about)

    def note_group(self, peer: PeerId, ids: tuple[PeerId, ...]) -> None:
        assert peer in ids
        self.groups[peer] = (*self.groups.get(peer, ()), ids)

    # what may happen next

    def next(self) -> Iterator[World]:
        yield from self.ordinary()
        if self.faults.deaths:
            for peer in sorted(self.alive):
                yield self.dies(peer)

    def ordinary(self) -> Iterator[World]:
        for peer in sorted(self.alive - self.away):
            machine = self.machines[peer]
            if machine.stage is Stage.IDLE and self.attempts[peer] and not self.groups.get(peer):
                after = self.copy(f"{peer} is due")
                after.attempts[peer] -= 1
                yield after.feed(peer, Due(member(peer), PATIENCE_S))
        for at, message in enumerate(self.messages):
            after = self.copy(f"{message.what} of {message.sender} to {message.to}")
            after.messages = self.messages[:at] + self.messages[at + 1 :]
            yield after.deliver(message)

    def deliver(self, message: Message) -> World:
        sender, to, about = message.sender, message.to, message.about
        machine = self.machines[to]
        is_gone = to not in self.alive or {sender, to} == self.cut
        match message.what:
            case "ask" if is_gone:
                self.feed(sender, Failed(to, GONE, "it is gone"))
            case "ask":
                self.waiting |= {(sender, to)}
                self.feed(to, Asked(member(sender), PATIENCE_S))
            case "withdraw" if to in self.alive:
                self.feed(to, Withdrew(sender))
            case "call" if is_gone:
                if sender in self.alive:
                    self.feed(sender, CallFailed(to, GONE, "it is gone"))
            case "call":
                self.feed(to, Called(sender))
                leader = machine.follows if machine.stage in (Stage.ASKING, Stage.LEADING) else None
                self.send("says", to, sender, None if leader == sender else leader)
            case "says" if to in self.alive:
                self.feed(to, Follows(sender, about))
            case "sent on" if to in self.alive:
                self.feed(to, SentOn(about))
            case "refused" if to in self.alive:
                self.feed(to, Failed(sender, about, about))
            case "group" if to in self.alive and machine.stage is Stage.ASKING and machine.leader == sender:
                self.feed(to, Formed())
                self.note_group(to, about)
        return self

    def dies(self, peer: PeerId) -> World:
        """All notice at once, as its connections break."""
        after = self.copy(f"{peer} dies")
        after.faults = replace(self.faults, deaths=self.faults.deaths - 1)
        after.alive -= {peer}
        after.waiting = frozenset(pair for pair in self.waiting if peer not in pair)
        after.messages = tuple(one for one in self.messages if one.sender != peer)
        for other in sorted(after.alive):
            after.missing[other] |= {peer}
            after.feed(other, Withdrew(peer))
            if after.machines[other].stage is Stage.ASKING and after.machines[other].leader == peer:
                after.stop_asking(other)
                after.feed(other, Failed(peer, GONE, "it is gone"))
        return after

    def later(self) -> World | None:
        """Nothing is on its way: time passes, until the next thing is due; None at the end."""
        wanted = [one for peer, one in self.machines.items() if peer in self.alive and one.is_wanted]
        wake_at = min((one.wake_at for one in wanted), default=1e9)
        asking = sorted(pair for pair in self.waiting if pair[0] in self.alive)
        if wake_at < 1e9:
            after = self.copy("time passes")
            after.now = max(self.now, wake_at)
            for peer in sorted(after.alive):
                if after.machines[peer].is_wanted:
                    after.feed(peer, Looked())
            after.has_timed_out = True
            if after.key() != self.key():
                return after
        if not asking:
            return None
        peer, leader = asking[0]
        after = self.copy(f"{peer} waits no more for {leader}")
        after.has_timed_out = True
        after.stop_asking(peer)
        return after.feed(peer, Failed(leader, LATE, "no answer"))


def _copied(machine: Matchmaking) -> Matchmaking:
    other = copy.copy(machine)
    for name, value in vars(machine).items():
        if isinstance(value, (dict, set, list)):
            setattr(other, name, copy.copy(value))
    return other


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(sorted((str(key), _frozen(one)) for key, one in value.items()))
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(map(str, value)))
    return str(value)


def member(peer: PeerId) -> Member:
    return Member(peer, [], False, 1.0)


def world_of(
    names: str, *, guests: str = "", away: str = "", cut: str = "", deaths: int = 0, attempts: int = 2
) -> World:
    peers = tuple(PeerId(name) for name in names)
    members = {PeerId(name): Standing(3, is_member=True, can_lead=True) for name in names if name not in guests}
    return World(
        peers, Roster(members) if guests else None, {peer: Matchmaking(peer, -1.0) for peer in peers},
        Faults(deaths), frozenset(map(PeerId, away)), frozenset(peers), dict.fromkeys(peers, attempts),
        dict.fromkeys(peers, frozenset()), frozenset(map(PeerId, cut)),
    )  # fmt: skip


def ends_of(start: World, most: int = 400_000) -> Iterator[World]:
    """Every way in which a search may end; breadth first."""
    seen, worlds = {start.key()}, [start]
    while worlds:
        following: list[World] = []
        for world in worlds:
            nexts = list(world.next())
            if not any(True for _ in world.ordinary()):
                later = world.later()
                if later is None:
                    yield world
                else:
                    nexts.append(later)
            for after in nexts:
                if (key := after.key()) not in seen:
                    seen.add(key)
                    following.append(after)
        assert len(seen) <= most, f"{len(seen)} states"
        worlds = following


def check(world: World) -> None:
    """Nobody waits for ever, and those who are in a group together hold the same one."""
    for peer in world.alive - world.away:
        assert world.groups.get(peer) or world.aborts.get(peer), (peer, world.trace)
        assert world.machines[peer].stage is not Stage.ASKING, (peer, world.trace)
    for peer, groups in world.groups.items():
        assert len(groups) == 1, (peer, groups, world.trace)


@pytest.mark.parametrize(("names", "guests"), [("ab", ""), ("abc", ""), ("abc", "c"), ("abc", "bc")])
def test_without_faults_all_are_in_one_group_that_the_first_leads_and_no_time_passes(names: str, guests: str) -> None:
    num_ends = 0
    for world in ends_of(world_of(names, guests=guests)):
        num_ends += 1
        check(world)
        assert {world.groups[PeerId(name)] for name in names} == {(tuple(map(PeerId, names)),)}, world.trace
        assert not world.has_timed_out or guests, world.trace
    assert num_ends


@pytest.mark.parametrize(
    ("names", "deaths"),
    [
        ("ab", 1),
        pytest.param("abc", 1, marks=pytest.mark.long),
        pytest.param("abc", 2, marks=pytest.mark.sweep),
    ],
)
def test_the_others_find_a_group_or_a_reason_whichever_peer_dies_and_whenever(names: str, deaths: int) -> None:
    for world in ends_of(world_of(names, deaths=deaths, attempts=3)):
        check(world)
        alive = sorted(world.alive)
        if len(alive) > 1 and not any(set(groups[0]) - world.alive for groups in world.groups.values()):
            assert {world.groups.get(peer) for peer in alive} == {(tuple(alive),)}, world.trace


@pytest.mark.parametrize("away", ["a", "b", "c"])
def test_a_loop_that_does_not_come_costs_the_others_one_wait(away: str) -> None:
    rest = tuple(PeerId(name) for name in "abc" if name != away)
    for world in ends_of(world_of("abc", away=away, attempts=3)):
        check(world)
        assert {world.groups.get(peer) for peer in rest} == {(rest,)}, world.trace
        assert world.now <= 2 * PATIENCE_S, world.trace


@pytest.mark.parametrize("cut", ["ab", "bc", pytest.param("ac", marks=pytest.mark.long)])
def test_two_peers_that_cannot_reach_each_other_still_leave_a_group_of_two(cut: str) -> None:
    for world in ends_of(world_of("abc", cut=cut, attempts=3)):
        for peer in world.alive:
            assert world.groups.get(peer) or world.aborts.get(peer), (peer, world.trace)
        sizes = [len(groups[0]) for groups in world.groups.values()]
        assert max(sizes) >= 2, world.trace
        assert world.now <= 3 * PATIENCE_S, world.trace
