"""One member's averaging in one round: the means it holds, what is reduced again, and what is fetched in the end.

A member that lacks means when its round has committed fetches them::

    lacks some of them    holds the result
    ------------------    ----------------
    group, digest    ──>
                     <──  whether it was averaged again, digest of each piece
    which pieces     ──>
                     <──  those pieces

All is checked against the digest that the ballot committed, so any member may send it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import torch
from blake3 import blake3

from manyhands.averaging.allreduce.butterfly import Butterfly, InvalidContribution
from manyhands.averaging.allreduce.means import Contributions, Means, across_ballots, digest_of, digest_of_all
from manyhands.averaging.codecs import Feedbacks, Plan
from manyhands.averaging.commit.limits import MemberLimits, joined, usual_norm, witnessed
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.memory import Memory, bytes_of, empty_vector
from manyhands.averaging.messages import (
    MAX_REASON_LENGTH,
    Accusation,
    Digest,
    Group,
    Order,
    RoundManifest,
    Vote,
    read_header,
)
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.deadline import time_limit, while_moving
from manyhands.base.errors import PeerError, ProtocolViolation, RoundAborted, Timeout, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.structs import make_ready
from manyhands.runtime.executor import run_to_end
from manyhands.transport.api import Stream

logger = logging.getLogger(__name__)

MEANS_KIND = "averaging.means"
OPENING_S = 2.0
"""Time to reach a holder before the next one is asked."""
HOLDER_SILENT_S = 3.0
"""A holder that sends nothing for this long is given up: there are others."""
DIGEST_BYTES = 32  # of BLAKE3

Refill = Callable[[], torch.Tensor]
"""Returns this member's values again, in memory of their own; may take a while."""
RunExchange = Callable[[Group, int, Butterfly, bytes], Awaitable[object]]
"""Runs the butterfly of a group's member of this rank over its own streams, which these bytes identify."""

OUTSIZED = "are too large, or not finite, beside those of the others"
NO_WEIGHT = "no member has any samples"


@dataclass(eq=False, kw_only=True)
class Recovery:
    """Averages the whole vector first, then the parts that the leader orders; makes the vote after each.

    See :meth:`manyhands.averaging.rounds.RoundRunner.average` for the arguments.

    Attributes:
        everything: the first ballot's order: all members average the whole vector.
        results: what this member holds as a whole, by digest.
        outsized: ranks of members whose values are too large beside those of the others.
        struck: those of them that at least two reducers have found too large.
        usual_norm: of the members' values; 0 if they were not measured.
    """

    group: Group
    rank: int
    flat_N: torch.Tensor
    plan: Plan
    exchange: RunExchange
    memory: Memory
    refill: Refill | None
    feedbacks: Feedbacks | None
    limits: MemberLimits | None
    norm_before: float | None
    results: dict[bytes, Means] = field(default_factory=dict)
    outsized: set[int] = field(default_factory=set)
    struck: set[int] = field(default_factory=set)
    usual_norm: float = 0.0

    def __post_init__(self) -> None:
        members, numel = self.group.members, self.flat_N.numel()
        contributors = (rank for rank, member in enumerate(members) if member.weight > 0)
        self.everything = Order(0, list(range(len(members))), 0, numel)
        self._mean_N = self.flat_N if self.refill is not None else empty_vector(numel, self.flat_N.dtype)
        self._contributions = Contributions(numel, len(members), contributors)
        self._first: Means | None = None

    async def average(self, order: Order, timeout_s: float) -> Vote:
        """Average a part of the vector among the remaining members; returns the vote on the result."""
        if any(self._mean_N is means.averaged_N for means in self.results.values()):
            self._mean_N = self._mean_N.clone()  # that result may still be the one that is committed
        if order.ballot > 0 and self.refill is not None:
            self.flat_N, self.refill = await run_to_end(self.refill), None
        self._contributions.drop(order.start, order.stop)
        butterfly = Butterfly(
            self.group, self.rank, self.flat_N, self.plan,
            members=order.members, region=slice(order.start, order.stop), averaged_N=self._mean_N, memory=self.memory,
            feedbacks=self.feedbacks, is_measured=self.limits is not None,
        )  # fmt: skip
        if order.ballot == 0:
            self._first = butterfly.means()  # also if the others decide while this member still averages
        reason, own_fault = "", []
        try:
            if not any(self.group.members[rank].weight > 0 for rank in order.members):
                raise RoundAborted(NO_WEIGHT)
            async with time_limit(timeout_s, "averaging"):
                await self.exchange(self.group, self.rank, butterfly, stream_id(self.group, order.ballot))
        except (RoundAborted, Timeout) as error:
            reason = (error.reason if isinstance(error, RoundAborted) else str(error))[:MAX_REASON_LENGTH]
            if isinstance(error, InvalidContribution):  # its own values: no stream carries them
                own_fault = [Accusation(self.rank, reason, is_violation=True)]
        for chunk, reducer, present in butterfly.held():
            self._contributions.add(chunk.start, chunk.stop, reducer, present)
        outsized = self._find_outsized(butterfly, order.members)
        accusations = [*butterfly.faults.values(), *own_fault, *outsized]
        numel, ballot = self.flat_N.numel(), order.ballot
        missing = (0, numel) if outsized else self._contributions.missing()
        vote = Vote(self.group.group_id, b"", ballot=ballot, missing=missing, accusations=accusations, numel=numel)
        if missing[0] < missing[1] or own_fault:
            vote.reason = reason or "; ".join(said.reason for said in accusations[:3])[:MAX_REASON_LENGTH]
            return vote
        means = self.incomplete(spans_ballots=ballot > 0)
        assert means is not None
        if ballot > 0:  # a part of it came before, so that no butterfly has seen it all
            vote.digest = digest_of_all(await run_to_end(means.digests), spans_ballots=True)
        else:
            vote.digest = butterfly.digest()
        vote.parts = self._contributions.parts()
        self.results[vote.digest] = means
        return vote

    def _find_outsized(self, butterfly: Butterfly, here: Collection[int]) -> list[Accusation]:
        """Members with too large values; these are in every span's means, so all is averaged without them."""
        told, members = butterfly.norms(), self.group.members
        if self.limits is None or not told:
            return []
        weights = [member.weight if rank in here else 0.0 for rank, member in enumerate(members)]
        norms, at_least = joined(told, range(len(told))), 0.0
        if (usual := usual_norm(norms, weights)) < math.inf:
            self.usual_norm = max(self.usual_norm, usual)
        if self.norm_before is not None:  # means may be as good as 0 where values cancel each other
            at_least = self.norm_before or norms[self.rank]
        found, certain = witnessed(told, weights, self.limits, at_least=at_least)
        self.outsized |= found
        self.struck |= certain
        return [
            Accusation(rank, f"the values of peer {members[rank].peer_id} {OUTSIZED}", is_violation=True)
            for rank in sorted(found)
        ]

    def incomplete(self, spans_ballots: bool) -> Means | None:
        """What this member has of a result of the first ballot alone, or of more than one."""
        return across_ballots(self._mean_N) if spans_ballots else self._first


def stream_id(group: Group, ballot: int) -> bytes:
    """The id of a ballot's streams; for the first ballot it is the group's."""
    if ballot == 0:
        return group.group_id
    return blake3(msgspec.msgpack.encode((group.group_id, ballot))).digest(16)


class MeansHeader(msgspec.Struct):
    """Opens a stream to a member that may hold a result."""

    group_id: Digest
    digest: Digest


make_ready(MeansHeader)


class Fetching:
    """Serves the results of one peer's last round, and fetches what it lacks."""

    def __init__(self, endpoint: RunEndpoint, config: AveragingConfig) -> None:
        self._endpoint = endpoint
        self._config = config
        self._group: Group | None = None
        self._recovery: Recovery | None = None
        self._kept: dict[bytes, Means] = {}  # by digest
        self._serving: set[PeerId] = set()
        endpoint.accept_bulk(MEANS_KIND, self._on_stream)

    def close(self) -> None:
        self._endpoint.refuse_bulk(MEANS_KIND)
        self._kept.clear()

    @contextmanager
    def of(self, recovery: Recovery) -> Iterator[None]:
        """Serve this round's results within the block, and afterwards those that are kept."""
        self._kept.clear()
        self._group, self._recovery = recovery.group, recovery
        try:
            yield
        finally:
            self._recovery = None

    async def keep(self, means: Means, digest: bytes) -> None:
        """Keep a result until the next round for members that may still fetch it, without the caller's vector."""
        self._kept[digest] = await run_to_end(means.lasting)
        asyncio.get_running_loop().call_later(self._config.averaging_timeout_s, self._kept.pop, digest, None)

    async def fetch(
        self, recovery: Recovery, manifest: RoundManifest, doubtful: Sequence[PeerId], timeout_s: float
    ) -> Means | None:
        """Fetch the parts of the committed result that this member lacks; None if no member sends them in this time.

        The doubtful members are asked last.
        """
        members, rank = recovery.group.members, recovery.rank
        others = [*members[rank + 1 :], *members[:rank]]  # not all members ask the same one first
        holders = [member.peer_id for member in others if not member.is_client]
        holders.sort(key=lambda peer_id: (peer_id in doubtful, not self._endpoint.is_connected(peer_id)))
        try:
            async with time_limit(timeout_s, "fetching means"):
                for peer_id in holders:
                    try:
                        recovery.results[manifest.digest] = means = await self._fetch_from(peer_id, recovery, manifest)
                    except (Unavailable, PeerError) as error:
                        logger.info("the missing means cannot be fetched: %s", error)
                    else:
                        return means
        except Timeout as error:
            logger.info("the missing means cannot be fetched: %s", error)
        return None

    async def _fetch_from(self, peer_id: PeerId, recovery: Recovery, manifest: RoundManifest) -> Means:
        header = msgspec.msgpack.encode(MeansHeader(manifest.group_id, manifest.digest))
        stream = await self._endpoint.open_bulk(peer_id, MEANS_KIND, header, OPENING_S)
        try:
            return await while_moving(
                self._receive(stream, recovery, manifest),
                lambda: stream.bytes_received,
                at_least=1,
                within_s=HOLDER_SILENT_S,
                phase=f"waiting for the means that peer {peer_id} holds",
            )
        finally:
            self._endpoint.release(stream)

    async def _receive(self, stream: Stream, recovery: Recovery, manifest: RoundManifest) -> Means:
        kind = bytearray(1)
        await stream.receive_into(memoryview(kind))
        means = recovery.incomplete(spans_ballots=bool(kind[0]))
        if means is None:
            raise ProtocolViolation(stream.remote, "a result of an unknown kind")
        table = bytearray(DIGEST_BYTES * len(means.pieces))
        await stream.receive_into(memoryview(table))
        digests = [bytes(table[at : at + DIGEST_BYTES]) for at in range(0, len(table), DIGEST_BYTES)]
        if digest_of_all(digests, spans_ballots=means.spans_ballots) != manifest.digest:
            raise ProtocolViolation(stream.remote, "the digests are not those of what was committed")
        own = await run_to_end(means.digests)
        wanted = [mine != committed for mine, committed in zip(own, digests, strict=True)]
        await stream.send(bytes(wanted))
        for piece, digest, is_wanted in zip(means.pieces, digests, wanted, strict=True):
            if is_wanted and piece.numel():
                await stream.receive_into(bytes_of(piece))
                if await run_to_end(digest_of, piece) != digest:
                    raise ProtocolViolation(stream.remote, "means that are not what was committed")
        await run_to_end(means.decode)
        return means

    async def _on_stream(self, remote: PeerId, header: bytes, stream: Stream) -> None:
        request, group, means = read_header(remote, header, MeansHeader), self._group, None
        if group is not None and group.group_id == request.group_id and group.rank_of(remote) is not None:
            means = self._recovery.results.get(request.digest) if self._recovery is not None else None
            means = means or self._kept.get(request.digest)
        if means is None or remote in self._serving:
            return
        self._serving.add(remote)
        try:
            async with time_limit(self._config.averaging_timeout_s, f"sending means to peer {remote}"):
                await self._send(stream, means)
                await stream.wait_closed()  # by the other end, when all is there
        finally:
            self._serving.remove(remote)

    async def _send(self, stream: Stream, means: Means) -> None:
        await stream.send(bytes([means.spans_ballots]), *await run_to_end(means.digests))
        wanted = bytearray(len(means.pieces))
        await stream.receive_into(memoryview(wanted))
        for piece, is_wanted in zip(means.pieces, wanted, strict=True):
            if is_wanted and piece.numel():
                await stream.send(bytes_of(piece))
