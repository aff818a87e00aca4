"""Carries out what :mod:`.round_machine` decides in one round: calls, streams, timers. It decides nothing itself.

:class:`Answers` takes the calls of other members, and passes them to the round that they are about.

::

    member                                        leader
    ------                                        ------
    ASK_VERDICT, once, open for the whole round ──>
    exchange, then VOTE ─────────────────────────>  counts
                       <── news for this member ──  committed, aborted, again
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from manyhands.averaging.allreduce.streams import PartnerStreams
from manyhands.averaging.matchmaking.matchmaker import Matchmaker
from manyhands.averaging.messages import (
    ASK_IN_ROUND,
    ASK_VERDICT,
    VOTE,
    InRound,
    InRoundQuery,
    Received,
    Verdict,
    VerdictQuery,
    Vote,
    readable_addresses,
)
from manyhands.averaging.round import round_machine
from manyhands.averaging.round.exchange import Contribution, Exchange
from manyhands.averaging.round.round_machine import Action, Event, Round, State
from manyhands.averaging.round.times import RoundTimes
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.averaging.timing import ANSWER_S, LOOK_S
from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerError, Refused, Timeout, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc import Method
from manyhands.runtime import TaskOwner
from manyhands.runtime.waker import Waker

logger = logging.getLogger(__name__)

REMEMBERED_VERDICTS = 16
"""Number of rounds whose verdicts are kept: more than can follow within the time in which members may ask."""
CALLS_TO_LEADER = 3
"""After this many failed calls in a row a leader counts as lost, even if it can be reached."""


class RoundDriver:
    """One round of this peer, until it is over.

    Args:
        voters: ranks whose votes count.

    Attributes:
        num_bytes_sent, num_bytes_received: bytes in all exchanges that have ended.
        exchanging_s, voting_s: seconds in exchanges, and seconds of the votes and the verdict.
        rate, was_moving: those of the last :class:`.exchange.Exchange`.
    """

    def __init__(
        self,
        endpoint: RunEndpoint,
        partners: PartnerStreams,
        contribution: Contribution,
        times: RoundTimes,
        voters: set[int],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self._partners = partners
        self._contribution = contribution
        self._times = times
        self.group = contribution.group
        self.machine = Round(self.group, contribution.rank, voters)
        self.num_bytes_sent = self.num_bytes_received = 0
        self.exchanging_s = self.voting_s = 0.0
        self.rate: float | None = None
        self.was_moving = False
        self._rates: dict[int, float] = {}  # bytes per second that came from each member
        self._num_open: Counter[int] = Counter()  # questions of each rank that are open now
        self._exchanging: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._since = self._loop.time()
        self._news = Waker()
        self._over: asyncio.Future[Verdict] = self._loop.create_future()
        self._tasks = TaskOwner("a round")

    async def run(self) -> Verdict:
        """Take part until the round is over for this member.

        Raises:
            Exception: what the refill raised.
        """
        for member in self.group.members:
            self._endpoint.learn(member.peer_id, readable_addresses(member.addresses))
        self._endpoint.on_lost.append(self._on_lost)
        try:
            self._carry_out(self.machine.begin())
            if self.machine.count is None:
                self._tasks.spawn(self._ask_leader(), name="asking the leader how it ends")
            await asyncio.wait([self._over])
            verdict = self._over.result()
            if verdict.manifest is not None and self._exchanging is not None:
                late_s = self._times.late_s(self._loop.time())  # the others are done already
                await asyncio.wait([self._exchanging], timeout=late_s)
                self._count_time()
            return verdict
        finally:
            self.give_up("the leader gave the round up")
            self._endpoint.on_lost.remove(self._on_lost)
            if self._timer is not None:
                self._timer.cancel()
            self._over.cancel()  # members that ask here wait no longer, though this peer knows no verdict
            await self._tasks.close()
            del self._contribution  # frees its vectors, also while an error keeps this frame alive

    def give_up(self, reason: str) -> None:
        """End the round for this member; a leader decides at once, by the votes that are there."""
        self._on(round_machine.GaveUp(reason))

    # what the others ask

    async def answer(self, rank: int, query: VerdictQuery) -> Verdict | None:
        """Wait for news for a member that asks how the round goes on; None if this peer does not know how it ended.

        It has no limit of its own: use a timeout.
        """
        self._num_open[rank] += 1
        try:
            await self._news.wait_until(lambda: self.machine.answer(rank, query) is not None or self._over.done())
        except asyncio.CancelledError:  # its own round has ended, or the connection of this question: then it asks anew
            if not self._over.done():
                self._expect_question(rank)
            raise
        finally:
            self._num_open[rank] -= 1
        return self.machine.answer(rank, query)

    def vote(self, rank: int, vote: Vote) -> None:
        """Count the vote of another member, as the leader."""
        if not vote.digests and vote.exchange == self.machine.exchange:
            self._partners.give_up(self.group.members[rank].peer_id)  # it has stopped sending values
        self._on(round_machine.Voted(rank, vote))

    # the machine

    def _on(self, event: Event) -> None:
        self._carry_out(self.machine.on(event))
        self._news.wake()

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case round_machine.BeginExchange(number, members):
                    self._stop_exchange()
                    exchange = Exchange(
                        self._endpoint, self._partners, self._contribution, self._times, number, members
                    )
                    self._exchanging = self._tasks.spawn(self._exchange(exchange), name=f"exchange {number}")
                case round_machine.StopExchange():
                    self._stop_exchange()
                    self._wait_for_votes()
                case round_machine.SendVote(vote):
                    self._tasks.spawn(self._send(vote), name="voting")
                case round_machine.AwaitLast(exchange):
                    late = round_machine.LastAreLate(exchange)
                    self._tasks.spawn(self._tell_later(late, ANSWER_S), name="waiting for the last votes")
                case round_machine.AskOthers():
                    self._tasks.spawn(self._ask_others(), name="asking the others how it ended")
                case round_machine.Finish(verdict):
                    self._count_time()
                    if not self._over.done():
                        self._over.set_result(verdict)

    def _on_lost(self, peer_id: PeerId) -> None:
        rank = self.group.rank_of(peer_id)
        if rank is not None and self.machine.count is not None:
            self._lose(rank)

    def _lose(self, rank: int) -> None:
        if self.machine.count is not None and rank in self.machine.count.lost:
            return
        self._on(round_machine.Lost(rank, f"{self.group.members[rank].peer_id} was lost before it voted"))

    def _expect_question(self, rank: int) -> None:
        """Lose a member that has no question open after ``ANSWER_S``: it has left, or has never come."""

        async def look() -> None:
            await asyncio.sleep(ANSWER_S)
            if not self._num_open[rank]:
                self._lose(rank)

        self._tasks.spawn(look(), name="waiting for a question")

    def _count_time(self) -> None:
        """Add the time since the last change to that of the exchange, or of the vote."""
        now = self._loop.time()
        if self._exchanging is not None:
            self.exchanging_s += now - self._since
        else:
            self.voting_s += now - self._since
        self._since = now

    # exchanges

    async def _exchange(self, exchange: Exchange) -> None:
        try:
            vote = await exchange.run()
        except Exception as error:  # noqa: BLE001 (of the user's code, which wrote the values again)
            if not self._over.done():
                self._over.set_exception(error)
            return
        finally:
            self.num_bytes_sent += exchange.num_bytes_sent
            self.num_bytes_received += exchange.num_bytes_received
            self.rate = exchange.rate
            self.was_moving = exchange.was_moving
            self._rates = {rank: exchange.rate_of(rank) for rank in exchange.streams}
        self._count_time()
        self._exchanging = None
        self._wait_for_votes()
        if self.machine.count is not None and exchange.number == 0:
            for rank in range(len(self.group.members)):
                if rank != self.machine.rank and not self._num_open[rank]:
                    self._expect_question(rank)
        self._on(round_machine.Exchanged(vote))

    def _stop_exchange(self) -> None:
        self._count_time()
        if self._exchanging is not None:
            self._tasks.cancel(self._exchanging)
            self._exchanging = None
        if self._timer is not None:
            self._timer.cancel()

    def _wait_for_votes(self) -> None:
        """Limit the leader's wait for the votes of the others."""
        if self.machine.count is not None:
            seconds = self._times.left_s(self._loop.time())
            over = round_machine.TimeOver(f"no vote within {seconds:.3g} s")
            self._timer = self._loop.call_later(seconds, self._on, over)

    async def _tell_later(self, event: Event, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._on(event)

    # calls of others

    async def _ask_leader(self) -> None:
        """Keep one question to the leader open for as long as the round goes on."""
        while self.machine.state not in (State.IN_DOUBT, State.OVER):
            query = VerdictQuery(self.group.group_id, self.machine.exchange)
            answer = await self._call_leader(ASK_VERDICT, query, self._times.question_s)
            if answer is not None:
                self._on(round_machine.Told(self.machine.leader, answer))

    async def _send(self, vote: Vote) -> None:
        await self._call_leader(VOTE, vote, self._times.vote_s)

    async def _call_leader(self, method: Method[Any, Any], request: object, timeout_s: Callable[[float], float]) -> Any:
        """Call the leader, again if a connection breaks. Once the leader is lost, tell the machine and return None.

        Args:
            timeout_s: the limit of a call that begins now.
        """
        leader, reason = self.group.leader, ""
        for _ in range(CALLS_TO_LEADER):
            try:
                return await self._endpoint.call(leader, method, request, timeout_s(self._loop.time()))
            except Refused as refusal:  # it has not come to the round yet, or was started again
                reason = reason or str(refusal)
                await asyncio.sleep(LOOK_S)
            except Timeout as error:
                reason = reason or str(error)
                break
            except (Unavailable, PeerError) as error:
                reason = reason or str(error)
            try:
                await self._endpoint.ping(leader, self._answer_s(self.machine.leader))
            except (Unavailable, PeerError):
                break
        self._on(round_machine.Lost(self.machine.leader, reason))
        return None

    def _answer_s(self, rank: int) -> float:
        return self._times.answer_s(rank, self._rates.get(rank, 0.0))

    async def _ask_others(self) -> None:
        """In doubt: each other member answers when it knows the verdict, or has lost the leader too."""
        logger.info("The leader is lost: asking the other members whether the round committed")
        others = set(range(len(self.group.members))) - {self.machine.rank, self.machine.leader}
        asking = [self._tasks.spawn(self._ask_how_it_ended(rank), name="asking how it ended") for rank in others]
        if asking:
            await asyncio.wait(asking, timeout=self._times.in_doubt_s)
        self._on(round_machine.NobodyKnows())

    async def _ask_how_it_ended(self, rank: int) -> None:
        peer_id = self.group.members[rank].peer_id
        query = VerdictQuery(self.group.group_id, self.machine.exchange)
        try:
            answer = await self._endpoint.call(peer_id, ASK_VERDICT, query, self._times.in_doubt_s)
        except (Unavailable, PeerError) as error:
            logger.debug("peer %s does not say how the round ended: %s", peer_id, error)
        else:
            self._on(round_machine.Told(rank, answer))


class Answers:
    """Answers the calls of other members that are about this peer's rounds."""

    def __init__(self, endpoint: RunEndpoint, matchmaker: Matchmaker) -> None:
        self._loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self._matchmaker = matchmaker
        self._rounds: dict[bytes, RoundDriver] = {}
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._untold: set[PeerId] = set()  # members that do not know the verdict of the round that this peer led last
        self._last_led = b""
        self._decided_at = 0.0
        self._news = Waker()
        endpoint.handle(VOTE, self._on_vote)
        endpoint.handle(ASK_VERDICT, self._on_ask)
        endpoint.handle(ASK_IN_ROUND, self._on_ask_in_round)
        endpoint.on_lost.append(self._on_lost)

    async def close(self) -> None:
        """Leave the run: a leader first decides its round, and tells the members that wait."""
        for driver in self._rounds.values():
            driver.give_up("the leader leaves the run")
            self._note_decided(driver)
        left_s = self._decided_at + ANSWER_S - self._loop.time()
        with suppress(Timeout):
            async with time_limit(left_s, "telling the verdict"):
                await self._news.wait_until(lambda: not any(map(self._endpoint.is_connected, self._untold)))
        self._endpoint.unhandle(VOTE)
        self._endpoint.unhandle(ASK_VERDICT)
        self._endpoint.unhandle(ASK_IN_ROUND)
        if self._on_lost in self._endpoint.on_lost:
            self._endpoint.on_lost.remove(self._on_lost)

    def begin(self, driver: RoundDriver) -> None:
        """Answer for a round from now on."""
        group = driver.group
        self._rounds[group.group_id] = driver
        if group.leader == self._endpoint.peer_id:
            self._last_led = group.group_id
            self._untold = {member.peer_id for member in group.members} - {group.leader}

    def end(self, driver: RoundDriver) -> None:
        """A round is over for this peer. If this peer knows the verdict, it still tells it to members that ask."""
        group_id, verdict = driver.group.group_id, driver.machine.verdict
        del self._rounds[group_id]
        self._note_decided(driver)
        if verdict is not None:
            self._verdicts[group_id] = verdict
            while len(self._verdicts) > REMEMBERED_VERDICTS:
                self._verdicts.popitem(last=False)

    def _note_decided(self, driver: RoundDriver) -> None:
        if driver.group.group_id == self._last_led:
            self._decided_at = self._loop.time()

    def _on_vote(self, remote: PeerId, vote: Vote) -> Received:
        if vote.group_id in self._verdicts:
            return Received()  # too late; the member learns the verdict by its open question
        me = self._endpoint.peer_id
        driver = self._rounds.get(vote.group_id)
        if driver is None:
            raise Refused(me, "unknown_group", "this peer is in no such group")
        rank = driver.group.rank_of(remote)
        if rank is None:
            raise Refused(me, "not_a_member", "only members of a group vote in it")
        if driver.machine.count is None:
            raise Refused(me, "not_leader", "only the leader of a group counts its votes")
        driver.vote(rank, vote)
        return Received()

    async def _on_ask(self, remote: PeerId, query: VerdictQuery) -> Verdict:
        driver = self._rounds.get(query.group_id)
        rank = driver.group.rank_of(remote) if driver is not None else None
        if driver is None or rank is None:
            answer = self._verdicts.get(query.group_id)
        else:
            answer = await driver.answer(rank, query)
        if answer is None:
            raise Refused(self._endpoint.peer_id, "unknown_group", "this peer does not know how that round goes on")
        if answer.is_known and query.group_id == self._last_led:
            self._untold.discard(remote)
            self._news.wake()
        return answer

    def _on_ask_in_round(self, remote: PeerId, query: InRoundQuery) -> InRound:
        may_come = self._matchmaker.follows(query.leader)  # the leader's answer may still be on its way
        return InRound(query.group_id in self._rounds or may_come)

    def _on_lost(self, peer_id: PeerId) -> None:
        self._news.wake()
