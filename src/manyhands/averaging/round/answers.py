"""Answers the other members of one peer's rounds: votes, how a round goes on, and whether this peer is in it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress

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
)
from manyhands.averaging.round.driver import RoundDriver
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.averaging.timing import ANSWER_S
from manyhands.base.deadline import time_limit
from manyhands.base.errors import Refused, Timeout
from manyhands.base.identity import PeerId
from manyhands.runtime.waker import Waker

REMEMBERED_VERDICTS = 16
"""A member asks within its round's time, which ends within this many later rounds."""


class Answers:
    """The rounds of one peer, as the others see them."""

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
        """A round is over for this peer; the verdict is still told, if this peer knows it."""
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
            return Received()  # its question was answered, or will be
        me, driver = self._endpoint.peer_id, self._rounds.get(vote.group_id)
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
            unknown = Verdict(False, None, "the asked peer does not know this round")
            answer = self._verdicts.get(query.group_id, unknown)
        else:
            answer = await driver.answer(rank, query)
        if answer.is_known and query.group_id == self._last_led:
            self._untold.discard(remote)
            self._news.wake()
        return answer

    def _on_ask_in_round(self, remote: PeerId, query: InRoundQuery) -> InRound:
        may_come = self._matchmaker.follows(query.leader)  # the leader's answer may still be on its way
        return InRound(query.group_id in self._rounds or may_come)

    def _on_lost(self, peer_id: PeerId) -> None:
        self._news.wake()
