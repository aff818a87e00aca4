"""How the members of a round learn whether it committed: drives the votes (:mod:`manyhands.averaging.commit.votes`).

::

    member                                   coordinator: the leader, or whoever follows when it is lost
    ------                                   -----------------------------------------------------------
    averaging ── holds a result, or lacks a span ──> VOTE ──> collecting ── more than half the same ──> COMMITTED
        ^                                                        ├── a span is missing ──> order
        └─────────── reduces it again, votes again <─────────────┘
    in doubt  <── verdict ───────────────────────────────────────┴── cannot be any more ──> ABORTED
        └─ coordinator lost: promises the next one, and asks all others meanwhile; nobody knows in the end: aborted here

docs/explanation/rounds.md has the whole protocol. A member that aborts in doubt while others committed is behind; the
lineage in the progress records shows it, and it loads the others' state. What a member believes in doubt it tells
nobody.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from manyhands.averaging.allreduce.probing import PROBE_S, Probing, answer_time_s
from manyhands.averaging.commit.verdict_checks import checked
from manyhands.averaging.commit.votes import STAGES, Voter, coordinators
from manyhands.averaging.commit.voting_state import VotingState
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import (
    ASK_VERDICT,
    NOBODY,
    VOTE,
    Group,
    Order,
    Verdict,
    VerdictQuery,
    Vote,
    readable_addresses,
)
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.errors import PeerError, ProtocolViolation, Refused, Timeout, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc.frames import readable
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

REMEMBERED_VERDICTS = 16
ASK_PERIOD_S = 0.3
MIN_VOTING_S = 1.0
"""A coordinator whose round is over waits at least so long for the votes of the others."""
LATENCY_S = 2.0
"""What a verdict may take to arrive."""
STALLED_S = 3.0
"""One that answers, but from which others got nothing, is waited for so long when all others have voted."""
VOTES_TO_ONE = 3
"""A coordinator that breaks off so often is lost too."""

Follow = Callable[[Order], Awaitable[None]]
"""Averages what an order says; the voter knows the outcome then."""


class Agreement:
    """Votes, and counts votes, in the rounds of one run.

    Args:
        probing: asks who does not vote whether it is in the round at all.
    """

    def __init__(self, endpoint: RunEndpoint, config: AveragingConfig, probing: Probing) -> None:
        self._endpoint = endpoint
        self._config = config
        self._probing = probing
        self._rounds: dict[bytes, VotingState] = {}
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._tasks = TaskOwner("agreement")  # each ends with the round that began it
        endpoint.handle(VOTE, self._on_vote)
        endpoint.handle(ASK_VERDICT, self._on_ask)
        endpoint.on_lost.append(self._on_lost)

    def close(self) -> None:
        self._endpoint.unhandle(VOTE)
        self._endpoint.unhandle(ASK_VERDICT)
        if self._on_lost in self._endpoint.on_lost:
            self._endpoint.on_lost.remove(self._on_lost)

    @contextmanager
    def of(self, group: Group) -> Iterator[None]:
        """Take part in how a group decides while the block runs; its end answers whoever waits for this peer."""
        rank = group.rank_of(self._endpoint.peer_id)
        assert rank is not None
        this = self._rounds[group.group_id] = VotingState(group, rank)
        for member in group.members:
            self._endpoint.learn(member.peer_id, readable_addresses(member.addresses))
        if group.leader == self._endpoint.peer_id:
            this.count(0)
        try:
            yield
        finally:
            for term in list(this.counts):
                this.close(term, "the coordinator gave the round up")
            if this.decided.done():
                self._remember(group.group_id, this.decided.result())
            del self._rounds[group.group_id]
            this.know(Verdict(False, None, "the asked peer gave the round up"))

    async def conclude(self, group: Group, voter: Voter, follow: Follow, voting_s: float) -> Verdict:
        """Vote, do what the coordinator orders, and wait for the verdict; in the end it is known, or aborted here.

        Args:
            voting_s: how long a coordinator waits for votes. The others wait longer, for a leader that began its round
                later than they did.
        """
        this, loop = self._rounds[group.group_id], asyncio.get_running_loop()
        deadline = loop.time() + voting_s
        asking: dict[int, asyncio.Task[None]] = {}
        try:
            while True:
                answer = await self._poll(this, voter, asking, max(deadline - loop.time(), MIN_VOTING_S))
                if answer.is_known:
                    this.know(answer)
                    break
                if answer.order is not None and voter.follow(answer.order):
                    if answer.order.adopted is None:
                        await follow(answer.order)
                    continue
                logger.info("in doubt: the verdict of term %d did not come: %s", voter.term, answer.reason)
                self._ask_all(this, set(range(len(group.members))) - {this.rank}, asking)
                if not self._step_up(this, voter):
                    answer = await self._wait_in_doubt(this, asking, voter, answer)
                    break
        finally:
            for task in asking.values():
                task.cancel()
            await asyncio.gather(*asking.values(), return_exceptions=True)
        return answer

    def is_in(self, group_id: bytes) -> bool:
        """Whether this peer is in the round of a group now."""
        return group_id in self._rounds

    def has_lost(self, group: Group) -> bool:
        """Whether a member of a round that is open here cannot be heard any more."""
        return bool(self._rounds[group.group_id].lost)

    async def decided(self, group: Group, on_lost: Callable[[PeerId], None]) -> Verdict:
        """Wait for the verdict of the others, for a member that still averages. No bound: put one around it.

        Args:
            on_lost: called with the members that the leader has lost.
        """
        this = self._rounds[group.group_id]
        if group.leader != self._endpoint.peer_id:
            try:
                await self._ask_leader(this, on_lost)
            except (Unavailable, PeerError) as error:
                logger.info("the leader does not say how the round ended: %s", error)
        return await asyncio.shield(this.decided)

    async def _ask_leader(self, this: VotingState, on_lost: Callable[[PeerId], None]) -> None:
        group, num_lost = this.group, 0
        while True:
            query = VerdictQuery(group.group_id, num_lost)
            answer = await self._endpoint.call(group.leader, ASK_VERDICT, query, self._config.averaging_timeout_s)
            if (answer := checked(group, answer)).is_known:
                this.know(answer)
            if not answer.is_open or len(answer.blamed) <= num_lost:
                return
            num_lost = len(answer.blamed)
            for peer_id in answer.blamed:
                on_lost(peer_id)

    # a member

    async def _poll(
        self, this: VotingState, voter: Voter, asking: dict[int, asyncio.Task[None]], timeout_s: float
    ) -> Verdict:
        """What the coordinator of the voter's term has to say; unknown and without an order if it is lost."""
        coordinator = coordinators(this.group)[voter.term]
        is_own = coordinator == this.rank
        voting: asyncio.Future[Verdict] = asyncio.get_running_loop().create_task(
            self._count(this, voter, asking, timeout_s) if is_own else self._vote(this, coordinator, voter.vote())
        )
        try:
            while not voting.done():
                if this.decided.done():
                    return this.decided.result()
                if this.summoning(voter.term) > voter.term:
                    return Verdict(False, None, "most of the others have lost the coordinator")
                either: list[asyncio.Future[Any]] = [voting, this.changed]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return voting.result()
        finally:
            voting.cancel()
            await asyncio.gather(voting, return_exceptions=True)

    async def _count(
        self, this: VotingState, voter: Voter, asking: dict[int, asyncio.Task[None]], timeout_s: float
    ) -> Verdict:
        """Vote at this peer itself; whoever is said to be lost is asked whether it is still there."""
        async with self._tasks.beside(self._ask_the_missing(this, voter.term), name="asking who does not vote"):
            return await self._count_to_end(this, voter, asking, timeout_s)

    async def _count_to_end(
        self, this: VotingState, voter: Voter, asking: dict[int, asyncio.Task[None]], timeout_s: float
    ) -> Verdict:
        vote, loop = voter.vote(), asyncio.get_running_loop()
        deadline, stalled_until = loop.time() + timeout_s, math.inf
        this.add(this.rank, vote)
        while (answer := this.now(this.rank, vote)) is None:
            count = this.count(voter.term)
            self._ask_all(this, count.suspects(), asking)
            stalled = count.only_stalled()
            stalled_until = min(stalled_until, loop.time() + STALLED_S) if stalled else math.inf
            left_s = min(deadline, stalled_until) - loop.time()
            if left_s > 0:
                await asyncio.wait([this.changed], timeout=left_s)
            elif deadline <= loop.time():
                this.close(voter.term, f"no vote within {timeout_s:.3g} s")
            else:
                for rank in stalled:
                    this.lose(rank, f"{this.group.members[rank].peer_id} answers, but does not vote")
        return answer

    async def _ask_the_missing(self, this: VotingState, term: int) -> None:
        """Who does not vote may never have come to this round, and nobody else may need anything from it."""
        while True:
            await asyncio.sleep(PROBE_S)
            await asyncio.gather(*(self._miss(this, rank) for rank in this.count(term).missing() - {this.rank}))

    async def _miss(self, this: VotingState, rank: int) -> None:
        peer_id = this.group.members[rank].peer_id
        try:
            moved = await self._probing.ask(this.group, rank, self._answer_time_s(this, rank))
        except (Unavailable, PeerError) as error:
            this.lose(rank, f"{peer_id} cannot be asked: {error}")
        else:
            if moved.is_gone:
                this.lose(rank, f"{peer_id} is in another round, or in none")

    async def _vote(self, this: VotingState, coordinator: int, vote: Vote) -> Verdict:
        group, peer_id = this.group, this.group.members[coordinator].peer_id
        timeout_s = self._config.averaging_timeout_s + MIN_VOTING_S + LATENCY_S
        if any(said.accused == coordinator and said.is_stalled for said in vote.accusations):
            timeout_s = STALLED_S
        reason = ""
        for _ in range(VOTES_TO_ONE):
            try:
                return checked(
                    group,
                    await self._while_it_answers(
                        this, coordinator, self._endpoint.call(peer_id, VOTE, vote, timeout_s)
                    ),
                )
            except (ProtocolViolation, Timeout) as error:
                reason = str(error)
                break
            except (Unavailable, PeerError) as error:
                reason = str(error)
            try:
                await self._probe(this, coordinator)
            except (Unavailable, PeerError):
                break
        return Verdict(False, None, f"the leader was lost ({reason})", [peer_id])

    async def _while_it_answers(self, this: VotingState, rank: int, call: Coroutine[Any, Any, Verdict]) -> Verdict:
        """Wait for a verdict, which may take as long as the round; but not from one that has fallen silent."""
        calling = asyncio.get_running_loop().create_task(call)
        try:
            while not (await asyncio.wait([calling], timeout=PROBE_S))[0]:
                await self._probe(this, rank)
            return calling.result()
        finally:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)

    async def _probe(self, this: VotingState, rank: int) -> None:
        peer_id = this.group.members[rank].peer_id
        await self._endpoint.call(peer_id, ASK_VERDICT, VerdictQuery(NOBODY), self._answer_time_s(this, rank))

    def _answer_time_s(self, this: VotingState, rank: int) -> float:
        return answer_time_s(this.group.link_rates(this.rank)[rank])

    def _step_up(self, this: VotingState, voter: Voter) -> bool:
        """Promise the next coordinator; False if there is none."""
        term = max(voter.term + 1, this.summoning(voter.term))
        while voter.term < term:
            if voter.next_coordinator() is None:
                return False
        return True

    async def _wait_in_doubt(
        self, this: VotingState, asking: Mapping[int, asyncio.Task[None]], voter: Voter, last: Verdict
    ) -> Verdict:
        """Nobody is left to count; somebody may still know."""
        waiting: set[asyncio.Future[None]] = set(asking.values())
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.in_doubt_timeout_s
        while waiting and not this.decided.done() and (left_s := deadline - loop.time()) > 0:
            done, _ = await asyncio.wait([*waiting, this.changed], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            waiting -= done
        if this.decided.done():
            return this.decided.result()
        reasons = "; ".join(reason for reason in (voter.vote().reason, last.reason) if reason)
        return Verdict(True, None, f"nobody who is left knows the verdict: {reasons}", last.blamed)

    def _ask_all(self, this: VotingState, ranks: set[int], asking: dict[int, asyncio.Task[None]]) -> None:
        for rank in ranks - asking.keys():
            asking[rank] = self._tasks.spawn(self._ask(this, rank), name=f"asking {this.group.members[rank].peer_id}")

    async def _ask(self, this: VotingState, rank: int) -> None:
        """Ask a member again and again what it knows, as long as it is in this round and can be reached."""
        peer_id = this.group.members[rank].peer_id
        query, timeout_s = VerdictQuery(this.group.group_id), self._answer_time_s(this, rank)
        while True:
            try:
                answer = checked(this.group, await self._endpoint.call(peer_id, ASK_VERDICT, query, timeout_s))
            except (Unavailable, PeerError) as error:
                this.lose(rank, f"{peer_id} cannot be asked: {error}")
                return
            if answer.is_known:
                this.know(answer)
                return
            if not answer.is_open:
                this.lose(rank, f"{peer_id} has given the round up")
                return
            await asyncio.sleep(ASK_PERIOD_S)

    def _remember(self, group_id: bytes, verdict: Verdict) -> None:
        self._verdicts[group_id] = verdict
        while len(self._verdicts) > REMEMBERED_VERDICTS:
            self._verdicts.popitem(last=False)

    # what others ask

    async def _on_vote(self, remote: PeerId, vote: Vote) -> Verdict:
        if vote.group_id in self._verdicts:
            return self._verdicts[vote.group_id]
        me, this = self._endpoint.peer_id, self._rounds.get(vote.group_id)
        if this is None:
            raise Refused(me, "unknown_group", "this peer is in no such group")
        rank, term = this.group.rank_of(remote), vote.ballot // STAGES
        if rank is None:
            raise Refused(me, "not_a_member", "only members of a group vote in it")
        ranks = coordinators(this.group)
        if not 0 <= term < len(ranks) or ranks[term] != this.rank:
            raise Refused(me, "not_coordinator", f"this peer does not count the votes of term {term}")
        if vote.ballot > this.count(term).ballot:
            this.lose(rank, f"{remote} voted in a ballot that has not begun")
            raise Refused(me, "too_early", "that ballot has not begun")
        vote.reason = readable(vote.reason)
        vote.accusations = [msgspec.structs.replace(said, reason=readable(said.reason)) for said in vote.accusations]
        this.add(rank, vote)
        return await this.answer(rank, vote)

    async def _on_ask(self, remote: PeerId, query: VerdictQuery) -> Verdict:
        this = self._rounds.get(query.group_id)
        if this is None:
            unknown = Verdict(False, None, "the asked peer does not know this round")
            return self._verdicts.get(query.group_id, unknown)
        if this.group.leader == self._endpoint.peer_id:
            while not this.decided.done() and len(this.lost) <= query.num_lost:
                await asyncio.wait([this.changed])
        if this.decided.done():
            return this.decided.result()
        lost = [this.group.members[rank].peer_id for rank in sorted(this.lost)]
        return Verdict(False, blamed=lost, is_open=True)

    def _on_lost(self, peer_id: PeerId) -> None:
        for this in list(self._rounds.values()):
            rank = this.group.rank_of(peer_id)
            if rank is not None:
                this.lose(rank, f"{peer_id} was lost before it voted")
