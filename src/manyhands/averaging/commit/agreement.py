"""How members learn whether their round committed: carries the votes of :mod:`manyhands.averaging.commit.votes`.

::

    member                                             leader
    ------                                             ------
    averages ── holds a result, or lacks a part ──> VOTE ──> counts ── more than half the same ──> COMMITTED
       ^                                                       ├── a part is missing ──> order
       └────────── reduces it again, votes again <─────────────┘
    waits     <── verdict ─────────────────────────────────────┴── no majority is possible ──────> ABORTED
       └─ the leader is lost: asks all other members; if none of them knows the verdict: aborted here

Only the leader decides. A member that aborts in doubt while others committed is behind: the lineage in the progress
records shows this, and the member loads the others' state. It never passes on what it assumed in doubt.
docs/explanation/rounds.md has the whole protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from manyhands.averaging.allreduce.straggler_monitor import ASK_MOVED, PROBE_S, Moved, MovedQuery, answer_time_s
from manyhands.averaging.allreduce.streams import PartnerStreams
from manyhands.averaging.commit.votes import VoteCount, checked
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import (
    ASK_VERDICT,
    VOTE,
    Group,
    Verdict,
    VerdictQuery,
    Vote,
    readable_addresses,
)
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerError, PeerLost, ProtocolViolation, Refused, Timeout, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc import Method
from manyhands.rpc.frames import readable
from manyhands.runtime import TaskOwner
from manyhands.runtime.waker import Waker

logger = logging.getLogger(__name__)

REMEMBERED_VERDICTS = 16
"""A member asks within its round's time, which ends within this many later rounds."""
ASK_PERIOD_S = 0.3
MIN_VOTING_S = 1.0
"""The least time that a leader waits for votes after its round's time is over."""
LATENCY_S = 2.0
"""What a verdict may take to arrive."""
LAST_VOTE_S = 3.0
"""How long a member that answers but sent nothing may take to vote after all others have voted; a doubted one gets no
such time."""
CALLS_TO_LEADER = 3
"""After this many failed calls in a row a leader counts as lost, although it can be dialled."""


class VotingState:
    """One peer's knowledge of the vote in a round.

    Attributes:
        count: of the votes, if this peer leads the group; the others note in it only who is lost.
        untold: the other members, without those that have the verdict from this leader.
        query: to the leader, open until it is answered or the round ends: the leader counts on its answer.
    """

    def __init__(self, group: Group, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.count = VoteCount(group)
        self.is_leader = rank == self.count.leader
        self.verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self.untold = {member.peer_id for member in group.members} - {group.members[rank].peer_id}
        self.query: asyncio.Task[Verdict] | None = None
        self.decided_at = 0.0
        self.news = Waker()
        self.moved: Callable[[], int] = int  # 0 while this peer exchanges nothing

    def lose(self, rank: int, reason: str) -> None:
        """A member can no longer be reached."""
        self.count.lose(rank, reason)
        self.decide()

    def close(self, reason: str) -> None:
        """Decide with the votes received so far, if this peer is the leader; the time for the others is over."""
        self.count.close(reason)
        self.decide()

    def give_up(self, reason: str) -> None:
        """Likewise as this peer ends its round early; the others are not to blame for that."""
        self.count.give_up(reason)
        self.decide()

    def know(self, verdict: Verdict) -> None:
        """Set the verdict; only the first one counts."""
        if not self.verdict.done():
            self.verdict.set_result(verdict)
            self.decided_at = asyncio.get_running_loop().time()
            self.news.wake()

    async def answer(self, rank: int, vote: Vote) -> Verdict:
        """The answer to a member's vote, as soon as there is one. Unbounded: use a timeout."""
        await self.news.wait_until(lambda: self.verdict.done() or self.count.has_order_for(rank, vote))
        return self.verdict.result() if self.verdict.done() else Verdict(False, order=self.count.order)

    def decide(self) -> None:
        """Decide if this peer leads and the votes allow it."""
        if self.is_leader and isinstance(decision := self.count.decide(), Verdict):
            self.know(decision)
        self.news.wake()


class Agreement:
    """Votes, and counts votes, in the rounds of one run."""

    def __init__(
        self,
        endpoint: RunEndpoint,
        config: AveragingConfig,
        streams: PartnerStreams,
        *,
        follows: Callable[[PeerId], bool],
        doubted: Callable[[Group], set[int]],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self._config = config
        self._streams = streams
        self._follows = follows
        self._doubted = doubted
        self._rounds: dict[bytes, VotingState] = {}
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._last_led: VotingState | None = None
        self._tasks = TaskOwner("agreement")  # each ends with the round that began it
        endpoint.handle(VOTE, self._on_vote)
        endpoint.handle(ASK_VERDICT, self._on_ask)
        endpoint.handle(ASK_MOVED, self._on_ask_moved)
        endpoint.on_lost.append(self._on_lost)

    async def close(self) -> None:
        """Leave the run: a leader first decides its round, and sends the verdict to the waiting members."""
        for state in self._rounds.values():
            state.give_up("the leader leaves the run")
        if (last := self._last_led) is not None:
            left_s = last.decided_at + LATENCY_S - self._loop.time()
            with suppress(Timeout):
                async with time_limit(left_s, "telling the verdict"):
                    await last.news.wait_until(lambda: not any(map(self._endpoint.is_connected, last.untold)))
        self._endpoint.unhandle(VOTE)
        self._endpoint.unhandle(ASK_VERDICT)
        self._endpoint.unhandle(ASK_MOVED)
        if self._on_lost in self._endpoint.on_lost:
            self._endpoint.on_lost.remove(self._on_lost)

    @asynccontextmanager
    async def of(self, group: Group) -> AsyncIterator[None]:
        """Take part in a group's vote within the block; a leader that leaves the block decides at once."""
        rank = group.rank_of(self._endpoint.peer_id)
        assert rank is not None
        state = self._rounds[group.group_id] = VotingState(group, rank)
        for member in group.members:
            self._endpoint.learn(member.peer_id, readable_addresses(member.addresses))
        try:
            if not state.is_leader:
                yield
                return
            self._last_led = state
            async with self._tasks.beside(self._watch(state), name="asking members that do not vote"):
                yield
        finally:
            if state.query is not None:
                state.query.cancel()
            state.give_up("the leader gave the round up")
            state.moved = int  # a leader keeps this state, and must not keep the vectors of the round
            if state.verdict.done():
                self._verdicts[group.group_id] = state.verdict.result()
                while len(self._verdicts) > REMEMBERED_VERDICTS:
                    self._verdicts.popitem(last=False)
            del self._rounds[group.group_id]

    def report(self, group: Group, moved: Callable[[], int]) -> None:
        """Tell members that ask how far this one is."""
        self._rounds[group.group_id].moved = moved

    async def ask_moved(self, group: Group, rank: int, bytes_per_s: float = 0.0) -> Moved:
        """Ask a member for its progress; raises Unavailable or PeerError if it does not answer."""
        timeout_s = answer_time_s(group, self._rounds[group.group_id].rank, rank, bytes_per_s)
        query = MovedQuery(group.group_id, group.leader)
        return await self._endpoint.call(group.members[rank].peer_id, ASK_MOVED, query, timeout_s)

    async def check_in_round(self, group: Group, rank: int) -> None:
        """Raise Unavailable or PeerError unless a member is in this round, or still waits for the leader's answer."""
        if (await self.ask_moved(group, rank)).is_gone:
            raise PeerLost(group.members[rank].peer_id, "it is in another round, or in none")

    def has_lost(self, group: Group) -> bool:
        """Whether a member of an open round can no longer be reached."""
        return bool(self._rounds[group.group_id].count.lost)

    async def decided(self, group: Group) -> Verdict:
        """Wait for the verdict, for a member that still averages. Unbounded: use a timeout."""
        state, num_lost = self._rounds[group.group_id], 0
        if state.is_leader:
            await asyncio.wait([state.verdict])
            return state.verdict.result()
        while True:
            query = VerdictQuery(group.group_id, num_lost)
            answer = await self._call_leader(state, ASK_VERDICT, query, self._config.averaging_timeout_s)
            if answer.is_known:
                return answer
            if not answer.is_open or len(answer.blamed) <= num_lost:  # it has not come yet, or has no news
                await asyncio.sleep(ASK_PERIOD_S)
            for peer_id in answer.blamed:
                self._streams.lose(peer_id)
            num_lost = len(answer.blamed)

    async def conclude(self, group: Group, vote: Vote, voting_s: float) -> Verdict:
        """Vote, and wait for the outcome: the verdict, or an order to average again.

        Args:
            voting_s: how long a leader waits for the others' votes. The others wait longer, for a leader that began its
                round later.
        """
        state = self._rounds[group.group_id]
        if not state.is_leader:
            if state.verdict.done():
                return state.verdict.result()
            timeout_s = self._config.averaging_timeout_s + MIN_VOTING_S + LATENCY_S
            return await self._call_leader(state, VOTE, vote, timeout_s)
        state.count.add(state.rank, vote)
        state.decide()
        try:
            async with time_limit(voting_s, "waiting for the votes of the others"):
                return await state.answer(state.rank, vote)
        except Timeout:
            state.close(f"no vote within {voting_s:.3g} s")
            return state.verdict.result()

    # a member

    async def _call_leader(
        self, state: VotingState, method: Method[Any, Verdict], request: VerdictQuery | Vote, timeout_s: float
    ) -> Verdict:
        """The leader's answer; if the leader is lost, the verdict from other members, or an abort."""
        vote = request if isinstance(request, Vote) else None
        leader, deadline, reason = state.group.leader, self._loop.time() + timeout_s, "no answer"
        for _ in range(CALLS_TO_LEADER):
            try:
                calling = self._endpoint.call(leader, method, request, deadline - self._loop.time())
                waiting = self._while_it_answers if vote is not None else self._ask_leader
                answer = await waiting(state, calling)
                answer = checked(state.group, answer, vote, state.rank)
            except (ProtocolViolation, Timeout) as error:
                reason = str(error)
                break
            except (Unavailable, PeerError) as error:
                reason = str(error)
            else:
                if answer.is_known:
                    state.know(answer)
                return answer
            try:
                await self._ping_leader(state)
            except (Unavailable, PeerError):
                break
        said = f"{vote.reason}; " if vote is not None and vote.reason else ""
        return await self._in_doubt(state, f"{said}the leader was lost ({reason})")

    async def _ask_leader(self, state: VotingState, call: Coroutine[Any, Any, Verdict]) -> Verdict:
        """Wait for the answer to a query, which goes on if this member votes meanwhile.

        The leader may answer it before the vote arrives, and leave: else no peer would tell this member.
        """

        def note(query: asyncio.Task[Verdict]) -> None:
            if not query.cancelled() and query.exception() is None and query.result().is_known:
                with suppress(ProtocolViolation):
                    state.know(checked(state.group, query.result()))

        if state.query is not None:
            state.query.cancel()  # of an earlier ballot
        state.query = self._loop.create_task(call)
        state.query.add_done_callback(note)
        await asyncio.wait([state.query])
        return state.query.result()

    async def _while_it_answers(self, state: VotingState, call: Coroutine[Any, Any, Verdict]) -> Verdict:
        """Wait for a verdict, possibly as long as the round, unless the leader falls silent."""
        calling = self._loop.create_task(call)
        either: list[asyncio.Future[Verdict]] = [calling, state.verdict]
        try:
            while not (await asyncio.wait(either, timeout=PROBE_S, return_when=asyncio.FIRST_COMPLETED))[0]:
                await self._ping_leader(state)
            return state.verdict.result() if state.verdict.done() else calling.result()
        finally:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)

    async def _ping_leader(self, state: VotingState) -> None:
        timeout_s = answer_time_s(state.group, state.rank, state.count.leader)
        await self._endpoint.ping(state.group.leader, timeout_s)

    async def _in_doubt(self, state: VotingState, reason: str) -> Verdict:
        """After the loss of the leader, ask all other members until one knows the verdict or none can get it."""
        logger.info("%s: asking the other members whether the round committed", reason)
        state.lose(state.count.leader, reason)
        others = [rank for rank in range(len(state.group.members)) if rank not in (state.rank, state.count.leader)]
        asking = asyncio.gather(*(self._ask(state, rank) for rank in others))
        waiting: list[asyncio.Future[Any]] = [asking, state.verdict]
        try:
            timeout_s = self._config.in_doubt_timeout_s
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        if state.verdict.done():
            return state.verdict.result()
        return Verdict(True, None, f"no remaining member knows the verdict: {reason}", [state.group.leader])

    async def _ask(self, state: VotingState, rank: int) -> None:
        """Ask a member, which answers when it has the verdict or can no longer get it from the leader."""
        peer_id, query = state.group.members[rank].peer_id, VerdictQuery(state.group.group_id)
        try:
            answer = await self._endpoint.call(peer_id, ASK_VERDICT, query, self._config.in_doubt_timeout_s)
            if (answer := checked(state.group, answer)).is_known:
                state.know(answer)
        except (Unavailable, PeerError) as error:
            logger.debug("peer %s does not say how the round ended: %s", peer_id, error)

    # the leader

    async def _watch(self, state: VotingState) -> None:
        """Once others have voted, find the members that will not: those that are gone, and those that only answer."""
        count, asked_at, stalled_at = state.count, self._loop.time(), self._loop.time()
        doubted = self._doubted(state.group)
        while not state.verdict.done():
            await asyncio.sleep(ASK_PERIOD_S)
            now, stalled, silent = self._loop.time(), count.only_stalled(), count.suspects()
            asked_at, stalled_at = asked_at if count.votes else now, stalled_at if stalled else now
            for rank in stalled if now - stalled_at >= LAST_VOTE_S else stalled & doubted:  # perhaps this leader
                state.lose(rank, f"{state.group.members[rank].peer_id} answers, but does not vote")
            if not stalled and now - asked_at >= PROBE_S:  # no other member may need one that never came to this round
                silent, asked_at = count.missing(), now
            await asyncio.gather(*(self._miss(state, rank) for rank in silent - {state.rank}))

    async def _miss(self, state: VotingState, rank: int) -> None:
        peer_id = state.group.members[rank].peer_id
        try:
            await self.check_in_round(state.group, rank)
        except (Unavailable, PeerError) as error:
            state.lose(rank, f"{peer_id} cannot be asked: {error}")

    # requests of other members

    async def _on_vote(self, remote: PeerId, vote: Vote) -> Verdict:
        if vote.group_id in self._verdicts:
            return self._told(remote, vote.group_id, self._verdicts[vote.group_id])
        me, state = self._endpoint.peer_id, self._rounds.get(vote.group_id)
        if state is None:
            raise Refused(me, "unknown_group", "this peer is in no such group")
        rank = state.group.rank_of(remote)
        if rank is None:
            raise Refused(me, "not_a_member", "only members of a group vote in it")
        if not state.is_leader:
            raise Refused(me, "not_leader", "only the leader of a group counts its votes")
        if vote.ballot > state.count.ballot:
            state.lose(rank, f"{remote} voted in a ballot that has not begun")
            raise Refused(me, "too_early", "that ballot has not begun")
        vote.reason = readable(vote.reason)
        vote.accusations = [msgspec.structs.replace(said, reason=readable(said.reason)) for said in vote.accusations]
        state.count.add(rank, vote)
        if not vote.digest and state.count.votes.get(rank) is vote:
            self._streams.give_up(remote)
        state.decide()
        return self._told(remote, vote.group_id, await state.answer(rank, vote))

    async def _on_ask(self, remote: PeerId, query: VerdictQuery) -> Verdict:
        state = self._rounds.get(query.group_id)
        if state is None:
            unknown = Verdict(False, None, "the asked peer does not know this round")
            return self._told(remote, query.group_id, self._verdicts.get(query.group_id, unknown))
        lost, leader = state.count.lost, state.count.leader
        await state.news.wait_until(
            lambda: state.verdict.done() or (len(lost) > query.num_lost if state.is_leader else leader in lost)
        )
        if state.verdict.done():
            return self._told(remote, query.group_id, state.verdict.result())
        return Verdict(False, blamed=[state.group.members[rank].peer_id for rank in lost], is_open=True)

    def _on_ask_moved(self, remote: PeerId, query: MovedQuery) -> Moved:
        if (state := self._rounds.get(query.group_id)) is not None:
            return Moved(state.moved())
        return Moved(is_gone=not self._follows(query.leader))  # else the leader's answer may still come

    def _told(self, remote: PeerId, group_id: bytes, answer: Verdict) -> Verdict:
        """Note that a member gets the verdict from this leader."""
        last = self._last_led
        if answer.is_known and last is not None and last.group.group_id == group_id:
            last.untold.discard(remote)
            last.news.wake()
        return answer

    def _on_lost(self, peer_id: PeerId) -> None:
        for state in list(self._rounds.values()):
            rank = state.group.rank_of(peer_id)
            if rank is not None and (state.is_leader or rank != state.count.leader):  # a leader may be called again
                state.lose(rank, f"{peer_id} was lost before it voted")
        if self._last_led is not None:
            self._last_led.news.wake()  # nobody waits any longer to tell that peer
