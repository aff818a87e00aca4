"""One exchange of a round: a member's contribution, the all-reduce over streams, and the vote that follows."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec
import torch
from blake3 import blake3

from manyhands.averaging.allreduce.butterfly import Butterfly, InvalidContribution
from manyhands.averaging.allreduce.means import Means
from manyhands.averaging.allreduce.streams import PartnerStreams, RoundStream, dials
from manyhands.averaging.codecs import Plan, Unsent
from manyhands.averaging.memory import Memory, empty_vector
from manyhands.averaging.messages import (
    ASK_IN_ROUND,
    MAX_REASON_LENGTH,
    NAME_BYTES,
    Complaint,
    Group,
    InRoundQuery,
    RoundManifest,
    Vote,
)
from manyhands.averaging.round.limits import MemberLimits, counted_norms, joined, outsized, usual_norm
from manyhands.averaging.round.times import Ask, GiveUp, RoundTimes, Seen, Stragglers
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.averaging.timing import LOOK_S
from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerError, RoundAborted, Timeout, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc.uplink import RoundShare
from manyhands.runtime import TaskOwner
from manyhands.runtime.executor import run_to_end

Refill = Callable[[], torch.Tensor]
"""Returns this member's values again, in memory of their own; may take a while."""

OUTSIZED = "are not finite, or larger than it has said"
OUTSIZED_MEANS = "are not finite, or too large beside those of the others"
NO_WEIGHT = "no member has any samples"


def stream_id(group: Group, exchange: int, members: Sequence[int]) -> bytes:
    """The id of an exchange's streams; that of the first exchange is the group's.

    It follows from the members of the exchange, so that only peers that know the same members meet in it.
    """
    if exchange == 0:
        return group.group_id
    return blake3(msgspec.msgpack.encode((group.group_id, exchange, members))).digest(NAME_BYTES)


@dataclass(eq=False, kw_only=True)
class Contribution:
    """One member's input to the exchanges of a round, and its result of the last one.

    See :meth:`manyhands.averaging.rounds.RoundRunner.average` for the other arguments.

    Attributes:
        clips: whether the members have said the norms of their values, and the group has their scales.
        usual_of: ranks of the members whose norms say what is usual.
        unsent: with a sparse codec, what this member has not sent so far.
        is_robust: whether the members' values become one by centered clipping.
        means: the means of the last exchange; None if this member lacks some.
        manifest: the manifest with which the group would commit these means; None without them.
        outsized: ranks of members whose values are not finite, or too large.
        usual_norm: median norm of the members' values; 0 if they were not measured.
    """

    group: Group
    rank: int
    flat_N: torch.Tensor
    plan: Plan
    memory: Memory
    refill: Refill | None
    unsent: Unsent | None
    limits: MemberLimits | None
    norm_before: float | None
    clips: bool
    usual_of: Collection[int]
    is_robust: bool
    means: Means | None = None
    manifest: RoundManifest | None = None
    outsized: set[int] = field(default_factory=set)
    usual_norm: float = 0.0

    async def butterfly(self, members: Collection[int], *, is_again: bool) -> Butterfly:
        """The all-reduce of these members' values; raises what the refill raises."""
        self.means = self.manifest = None
        if is_again and self.unsent is not None:
            self.unsent.abort()  # what the exchange before did not send
        if self.refill is None:
            averaged_N = empty_vector(self.flat_N.numel(), self.flat_N.dtype)
        else:  # the means overwrite the values
            self.flat_N = averaged_N = await run_to_end(self.refill) if is_again else self.flat_N
        return Butterfly(
            self.group, self.rank, self.flat_N, self.plan,
            members=members, averaged_N=averaged_N, memory=self.memory, unsent=self.unsent,
            is_measured=self.limits is not None, is_robust=self.is_robust,
        )  # fmt: skip

    def vote(self, butterfly: Butterfly, members: Collection[int], exchange: int, failure: RoundAborted | None) -> Vote:
        """The vote on the result of an exchange that has ended, with what failed in it."""
        complaints = list(butterfly.faults.values())
        is_own_fault = isinstance(failure, InvalidContribution)  # its own values are not finite
        if failure is not None and is_own_fault:
            complaints.append(Complaint(self.rank, failure.reason[:MAX_REASON_LENGTH], is_violation=True))
        outsized = self._find_outsized(butterfly, members)  # their values are in the means of every span
        complaints += outsized
        vote = Vote(self.group.group_id, exchange, complaints=complaints)
        if outsized or is_own_fault or not butterfly.is_whole:
            reason = failure.reason if failure is not None else "; ".join(said.reason for said in complaints[:3])
            vote.reason = reason[:MAX_REASON_LENGTH]
            return vote
        vote.parts = butterfly.parts()
        vote.digests = butterfly.digests()
        self.means = butterfly.means()
        self.manifest = self.group.manifest(vote.digest, vote.parts, members)
        return vote

    def _find_outsized(self, butterfly: Butterfly, members: Collection[int]) -> list[Complaint]:
        told = butterfly.norms()
        if self.limits is None or not told:
            return []
        weights = [member.weight if rank in members else 0.0 for rank, member in enumerate(self.group.members)]
        norms = joined(told, range(len(told)))
        if self.clips:
            norms = counted_norms(self.group, norms, self.usual_of)
        before = self.norm_before
        if (usual := usual_norm(norms, weights, self.usual_of)) < math.inf:
            self.usual_norm = max(self.usual_norm, usual)
        if before == 0.0:
            before = norms[self.rank]
        found = outsized(norms, weights, self.limits, self.usual_of, before=before)
        self.outsized |= found
        how = OUTSIZED if before is None else OUTSIZED_MEANS
        return [
            Complaint(rank, f"the values of peer {self.group.members[rank].peer_id} {how}", is_violation=True)
            for rank in sorted(found)
        ]


@dataclass(eq=False)
class Exchange:
    """One member's exchange with the others over streams.

    Attributes:
        streams: the open streams, by rank of the partner.
        rate: bytes per second while only the line held the streams up; None if the system cannot tell.
        was_moving: whether values still came when the exchange ended without success.
        num_bytes_sent, num_bytes_received: on its streams, once it has ended.
    """

    endpoint: RunEndpoint
    partners: PartnerStreams
    contribution: Contribution
    times: RoundTimes
    number: int
    members: tuple[int, ...]
    streams: dict[int, RoundStream] = field(default_factory=dict)
    rate: float | None = None
    was_moving: bool = False
    num_bytes_sent: int = 0
    num_bytes_received: int = 0
    _began_at: float = 0.0
    _share: RoundShare | None = None
    _lost: set[PeerId] = field(default_factory=set)
    _tasks: TaskOwner = field(default_factory=lambda: TaskOwner("an exchange"))
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    async def run(self) -> Vote:
        """Exchange values until all means are here, cannot come any more, or the time is over; returns the vote.

        Raises:
            Exception: what the refill raised.
        """
        members = self.contribution.group.members
        self._began_at = self._loop.time()
        butterfly = await self.contribution.butterfly(self.members, is_again=self.number > 0)
        failure: RoundAborted | None = None
        try:
            if not any(members[rank].weight > 0 for rank in self.members):
                raise RoundAborted(NO_WEIGHT)
            async with time_limit(self.times.left_s(self._loop.time()), "averaging"):
                await self._average(butterfly)
        except RoundAborted as error:
            failure = error
        except Timeout as error:
            failure = RoundAborted(str(error))
        return self.contribution.vote(butterfly, self.members, self.number, failure)

    def rate_of(self, rank: int) -> float:
        """Bytes per second that came from a member; 0 if nothing did."""
        stream = self.streams.get(rank)
        if stream is None:
            return 0.0
        moving_s = stream.last_received - self._began_at
        return stream.bytes_received / moving_s if moving_s > 0 else 0.0

    async def _average(self, butterfly: Butterfly) -> None:
        """Run the all-reduce; a member whose control connection breaks counts as lost."""
        group = self.contribution.group
        name = stream_id(group, self.number, self.members)
        is_whole = False
        opening: dict[int, asyncio.Task[RoundStream]] = {}
        watching = self._tasks.spawn(self._watch(butterfly), name="watching the others")
        self.endpoint.on_lost.append(self._on_lost)
        try:
            with self.endpoint.uplink.shared() as self._share, ExitStack() as held:
                for other in butterfly.partners:
                    held.enter_context(self.endpoint.held(group.members[other].peer_id))
                    opening[other] = self._loop.create_task(self._connect(other, name, butterfly.num_bytes_with(other)))
                await butterfly.run(opening)
                is_whole = not butterfly.faults
                if self._share.streams.keys() == {stream.stream for stream in self.streams.values()}:
                    self.rate = self._share.backlog.rate
        finally:
            for task in opening.values():
                task.cancel()
            self._tasks.cancel(watching)
            now = self._loop.time()
            last_received = max((stream.last_received for stream in self.streams.values()), default=-math.inf)
            self.was_moving = not is_whole and self.times.was_moving(last_received, now)
            self.endpoint.on_lost.remove(self._on_lost)
            self.partners.end(name)
            for other, stream in self.streams.items():
                self.num_bytes_sent += stream.bytes_sent
                self.num_bytes_received += stream.bytes_received
                fault = butterfly.faults.get(other)
                if fault is not None and not fault.is_violation:  # of this stream, not of the values that came
                    self.endpoint.fell_short(stream.stream)
                is_used_up = other in butterfly.done_with - butterfly.faults.keys() and stream.remote not in self._lost
                self.partners.give_back(stream, is_used_up=is_used_up, within_s=self.times.late_s(now))
            # at the end, as a cancellation may interrupt this wait
            await asyncio.gather(*opening.values(), watching, return_exceptions=True)

    async def _connect(self, other: int, name: bytes, num_bytes: int) -> RoundStream:
        group = self.contribution.group
        within_s = self.times.stream_s(other, self.endpoint.rtt_s(group.members[other].peer_id))
        stream = await self.partners.connect(group, self.contribution.rank, other, num_bytes, name, within_s)
        self.streams[other] = stream
        # else the lines of the few reducers hold it up, and would be taken for its own (allreduce/bandwidth.py)
        if self._share is not None and group.members[self.contribution.rank].can_reduce:
            self._share.add(stream.stream, num_bytes)
        if stream.remote in self._lost:
            stream.abort()
        return stream

    def _on_lost(self, peer_id: PeerId) -> None:
        self._lost.add(peer_id)
        for stream in self.streams.values():
            if stream.remote == peer_id:
                stream.abort()

    # stragglers

    async def _watch(self, butterfly: Butterfly) -> None:
        """Carry out what :class:`.times.Stragglers` decides, until this is cancelled."""
        num_bytes = {rank: butterfly.num_bytes_with(rank) for rank in butterfly.partners}
        span_bytes = {rank: butterfly.partition.num_bytes[rank] for rank in butterfly.partition.reducers}
        stragglers = Stragglers(self.times, num_bytes, span_bytes, self._loop.time())
        asked: dict[int, asyncio.Task[str]] = {}
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                seen = {
                    rank: Seen(butterfly.wanted.get(rank), stream.bytes_received, stream.last_received)
                    for rank, stream in self.streams.items()
                }
                answers = {rank: asked.pop(rank).result() for rank in list(asked) if asked[rank].done()}
                over = butterfly.done_with | butterfly.faults.keys()
                awaited = self._awaited(butterfly.partners)
                now = self._loop.time()
                has_reduced = butterfly.has_reduced
                for action in stragglers.looked(seen, answers, over, awaited, has_reduced, now):
                    match action:
                        case Ask(rank):
                            timeout_s = self.times.answer_s(rank, self.rate_of(rank))
                            asking = _why_gone(self.endpoint, self.contribution.group, rank, timeout_s)
                            asked[rank] = self._loop.create_task(asking)
                        case GiveUp(rank, reason):
                            butterfly.lose(rank, reason, is_stalled=True)
        finally:
            for task in asked.values():
                task.cancel()
            await asyncio.gather(*asked.values(), return_exceptions=True)

    def _awaited(self, partners: Sequence[int]) -> set[int]:
        """The partners that must dial this member and that it can ask: not clients without a connection."""
        group, rank = self.contribution.group, self.contribution.rank
        members = {other: group.members[other] for other in partners if not dials(group, rank, other)}
        return {
            other
            for other, member in members.items()
            if not member.is_client or self.endpoint.is_connected(member.peer_id)
        }


async def _why_gone(endpoint: RunEndpoint, group: Group, rank: int, timeout_s: float) -> str:
    """Ask a member whether it is in the round; returns why it counts as gone, empty if it is there.

    A failed call may live until the garbage collector runs, so no exchange, with its vectors, is among the arguments.
    """
    query = InRoundQuery(group.group_id, group.leader)
    try:
        answer = await endpoint.call(group.members[rank].peer_id, ASK_IN_ROUND, query, timeout_s)
    except (Unavailable, PeerError) as error:
        return f"does not answer: {error}"
    return "" if answer.is_in else "is in another round, or in none"
