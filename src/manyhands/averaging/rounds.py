"""One averaging round from end to end: group, all-reduce, verdict."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from blake3 import blake3

from manyhands.averaging.agreement import MIN_VOTING_S, Agreement
from manyhands.averaging.bandwidth import BandwidthMeter, Send
from manyhands.averaging.butterfly import Butterfly, bytes_of
from manyhands.averaging.codecs import codec_of_code, plan_of
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.matchmaking import Matchmaker, Roster
from manyhands.averaging.messages import (
    ASK_VERDICT,
    MAX_REASON_LENGTH,
    MAX_WEIGHT,
    STREAM_KIND,
    Group,
    RoundManifest,
    StreamHeader,
    VerdictQuery,
    Vote,
    readable_addresses,
)
from manyhands.averaging.metered import MeteredStream
from manyhands.base.deadline import time_limit
from manyhands.base.errors import (
    ConfigError,
    NothingToAverage,
    PeerError,
    PeerLost,
    ProtocolViolation,
    RoundAborted,
    Timeout,
    Unavailable,
)
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint
from manyhands.rpc.frames import UNREADABLE
from manyhands.runtime import TaskOwner
from manyhands.transport.api import Stream

logger = logging.getLogger(__name__)

REMEMBERED_GROUPS = 16
BYTES_PER_MBIT = 125_000
NO_WEIGHT = "no member has any samples"


@dataclass
class RoundMeter:
    """What a peer's attempts at a round cost; it adds up.

    Attributes:
        num_bytes_sent, num_bytes_received: on the streams between the members, before encryption.
        matchmaking_s, averaging_s, vote_s: seconds spent in each phase.
    """

    num_bytes_sent: int = 0
    num_bytes_received: int = 0
    matchmaking_s: float = 0.0
    averaging_s: float = 0.0
    vote_s: float = 0.0


@dataclass(frozen=True)
class CommittedRound:
    """A committed round.

    Attributes:
        averaged_N: the weighted mean, on the CPU, in the dtype of the vectors, bit-identical on all members. None when
            most members hold it and this one does not: its vector counted, but to follow the others it must load
            their state.
        manifest: who contributed, by which weights.
        seconds: from the call to the verdict.
        matchmaking_s: the part of it that was spent looking for the group.
    """

    averaged_N: torch.Tensor | None
    manifest: RoundManifest
    seconds: float
    matchmaking_s: float

    @property
    def num_members(self) -> int:
        return len(self.manifest.members)


class RoundRunner:
    """Averages flat vectors with the other peers of one run.

    Args:
        run_fingerprint: digest of what all peers of the run agreed on; who has another one is refused.
        roster: where this peer stands, and who else is expected.
        shapes: of the tensors that lie end to end in the vectors: small ones are never encoded with a loss. None if
            they are not to be told apart; then nothing is.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        run_id: str,
        run_fingerprint: bytes,
        roster: Roster,
        config: AveragingConfig,
        rng: random.Random,
        shapes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._config = config
        self._roster = roster
        self._shapes = shapes
        self._matchmaker = Matchmaker(endpoint, run_id, run_fingerprint, roster, config, rng)
        self._agreement = Agreement(endpoint, config)
        self._inbox = StreamInbox(endpoint, config)
        declared = config.bandwidth_mbit_s
        self._bandwidth = BandwidthMeter(declared * BYTES_PER_MBIT if declared is not None else None)
        self._sends: list[Send] = []  # of the round that is under way
        self._meter = RoundMeter()
        self._tasks = TaskOwner("rounds")

    async def close(self) -> None:
        await self._matchmaker.close()
        self._agreement.close()
        self._inbox.close()
        await self._tasks.close()

    async def average(
        self,
        flat_N: torch.Tensor,
        weight: float,
        *,
        timeout_s: float = math.inf,
        gather_s: float | None = None,
        meter: RoundMeter | None = None,
    ) -> CommittedRound:
        """Average ``flat_N`` over the group of the next round.

        Args:
            flat_N: finite float32 (or float64, on all members) on the CPU, contiguous; not written, and not to be
                changed before this returns.
            weight: samples behind the vector; a peer with weight 0 contributes nothing and gets the result.
            timeout_s: bound of this round, where it is less than ``averaging_timeout_s``.
            gather_s: how long to wait for those who are expected, instead of ``matchmaking_time_s``.
            meter: counts what the round costs, also if it is aborted.
        Raises:
            RoundAborted: no value was changed; the vector counts in the next attempt.
            NothingToAverage: likewise, as all members gave a weight of 0.
            ConfigError: the weight breaks its rule.
        """
        meter = self._meter = meter if meter is not None else RoundMeter()
        if not 0 <= weight <= MAX_WEIGHT:
            raise ConfigError(f"weight={weight} must be from 0 to {MAX_WEIGHT:.0f}; for example 32.0")
        loop = asyncio.get_running_loop()
        started = loop.time()
        timeout_s = min(timeout_s, self._config.averaging_timeout_s)
        deadline = started + timeout_s
        try:
            async with time_limit(timeout_s, "looking for a group"):
                group = await self._matchmaker.find_group(weight, self._bandwidth.bandwidth, gather_s)
        except (Timeout, PeerError) as error:
            raise RoundAborted(str(error)) from error
        finally:
            matchmaking_s = loop.time() - started
            meter.matchmaking_s += matchmaking_s
        self._sends = []
        with self._matchmaker.in_round(group), self._agreement.of(group):
            averaged_N, vote = await self._reduce(group, flat_N, deadline - loop.time())
            began_vote = loop.time()
            try:
                verdict = await self._agreement.conclude(group, vote, max(deadline - loop.time(), MIN_VOTING_S))
            finally:
                meter.vote_s += loop.time() - began_vote
            if verdict.manifest is None:
                for peer_id in verdict.blamed:
                    self._roster.report_missing(peer_id)
                if not any(member.weight > 0 for member in group.members):
                    raise NothingToAverage(verdict.reason, verdict.blamed)
                raise RoundAborted(verdict.reason, verdict.blamed)
        seconds = loop.time() - started
        if verdict.manifest.digest == vote.digest:
            self._bandwidth.add_round(self._sends, seconds - matchmaking_s)
        else:
            averaged_N = None
        return CommittedRound(averaged_N, verdict.manifest, seconds, matchmaking_s)

    async def _reduce(
        self,
        group: Group,
        flat_N: torch.Tensor,
        timeout_s: float,
    ) -> tuple[torch.Tensor | None, Vote]:
        """The averaged vector, and the vote for it; or None, and a vote that says why not."""
        rank = group.rank_of(self._endpoint.peer_id)
        assert rank is not None
        if not any(member.weight > 0 for member in group.members):
            return None, Vote(group.group_id, b"", NO_WEIGHT)
        shapes = self._shapes if self._shapes is not None else [flat_N.shape]
        plan = plan_of(shapes, codec_of_code(group.codec), dtype=flat_N.dtype)
        assert plan.numel == flat_N.numel(), "the tensors of the run are those in the vector"
        butterfly = Butterfly(group, rank, flat_N, plan)
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with time_limit(timeout_s, "averaging"):
                averaged_N = await self._while_wanted(group, self._exchange(group, rank, butterfly))
                digest = await loop.run_in_executor(None, _digest, averaged_N)
        except RoundAborted as error:
            return None, Vote(group.group_id, b"", error.reason[:MAX_REASON_LENGTH])
        except Timeout as error:
            return None, Vote(group.group_id, b"", str(error)[:MAX_REASON_LENGTH])
        finally:
            self._meter.averaging_s += loop.time() - began
        return averaged_N, Vote(group.group_id, digest)

    async def _while_wanted(self, group: Group, work: Coroutine[Any, Any, torch.Tensor]) -> torch.Tensor:
        """Do the work of a round until the others have decided it: nobody waits for what will not come any more."""
        loop = asyncio.get_running_loop()
        working, deciding = loop.create_task(work), loop.create_task(self._agreement.decided(group))
        try:
            await asyncio.wait([working, deciding], return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and deciding.result().manifest is not None:  # this member is late, perhaps a little
                await asyncio.wait([working], timeout=self._config.stream_timeout_s)
            if not working.done():
                raise RoundAborted(deciding.result().reason or "the others were done before this peer")
            return await working
        finally:
            for task in (working, deciding):
                task.cancel()
            await asyncio.gather(working, deciding, return_exceptions=True)

    async def _exchange(self, group: Group, rank: int, butterfly: Butterfly) -> torch.Tensor:
        """Run the all-reduce; a member whose control connection is lost (frozen, cut off) ends it."""
        streams: list[Stream] = []
        lost: set[PeerId] = set()

        def on_lost(peer_id: PeerId) -> None:
            lost.add(peer_id)
            for stream in streams:
                if stream.remote == peer_id:
                    stream.abort()

        async def connect(other: int) -> Stream:
            stream = await self._connect(group, rank, other, butterfly.num_bytes_with(other))
            streams.append(stream)
            if stream.remote in lost:
                stream.abort()
            return MeteredStream(stream, other, self._sends)

        self._endpoint.on_lost.append(on_lost)
        try:
            with ExitStack() as held:
                for other in butterfly.partners():
                    held.enter_context(self._endpoint.held(group.members[other].peer_id))
                return await butterfly.run(connect)
        finally:
            self._endpoint.on_lost.remove(on_lost)
            self._inbox.end(group.group_id)
            for stream in streams:
                self._meter.num_bytes_sent += stream.bytes_sent
                self._meter.num_bytes_received += stream.bytes_received
                self._let_go(stream)

    def _let_go(self, stream: Stream) -> None:
        """Close a stream in the background, so that what was sent still arrives."""
        closing = self._close_stream(stream)
        try:
            self._tasks.spawn(closing, name=f"closing a stream to {stream.remote}")
        except RuntimeError:  # this runner is closed, or its loop
            closing.close()
            self._endpoint.release(stream)

    async def _close_stream(self, stream: Stream) -> None:
        try:
            await stream.close(self._config.stream_timeout_s)
        finally:
            self._endpoint.release(stream)

    async def _connect(self, group: Group, rank: int, other: int, num_bytes: int) -> Stream:
        """Open or await the stream to a partner: a client dials, else the lower rank."""
        member = group.members[other]
        is_dialler = group.members[rank].is_client or (not member.is_client and rank < other)
        try:
            if not is_dialler:
                return await self._inbox.take(group.group_id, member.peer_id)
            self._endpoint.learn(member.peer_id, readable_addresses(member.addresses))
            await self._make_sure_of(group, member.peer_id)
            header = msgspec.msgpack.encode(StreamHeader(group.group_id))
            return await self._endpoint.open_bulk(
                member.peer_id, STREAM_KIND, header, self._config.stream_timeout_s, size_bytes=num_bytes
            )
        except (Unavailable, PeerError) as error:
            raise RoundAborted(f"no stream to a member: {error}", [member.peer_id]) from error

    async def _make_sure_of(self, group: Group, peer_id: PeerId) -> None:
        """Have a control connection to a partner: its heartbeats show both ends whether the other is alive."""
        if not self._endpoint.is_connected(peer_id):
            query = VerdictQuery(group.group_id)
            await self._endpoint.call(peer_id, ASK_VERDICT, query, self._config.stream_timeout_s)


class StreamInbox:
    """Bulk streams that other members opened, until the round takes them; they may come before the group is known."""

    def __init__(self, endpoint: Endpoint, config: AveragingConfig) -> None:
        self._endpoint = endpoint
        self._config = config
        self._waiting: dict[tuple[bytes, PeerId], asyncio.Future[Stream]] = {}
        self._ended: deque[bytes] = deque(maxlen=REMEMBERED_GROUPS)
        endpoint.accept_bulk(STREAM_KIND, self._on_stream)
        endpoint.on_lost.append(self._on_lost)

    def close(self) -> None:
        self._endpoint.refuse_bulk(STREAM_KIND)
        if self._on_lost in self._endpoint.on_lost:
            self._endpoint.on_lost.remove(self._on_lost)

    async def take(self, group_id: bytes, peer_id: PeerId) -> Stream:
        """The stream of a member for a round, when it comes.

        Raises:
            Timeout, PeerLost: it did not come.
        """
        key = (group_id, peer_id)
        future = self._future(key)
        try:
            async with time_limit(self._config.stream_timeout_s, f"waiting for the stream of peer {peer_id}"):
                return await future
        except BaseException:
            self._drop(future)  # it may have come in the same moment
            raise
        finally:
            self._waiting.pop(key, None)

    def end(self, group_id: bytes) -> None:
        """A round is over here: whoever waits for this peer on a stream of it shall not wait any more."""
        self._ended.append(group_id)
        for key, future in list(self._waiting.items()):
            if key[0] == group_id:
                self._drop(future)

    def _drop(self, future: asyncio.Future[Stream]) -> None:
        if future.done() and not future.cancelled() and future.exception() is None:
            self._endpoint.release(future.result())

    def _on_lost(self, peer_id: PeerId) -> None:
        for (_, awaited), future in self._waiting.items():
            if awaited == peer_id and not future.done():
                future.set_exception(PeerLost(peer_id, "it was lost before it opened its stream"))

    def _future(self, key: tuple[bytes, PeerId]) -> asyncio.Future[Stream]:
        if key not in self._waiting:
            self._waiting[key] = asyncio.get_running_loop().create_future()
        return self._waiting[key]

    async def _on_stream(self, remote: PeerId, header: bytes, stream: Stream) -> None:
        try:
            key = (msgspec.msgpack.decode(header, type=StreamHeader).group_id, remote)
        except UNREADABLE as error:
            raise ProtocolViolation(remote, "a stream header that cannot be read") from error
        if key[0] in self._ended:
            return
        future = self._future(key)
        if future.done():
            raise ProtocolViolation(remote, "a second stream for one round")
        future.set_result(stream)
        try:  # from here on the stream is the round's, which closes it
            async with time_limit(self._config.averaging_timeout_s, "for a round to end"):
                await stream.wait_closed()
        finally:
            if self._waiting.get(key) is future:
                del self._waiting[key]


def _digest(vector_N: torch.Tensor) -> bytes:
    """BLAKE3, which reads memory nearly three times as fast as SHA-256 here."""
    return blake3(bytes_of(vector_N), max_threads=1).digest()
