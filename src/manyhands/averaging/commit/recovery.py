"""One member's averaging in one round: the means it holds, their contributors, and what is reduced again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

import msgspec
import torch
from blake3 import blake3

from manyhands.averaging.allreduce.butterfly import Butterfly, InvalidContribution
from manyhands.averaging.allreduce.means import Means, again, digest_of_all
from manyhands.averaging.codecs import Feedbacks, Plan
from manyhands.averaging.commit.limits import MemberLimits, witnessed
from manyhands.averaging.contributions import Contributions
from manyhands.averaging.memory import Memory, empty_vector
from manyhands.averaging.messages import MAX_REASON_LENGTH, Accusation, Group, Order, Vote
from manyhands.base.deadline import time_limit
from manyhands.base.errors import RoundAborted, Timeout
from manyhands.runtime.executor import run_to_end

Refill = Callable[[], torch.Tensor]
"""Returns this member's values again, in memory of their own; may take a while."""
Exchange = Callable[[Group, int, Butterfly, bytes], Awaitable[object]]
"""Runs the butterfly of a group's member of this rank over its own streams, which these bytes identify."""

OUTSIZED = "are too large, or not finite, beside those of the others"
NO_WEIGHT = "no member has any samples"


class Recovery:
    """Averages the whole vector first, then the parts that the leader orders; makes the vote after each.

    Args:
        rank: of this member.
        flat_N: its values.
        exchange: connects a butterfly with the other members, and runs it.
        refill: returns the values again, if the means may overwrite them; without it they are never written.
        mean_N: memory for the means, as that of the values.
        memory: buffers for encoded data.
        feedbacks: the codec error of this member's values and means in earlier rounds.
        limits: members that exceed them are left out; None for no limits.

    Attributes:
        outsized: ranks of members whose values are too large beside those of the others.
        struck: those of them that at least two reducers have found too large.
    """

    def __init__(
        self,
        group: Group,
        rank: int,
        flat_N: torch.Tensor,
        plan: Plan,
        exchange: Exchange,
        *,
        refill: Refill | None = None,
        mean_N: torch.Tensor | None = None,
        memory: Memory | None = None,
        feedbacks: Feedbacks | None = None,
        limits: MemberLimits | None = None,
    ) -> None:
        self._group = group
        self._rank = rank
        self._flat_N = flat_N
        self._plan = plan
        self._exchange = exchange
        self._refill = refill
        if refill is not None:
            self._mean_N = flat_N
        else:
            self._mean_N = mean_N if mean_N is not None else empty_vector(flat_N.numel(), flat_N.dtype)
        self._memory = memory if memory is not None else Memory()
        self._feedbacks = feedbacks
        self._limits = limits
        self.outsized: set[int] = set()
        self.struck: set[int] = set()
        contributors = (rank for rank, member in enumerate(group.members) if member.weight > 0)
        self._contributions = Contributions(flat_N.numel(), len(group.members), contributors)
        self._first: Means | None = None
        self._results: dict[bytes, Means] = {}

    def everything(self) -> Order:
        """The first ballot's order: all members average the whole vector."""
        return Order(0, list(range(len(self._group.members))), 0, self._flat_N.numel())

    async def average(self, order: Order, timeout_s: float) -> Vote:
        """Average a part of the vector among the remaining members; returns the vote on the result."""
        if any(self._mean_N is means.averaged_N for means in self._results.values()):
            self._mean_N = self._mean_N.clone()  # that result may still be the one that is committed
        if order.ballot > 0 and self._refill is not None:
            self._flat_N, self._refill = await run_to_end(self._refill), None
        region = slice(order.start, order.stop)
        self._contributions.drop(order.start, order.stop)
        butterfly = Butterfly(
            self._group, self._rank, self._flat_N, self._plan,
            members=order.members, region=region, averaged_N=self._mean_N, memory=self._memory,
            feedbacks=self._feedbacks, is_measured=self._limits is not None,
        )  # fmt: skip
        if order.ballot == 0:
            self._first = butterfly.means()  # also if the others decide while this member still averages
        reason, own_fault = "", []
        try:
            if not any(self._group.members[rank].weight > 0 for rank in order.members):
                raise RoundAborted(NO_WEIGHT)
            async with time_limit(timeout_s, "averaging"):
                await self._exchange(self._group, self._rank, butterfly, stream_id(self._group, order.ballot))
        except (RoundAborted, Timeout) as error:
            reason = (error.reason if isinstance(error, RoundAborted) else str(error))[:MAX_REASON_LENGTH]
            if isinstance(error, InvalidContribution):  # its own values: no stream carries them
                own_fault = [Accusation(self._rank, reason, is_violation=True)]
        means = self._first if order.ballot == 0 and self._first is not None else again(self._mean_N)
        for chunk, reducer, present in butterfly.held():
            self._contributions.add(chunk.start, chunk.stop, reducer, present)
        outsized = self._find_outsized(butterfly, order.members)
        accusations = [*butterfly.faults.values(), *own_fault, *outsized]
        numel, missing = self._flat_N.numel(), self._contributions.missing()
        vote = Vote(self._group.group_id, b"", ballot=order.ballot, accusations=accusations, numel=numel)
        if missing[0] < missing[1] or own_fault or outsized:
            vote.reason = reason or "; ".join(said.reason for said in accusations[:3])[:MAX_REASON_LENGTH]
            vote.missing = (0, numel) if outsized else missing
            return vote
        is_again = order.ballot > 0  # a part of it came before, so that no butterfly has seen it all
        vote.digest = digest_of_all(True, await run_to_end(means.digests)) if is_again else butterfly.digest()
        vote.parts = self._contributions.parts()
        self._results[vote.digest] = means
        return vote

    def _find_outsized(self, butterfly: Butterfly, here: Collection[int]) -> list[Accusation]:
        """Members with too large values; these are in every span's means, so all is averaged without them."""
        told, members = butterfly.norms(), self._group.members
        if self._limits is None or not told:
            return []
        weights = [member.weight if rank in here else 0.0 for rank, member in enumerate(members)]
        found, certain = witnessed(told, weights, self._limits)
        self.outsized |= found
        self.struck |= certain
        return [
            Accusation(rank, f"the values of peer {members[rank].peer_id} {OUTSIZED}", is_violation=True)
            for rank in sorted(found)
        ]

    def means_of(self, digest: bytes) -> Means | None:
        """The result with a digest, if this member holds it."""
        return self._results.get(digest)

    def incomplete(self, is_again: bool) -> Means | None:
        """The parts that this member has of a result that it does not hold.

        Args:
            is_again: whether it was averaged in more than one ballot.
        """
        return again(self._mean_N) if is_again else self._first

    def complete(self, digest: bytes, means: Means) -> None:
        """Take over the fetched parts of a committed result."""
        self._results[digest] = means


def stream_id(group: Group, ballot: int) -> bytes:
    """The id of a ballot's streams; for the first ballot it is the group's."""
    if ballot == 0:
        return group.group_id
    return blake3(msgspec.msgpack.encode((group.group_id, ballot))).digest(16)
