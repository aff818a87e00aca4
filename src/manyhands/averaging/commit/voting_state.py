"""One round at one peer, until it is decided: the counts that it keeps, and who waits for them."""

from __future__ import annotations

import asyncio

from manyhands.averaging.commit.votes import STAGES, VoteCount
from manyhands.averaging.messages import Group, Verdict, Vote


class VotingState:
    """What a peer knows of how a round is decided.

    Attributes:
        counts: that this peer keeps as a coordinator, by term.
        lost: members that cannot be heard any more, by rank, with the reason.
        decided: the verdict, as soon as it is known here.
        changed: done when there is something new; then it is another one.
    """

    def __init__(self, group: Group, rank: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.group = group
        self.rank = rank
        self.counts: dict[int, VoteCount] = {}
        self.decided: asyncio.Future[Verdict] = self._loop.create_future()
        self.changed: asyncio.Future[None] = self._loop.create_future()
        self.lost: dict[int, str] = {}

    def count(self, term: int) -> VoteCount:
        """The count of a term that this peer coordinates."""
        if term not in self.counts:
            count = self.counts[term] = VoteCount(self.group, term)
            for rank, reason in self.lost.items():
                count.lose(rank, reason)
        return self.counts[term]

    def add(self, rank: int, vote: Vote) -> None:
        """VoteCount a vote; its term is one of this peer's."""
        self.count(vote.ballot // STAGES).add(rank, vote)
        self._decide()
        self._wake()

    def lose(self, rank: int, reason: str) -> None:
        """A member cannot be heard any more."""
        self.lost.setdefault(rank, reason)
        for count in self.counts.values():
            count.lose(rank, reason)
        self._decide()
        self._wake()

    def close(self, term: int, reason: str) -> None:
        """Wait for no more votes in a term."""
        count = self.count(term)
        count.close()
        for rank, member in enumerate(self.group.members):
            if rank not in count.votes:
                count.lose(rank, f"{member.peer_id}: {reason}")
        self._decide()

    def know(self, verdict: Verdict) -> None:
        """The end of the round is known; only the first word counts."""
        if not self.decided.done():
            self.decided.set_result(verdict)
            self._wake()

    def summoning(self, term: int) -> int:
        """The latest term, this one at least, that waits for this peer: it coordinates it, and most others are in."""
        enough = len(self.group.members) // 2
        return max((later for later, count in self.counts.items() if len(count.votes) >= enough), default=term)

    def now(self, rank: int, vote: Vote) -> Verdict | None:
        """What to tell a member that has voted, if there is something yet."""
        if self.decided.done():
            return self.decided.result()
        count = self.count(vote.ballot // STAGES)
        if count.verdict is not None:
            return count.verdict
        if count.order is not None and vote.ballot < count.order.ballot and rank in count.order.members:
            return Verdict(False, order=count.order)
        return None

    async def answer(self, rank: int, vote: Vote) -> Verdict:
        """What to tell a member that has voted, as soon as there is something. No bound: put one around it."""
        while (verdict := self.now(rank, vote)) is None:
            await asyncio.wait([self.changed])
        return verdict

    def _decide(self) -> None:
        for count in self.counts.values():
            before = count.ballot, count.verdict
            count.decide()
            if count.verdict is not None and count.verdict.is_known:
                self.know(count.verdict)
            if (count.ballot, count.verdict) != before:
                self._wake()

    def _wake(self) -> None:
        changed, self.changed = self.changed, self._loop.create_future()
        changed.set_result(None)
