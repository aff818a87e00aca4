"""How the members of a round learn whether it committed.

::

    member                                   leader
    ------                                   ------
    averaging ── holds a result ──> VOTE(digest)  ──> collecting ── more than half the same ──> COMMITTED
        └──── lost somebody ──────> VOTE("")      ──>      └─────── cannot be any more ───────> ABORTED
    in doubt  <── verdict ──────────────────────────────────┘
        └─ leader lost: asks all until the deadline; nobody knows: aborted here

Only the leader decides, once, so no two members commit different results of one round. A member that aborts in doubt
while the leader committed is behind; the lineage in the progress records shows it, and it loads the others' state. What
a member believes in doubt it tells nobody: only the leader's own verdict is handed on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from manyhands.averaging.ballot import Ballot
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
from manyhands.base.errors import PeerError, ProtocolViolation, Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint
from manyhands.rpc.frames import readable

logger = logging.getLogger(__name__)

REMEMBERED_VERDICTS = 16
ASK_PERIOD_S = 0.3
MIN_VOTING_S = 1.0
"""A leader whose round is over waits at least so long for the votes of the others."""
LATENCY_S = 2.0
"""What a verdict may take to arrive."""


class Agreement:
    """Votes, and counts votes, in the rounds of one run."""

    def __init__(self, endpoint: Endpoint, config: AveragingConfig) -> None:
        self._endpoint = endpoint
        self._config = config
        self._ballots: dict[bytes, tuple[Ballot, asyncio.Future[Verdict]]] = {}
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
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
        """Count the votes of a group that this peer leads while the block runs; its end answers whoever waits."""
        if group.leader != self._endpoint.peer_id:
            yield
            return
        ballot, decided = Ballot(group), asyncio.get_running_loop().create_future()
        self._ballots[group.group_id] = (ballot, decided)
        try:
            yield
        finally:
            del self._ballots[group.group_id]
            self._give_up(ballot, decided, "the leader gave the round up")

    async def conclude(self, group: Group, vote: Vote, voting_s: float) -> Verdict:
        """Vote, and wait for the verdict; in the end it is known, or the round counts as aborted here.

        Args:
            voting_s: how long a leader waits for the votes. The others wait longer, for a leader that began its round
                later than they did.
        """
        if group.leader == self._endpoint.peer_id:
            return await self._count(group, vote, voting_s)
        try:
            timeout_s = self._config.averaging_timeout_s + MIN_VOTING_S + LATENCY_S
            verdict = _checked(group, await self._endpoint.call(group.leader, VOTE, vote, timeout_s))
        except (Unavailable, PeerError) as error:
            if not vote.digest:  # whatever the verdict is, this peer cannot follow it
                return Verdict(True, None, f"{vote.reason}; and the leader was lost ({error})", [group.leader])
            logger.info("in doubt: the leader's verdict did not come: %s", error)
            return await self._resolve_doubt(group, vote, str(error))
        self._remember(group.group_id, verdict)
        return verdict

    async def decided(self, group: Group) -> Verdict:
        """Wait for the verdict of the others, for a member that has not voted yet; unknown when the leader is lost."""
        if group.leader == self._endpoint.peer_id:
            _, decided = self._ballots[group.group_id]
            return await asyncio.shield(decided)
        timeout_s = self._config.averaging_timeout_s
        query = VerdictQuery(group.group_id)
        try:
            return _checked(group, await self._endpoint.call(group.leader, ASK_VERDICT, query, timeout_s))
        except (Unavailable, PeerError) as error:
            return Verdict(False, None, f"the leader was lost: {error}")

    async def _count(self, group: Group, vote: Vote, voting_s: float) -> Verdict:
        ballot, decided = self._ballots[group.group_id]
        self._add(ballot, decided, self._endpoint.peer_id, vote)
        await asyncio.wait([decided], timeout=voting_s)
        self._give_up(ballot, decided, f"no vote within {voting_s:.3g} s")
        return decided.result()

    def _give_up(self, ballot: Ballot, decided: asyncio.Future[Verdict], reason: str) -> None:
        for member in ballot.group.members:
            ballot.add_lost(member.peer_id, f"{member.peer_id}: {reason}")
        self._decide(ballot, decided)

    async def _resolve_doubt(self, group: Group, vote: Vote, reason: str) -> Verdict:
        """Vote again, if the leader is still there, and ask the other members, until one knows or the time is over."""
        others = [member for member in group.members if member.peer_id != self._endpoint.peer_id]
        for member in others:
            self._endpoint.learn(member.peer_id, readable_addresses(member.addresses))
        asking = [asyncio.get_running_loop().create_task(self._ask(member.peer_id, group, vote)) for member in others]
        try:
            for answer in asyncio.as_completed(asking, timeout=self._config.in_doubt_timeout_s):
                verdict = await answer
                if verdict is not None:
                    self._remember(group.group_id, verdict)
                    return verdict
        except asyncio.TimeoutError:
            logger.info("nobody knows how round %s ended", group.group_id.hex())
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return Verdict(True, None, f"the leader was lost before its verdict ({reason})", [group.leader])

    async def _ask(self, peer_id: PeerId, group: Group, vote: Vote) -> Verdict | None:
        """What a member knows, as soon as it knows; None when it cannot be reached."""
        timeout_s = self._config.in_doubt_timeout_s
        while True:
            try:
                if peer_id == group.leader:
                    verdict = await self._endpoint.call(peer_id, VOTE, vote, timeout_s)
                else:
                    verdict = await self._endpoint.call(peer_id, ASK_VERDICT, VerdictQuery(group.group_id), timeout_s)
                if _checked(group, verdict).is_known:
                    return verdict
            except (Unavailable, PeerError):
                return None
            await asyncio.sleep(ASK_PERIOD_S)

    def _remember(self, group_id: bytes, verdict: Verdict) -> None:
        self._verdicts[group_id] = verdict
        while len(self._verdicts) > REMEMBERED_VERDICTS:
            self._verdicts.popitem(last=False)

    def _add(self, ballot: Ballot, decided: asyncio.Future[Verdict], member: PeerId, vote: Vote) -> None:
        ballot.add(member, vote)
        self._decide(ballot, decided)

    def _decide(self, ballot: Ballot, decided: asyncio.Future[Verdict]) -> None:
        verdict = ballot.decide()
        if verdict is not None and not decided.done():
            self._remember(ballot.group.group_id, verdict)
            decided.set_result(verdict)

    async def _on_vote(self, remote: PeerId, vote: Vote) -> Verdict:
        if vote.group_id in self._verdicts:
            return self._verdicts[vote.group_id]
        if vote.group_id not in self._ballots:
            raise Refused(self._endpoint.peer_id, "unknown_group", "this peer leads no such group")
        ballot, decided = self._ballots[vote.group_id]
        self._add(ballot, decided, remote, Vote(vote.group_id, vote.digest, readable(vote.reason)))
        return await asyncio.shield(decided)

    async def _on_ask(self, remote: PeerId, query: VerdictQuery) -> Verdict:
        if query.group_id in self._ballots:
            _, decided = self._ballots[query.group_id]
            return await asyncio.shield(decided)
        return self._verdicts.get(query.group_id, Verdict(False, None, "the asked peer does not know this round"))

    def _on_lost(self, peer_id: PeerId) -> None:
        for ballot, decided in self._ballots.values():
            ballot.add_lost(peer_id, f"{peer_id} was lost before it voted")
            self._decide(ballot, decided)


def _checked(group: Group, verdict: Verdict) -> Verdict:
    """A verdict as it came from another peer: it must be about this group, and nothing else can have been committed."""
    manifest = verdict.manifest
    if manifest is not None and (not verdict.is_known or manifest != group.manifest(manifest.digest)):
        raise ProtocolViolation(group.leader, "a verdict that is not about the group it was asked about")
    blamed = [peer_id for peer_id in verdict.blamed if group.rank_of(peer_id) is not None]
    return Verdict(verdict.is_known, manifest, readable(verdict.reason), blamed)
