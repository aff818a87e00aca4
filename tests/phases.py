"""Watches and changes what chosen peers do in a round.

It stands around public methods of the parts of a round, for all peers of the process. Where nobody has asked for
anything they do what they always do. A test that has asked ends with :func:`forget`; ``tests/conftest.py`` sees to it.
"""

from __future__ import annotations

import enum
import functools
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from manyhands.averaging.allreduce.butterfly import Butterfly
from manyhands.averaging.allreduce.streams import PartnerStreams, RoundStream
from manyhands.averaging.messages import Group, Verdict, Vote
from manyhands.averaging.round.driver import RoundDriver
from manyhands.averaging.round.exchange import Contribution, Exchange
from manyhands.averaging.rounds import CommittedRound, RoundRunner
from manyhands.base.errors import RoundAborted
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint

Average = Callable[..., Awaitable[CommittedRound]]
AroundAverage = Callable[..., Awaitable[CommittedRound]]
"""``around(average, flat_N, weight, **options)`` takes the place of ``average(flat_N, weight, **options)``; see
:meth:`manyhands.averaging.rounds.RoundRunner.average`."""
AroundRound = Callable[[RoundDriver, Callable[[], Awaitable[Verdict]]], Awaitable[Verdict]]
"""``around(driver, run)`` takes the place of ``run()``, which takes part in a round."""
Connect = Callable[..., Awaitable[RoundStream]]
AroundConnect = Callable[[Connect, Group, int, int, int, bytes, float], Awaitable[RoundStream]]
"""``around(connect, group, rank, other, num_bytes, stream_id, within_s)`` takes the place of ``connect(group, ...)``,
which opens or awaits the stream to a partner."""


class Phase(enum.Enum):
    """Of a member's round."""

    JOINING = "joining"
    FORMED = "formed"
    VOTING = "before commit"
    CONCLUDED = "after commit"


@dataclass
class _Wishes:
    """What a test wants of one peer."""

    around_averages: list[AroundAverage] = field(default_factory=list)
    around_rounds: list[AroundRound] = field(default_factory=list)
    around_connects: list[AroundConnect] = field(default_factory=list)
    butterflies: list[Callable[[Butterfly], None]] = field(default_factory=list)
    votes: list[Callable[[Contribution, Vote], None]] = field(default_factory=list)
    after_exchanges: list[Callable[[], Awaitable[object]]] = field(default_factory=list)


_wishes: defaultdict[PeerId, _Wishes] = defaultdict(_Wishes)
_NOTHING = _Wishes()


def forget() -> None:
    """Let all peers do what they always do."""
    _wishes.clear()


def around_averages(peer_id: PeerId, around: AroundAverage) -> None:
    """Have a peer await ``around`` in place of each attempt to average, from the search for a group on."""
    _wishes[peer_id].around_averages.append(around)


def around_rounds(peer_id: PeerId, around: AroundRound) -> None:
    """Have a peer await ``around`` in place of each of its rounds."""
    _wishes[peer_id].around_rounds.append(around)


def around_connects(peer_id: PeerId, around: AroundConnect) -> None:
    """Have a peer await ``around`` in place of opening each stream to a partner."""
    _wishes[peer_id].around_connects.append(around)


def rounds_of(peer_id: PeerId) -> list[RoundDriver]:
    """The rounds that a peer begins from now on are added to this list."""
    begun: list[RoundDriver] = []

    async def note(driver: RoundDriver, run: Callable[[], Awaitable[Verdict]]) -> Verdict:
        begun.append(driver)
        return await run()

    around_rounds(peer_id, note)
    return begun


def before_voting(peer_id: PeerId, wait: Callable[[], Awaitable[object]]) -> None:
    """Await ``wait`` after each exchange of a peer, before it votes."""
    _wishes[peer_id].after_exchanges.append(wait)


def change_butterflies(peer_id: PeerId, change: Callable[[Butterfly], None]) -> None:
    """Do something to each all-reduce of a peer before it begins."""
    _wishes[peer_id].butterflies.append(change)


def change_first_vote(peer_id: PeerId, change: Callable[[Contribution, Vote], None]) -> None:
    """Do something to what a peer holds, and to its vote, after its first exchange."""

    def change_first(contribution: Contribution, vote: Vote) -> None:
        if vote.exchange == 0:
            change(contribution, vote)

    _wishes[peer_id].votes.append(change_first)


def on_phase(peer_id: PeerId, notify: Callable[[Phase], None]) -> None:
    """Call ``notify`` whenever a peer enters a phase of its round."""

    async def joining(average: Average, *arguments: Any, **options: Any) -> CommittedRound:
        notify(Phase.JOINING)
        return await average(*arguments, **options)

    async def around(driver: RoundDriver, run: Callable[[], Awaitable[Verdict]]) -> Verdict:
        notify(Phase.FORMED)
        try:
            return await run()
        finally:
            notify(Phase.CONCLUDED)

    async def voting() -> None:  # also if the others have committed without its vote
        notify(Phase.VOTING)

    around_averages(peer_id, joining)
    around_rounds(peer_id, around)
    before_voting(peer_id, voting)


# around the parts of a round


def _wishes_of(group: Group, rank: int) -> _Wishes:
    return _wishes.get(group.members[rank].peer_id, _NOTHING)


_peer_of: WeakKeyDictionary[RoundRunner, PeerId] = WeakKeyDictionary()
_init_runner = RoundRunner.__init__
_average = RoundRunner.average
_run_round = RoundDriver.run
_run_exchange = Exchange.run
_butterfly = Contribution.butterfly
_vote = Contribution.vote
_connect = PartnerStreams.connect


@functools.wraps(_init_runner)
def _init_and_note(runner: RoundRunner, endpoint: Endpoint, *arguments: Any, **options: Any) -> None:
    _init_runner(runner, endpoint, *arguments, **options)
    _peer_of[runner] = endpoint.peer_id


@functools.wraps(_average)
async def _average_as_wished(
    runner: RoundRunner, flat_N: torch.Tensor, weight: float, **options: Any
) -> CommittedRound:
    average: Average = functools.partial(_average, runner)
    for around in _wishes.get(_peer_of[runner], _NOTHING).around_averages:
        average = functools.partial(around, average)
    return await average(flat_N, weight, **options)


@functools.wraps(_run_round)
async def _run_round_as_wished(driver: RoundDriver) -> Verdict:
    run: Callable[[], Awaitable[Verdict]] = functools.partial(_run_round, driver)
    for around in _wishes_of(driver.group, driver.machine.rank).around_rounds:
        run = functools.partial(around, driver, run)
    return await run()


@functools.wraps(_run_exchange)
async def _run_exchange_as_wished(exchange: Exchange) -> Vote:
    vote = await _run_exchange(exchange)
    for wait in _wishes_of(exchange.contribution.group, exchange.contribution.rank).after_exchanges:
        await wait()
    return vote


@functools.wraps(_butterfly)
async def _butterfly_as_wished(contribution: Contribution, members: Collection[int], *, is_again: bool) -> Butterfly:
    butterfly = await _butterfly(contribution, members, is_again=is_again)
    for change in _wishes_of(contribution.group, contribution.rank).butterflies:
        change(butterfly)
    return butterfly


@functools.wraps(_vote)
def _vote_as_wished(
    contribution: Contribution, butterfly: Butterfly, members: Collection[int], exchange: int,
    failure: RoundAborted | None,
) -> Vote:  # fmt: skip
    vote = _vote(contribution, butterfly, members, exchange, failure)
    for change in _wishes_of(contribution.group, contribution.rank).votes:
        change(contribution, vote)
    return vote


@functools.wraps(_connect)
async def _connect_as_wished(
    streams: PartnerStreams, group: Group, rank: int, other: int, num_bytes: int, stream_id: bytes, within_s: float
) -> RoundStream:
    connect: Connect = functools.partial(_connect, streams)
    for around in _wishes_of(group, rank).around_connects:
        connect = functools.partial(around, connect)
    return await connect(group, rank, other, num_bytes, stream_id, within_s)


_AS_WISHED: list[tuple[type, str, Callable[..., Any]]] = [
    (RoundRunner, "__init__", _init_and_note),
    (RoundRunner, "average", _average_as_wished),
    (RoundDriver, "run", _run_round_as_wished),
    (Exchange, "run", _run_exchange_as_wished),
    (Contribution, "butterfly", _butterfly_as_wished),
    (Contribution, "vote", _vote_as_wished),
    (PartnerStreams, "connect", _connect_as_wished),
]
for _part, _name, _method in _AS_WISHED:
    setattr(_part, _name, _method)
