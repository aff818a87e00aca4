"""One exchange of a round: what a member brings to it, the all-reduce over streams, and the vote that follows."""

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
from manyhands.averaging.allreduce.straggler_monitor import StragglerMonitor
from manyhands.averaging.allreduce.streams import PartnerStreams, RoundStream
from manyhands.averaging.codecs import Feedbacks, Plan
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.memory import Memory, empty_vector
from manyhands.averaging.messages import MAX_REASON_LENGTH, NAME_BYTES, Accusation, Group, RoundManifest, Vote
from manyhands.averaging.round.limits import MemberLimits, joined, outsized, usual_norm
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.averaging.timing import ANSWER_S, LOOK_S, MOMENT_S
from manyhands.base.deadline import time_limit
from manyhands.base.errors import RoundAborted, Timeout
from manyhands.base.identity import PeerId
from manyhands.rpc.uplink import RoundShare
from manyhands.runtime import TaskOwner
from manyhands.runtime.executor import run_to_end

Refill = Callable[[], torch.Tensor]
"""Returns this member's values again, in memory of their own; may take a while."""

OUTSIZED = "are too large, or not finite, beside those of the others"
NO_WEIGHT = "no member has any samples"
ROUND_TRIPS = 4
"""Of a member for which nobody waits long: so many to open its stream."""


def stream_id(group: Group, exchange: int, members: Sequence[int]) -> bytes:
    """The id of an exchange's streams, so that all who meet in it know the same members; at first it is the group's."""
    if exchange == 0:
        return group.group_id
    return blake3(msgspec.msgpack.encode((group.group_id, exchange, members))).digest(NAME_BYTES)


@dataclass(eq=False, kw_only=True)
class Contribution:
    """What one member brings to the exchanges of a round, and what it holds after the last one.

    See :meth:`manyhands.averaging.rounds.RoundRunner.average` for the arguments.

    Attributes:
        means: of the last exchange; None if something is missing.
        manifest: with which the group would commit them.
        outsized: ranks of members whose values are too large beside those of the others.
        usual_norm: of the members' values; 0 if they were not measured.
    """

    group: Group
    rank: int
    flat_N: torch.Tensor
    plan: Plan
    memory: Memory
    refill: Refill | None
    feedbacks: Feedbacks | None
    limits: MemberLimits | None
    norm_before: float | None
    means: Means | None = None
    manifest: RoundManifest | None = None
    outsized: set[int] = field(default_factory=set)
    usual_norm: float = 0.0

    async def butterfly(self, members: Collection[int], *, is_again: bool) -> Butterfly:
        """The all-reduce of these members' values; raises what the refill raises."""
        self.means = self.manifest = None
        if is_again and self.feedbacks is not None:
            self.feedbacks.abort()  # what the exchange before has noted
        if self.refill is None:
            averaged_N = empty_vector(self.flat_N.numel(), self.flat_N.dtype)
        else:  # the means overwrite the values
            self.flat_N = averaged_N = await run_to_end(self.refill) if is_again else self.flat_N
        return Butterfly(
            self.group, self.rank, self.flat_N, self.plan,
            members=members, averaged_N=averaged_N, memory=self.memory, feedbacks=self.feedbacks,
            is_measured=self.limits is not None,
        )  # fmt: skip

    def vote(self, butterfly: Butterfly, members: Collection[int], exchange: int, failure: RoundAborted | None) -> Vote:
        """The vote on the result of an exchange that has ended, with what failed in it."""
        accusations = list(butterfly.faults.values())
        is_own_fault = isinstance(failure, InvalidContribution)  # its own values: no stream carries them
        if failure is not None and is_own_fault:
            accusations.append(Accusation(self.rank, failure.reason[:MAX_REASON_LENGTH], is_violation=True))
        outsized = self._find_outsized(butterfly, members)  # these are in every span's means
        accusations += outsized
        vote = Vote(self.group.group_id, exchange, accusations=accusations)
        if outsized or is_own_fault or not butterfly.is_whole:
            reason = failure.reason if failure is not None else "; ".join(said.reason for said in accusations[:3])
            vote.reason = reason[:MAX_REASON_LENGTH]
            return vote
        vote.parts = butterfly.parts()
        vote.digests = butterfly.digests()
        self.means = butterfly.means()
        self.manifest = self.group.manifest(vote.digest, vote.parts, members)
        return vote

    def _find_outsized(self, butterfly: Butterfly, members: Collection[int]) -> list[Accusation]:
        told = butterfly.norms()
        if self.limits is None or not told:
            return []
        weights = [member.weight if rank in members else 0.0 for rank, member in enumerate(self.group.members)]
        norms, at_least = joined(told, range(len(told))), 0.0
        if (usual := usual_norm(norms, weights)) < math.inf:
            self.usual_norm = max(self.usual_norm, usual)
        if self.norm_before is not None:  # means may be as good as 0 where values cancel each other
            at_least = self.norm_before or norms[self.rank]
        found = outsized(norms, weights, self.limits, at_least=at_least)
        self.outsized |= found
        return [
            Accusation(rank, f"the values of peer {self.group.members[rank].peer_id} {OUTSIZED}", is_violation=True)
            for rank in sorted(found)
        ]


@dataclass(eq=False)
class Exchange:
    """One member's exchange with the others over streams.

    Args:
        ends_at: loop time at which the round should end, by which members are judged to be too slow.
        deadline: of this peer.
        hurried: ranks of members that get less time.

    Attributes:
        streams: by rank, as far as they are open.
        rate: bytes per second while only the line held the streams up; None if the system cannot tell.
        was_moving: values still came when it ended without having succeeded.
        num_bytes_sent, num_bytes_received: on its streams, once it has ended.
    """

    endpoint: RunEndpoint
    config: AveragingConfig
    partners: PartnerStreams
    contribution: Contribution
    number: int
    members: tuple[int, ...]
    ends_at: float
    deadline: float
    hurried: Collection[int]
    streams: dict[int, RoundStream] = field(default_factory=dict)
    rate: float | None = None
    was_moving: bool = False
    num_bytes_sent: int = 0
    num_bytes_received: int = 0
    _butterfly: Butterfly | None = None
    _began_at: float = 0.0
    _share: RoundShare | None = None
    _lost: set[PeerId] = field(default_factory=set)
    _watchers: TaskOwner = field(default_factory=lambda: TaskOwner("watching an exchange"))
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    async def run(self) -> Vote:
        """Exchange values until all means are here, cannot come any more, or the time is over; returns the vote.

        Raises:
            Exception: what the refill raised.
        """
        members, self._began_at = self.contribution.group.members, self._loop.time()
        butterfly = self._butterfly = await self.contribution.butterfly(self.members, is_again=self.number > 0)
        failure: RoundAborted | None = None
        try:
            if not any(members[rank].weight > 0 for rank in self.members):
                raise RoundAborted(NO_WEIGHT)
            limit_s = max(self.deadline - self._loop.time(), MOMENT_S)
            async with time_limit(limit_s, "averaging"):
                await self._average(butterfly)
        except RoundAborted as error:
            failure = error
        except Timeout as error:
            failure = RoundAborted(str(error))
        return self.contribution.vote(butterfly, self.members, self.number, failure)

    def moved(self) -> int:
        """How far it is: bytes sent and received, and chunks averaged."""
        num_averaged = self._butterfly.num_averaged if self._butterfly is not None else 0
        return num_averaged + sum(stream.bytes_sent + stream.bytes_received for stream in self.streams.values())

    def rate_of(self, rank: int) -> float:
        """Bytes per second that came from a member; 0 if nothing did."""
        stream = self.streams.get(rank)
        moving_s = stream.last_received - self._began_at if stream is not None else 0.0
        return stream.bytes_received / moving_s if stream is not None and moving_s > 0 else 0.0

    def late_s(self) -> float:
        """Seconds that bytes already sent may still take."""
        return max(self.deadline - self._loop.time(), self.config.stream_timeout_s)

    async def _average(self, butterfly: Butterfly) -> None:
        """Run the all-reduce; a member whose control connection breaks counts as lost."""
        group, rank = self.contribution.group, self.contribution.rank
        name, is_whole = stream_id(group, self.number, self.members), False
        monitor = StragglerMonitor(self.endpoint, group, rank, butterfly, self.streams, self.ends_at, self.hurried)
        opening: dict[int, asyncio.Task[RoundStream]] = {}
        watching: list[asyncio.Task[None]] = []
        self.endpoint.on_lost.append(self._on_lost)
        try:
            with self.endpoint.uplink.shared() as self._share, ExitStack() as held:
                for other in butterfly.partners:
                    held.enter_context(self.endpoint.held(group.members[other].peer_id))
                    opening[other] = self._loop.create_task(self._connect(other, name, butterfly.num_bytes_with(other)))
                    watching.append(self._watchers.spawn(monitor.watch(other), name=group.members[other].peer_id))
                await butterfly.run(opening)
                is_whole = not butterfly.faults
                if self._share.streams.keys() == {stream.stream for stream in self.streams.values()}:
                    self.rate = self._share.backlog.rate
        finally:
            for task in opening.values():
                task.cancel()
            for watcher in watching:
                self._watchers.cancel(watcher)
            last_received = max((stream.last_received for stream in self.streams.values()), default=-math.inf)
            self.was_moving = not is_whole and self._loop.time() - last_received < ANSWER_S
            self.endpoint.on_lost.remove(self._on_lost)
            self.partners.end(name)
            for other, stream in self.streams.items():
                self.num_bytes_sent += stream.bytes_sent
                self.num_bytes_received += stream.bytes_received
                is_used_up = other in butterfly.done_with - butterfly.faults.keys() and stream.remote not in self._lost
                self.partners.give_back(stream, is_used_up=is_used_up, within_s=self.late_s())
            # last, as a cancellation may end it here
            await asyncio.gather(*opening.values(), *watching, return_exceptions=True)

    async def _connect(self, other: int, name: bytes, num_bytes: int) -> RoundStream:
        group, within_s = self.contribution.group, self.config.stream_timeout_s
        if other in self.hurried:
            least_s = ROUND_TRIPS * self.endpoint.rtt_s(group.members[other].peer_id)
            within_s = min(max(least_s, LOOK_S), ANSWER_S)
        stream = await self.partners.connect(group, self.contribution.rank, other, num_bytes, name, within_s)
        self.streams[other] = stream
        if self._share is not None:
            self._share.add(stream.stream, num_bytes)
        if stream.remote in self._lost:
            stream.abort()
        return stream

    def _on_lost(self, peer_id: PeerId) -> None:
        self._lost.add(peer_id)
        for stream in self.streams.values():
            if stream.remote == peer_id:
                stream.abort()
