"""The streams between a member and its partners: which side dials, and how both see that the other is alive."""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

import msgspec

from manyhands.averaging.allreduce.stream_inbox import StreamInbox
from manyhands.averaging.allreduce.warm_streams import MAX_WARM, WarmStreams
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import ASK_VERDICT, NOBODY, STREAM_KIND, Group, Member, StreamHeader, VerdictQuery
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.errors import PeerError, RoundAborted, Unavailable
from manyhands.base.identity import PeerId
from manyhands.runtime import TaskOwner
from manyhands.transport.api import Stream

PROBE_AFTER_S = 0.3
"""After this time without a stream from a partner, check that the partner is alive."""


class PartnerStreams:
    """Opens, awaits and closes the streams of one peer's rounds.

    Args:
        inbox: holds the streams that partners open.
        tasks: close streams in the background.

    Attributes:
        warm: streams that were opened before the round.
    """

    def __init__(self, endpoint: RunEndpoint, inbox: StreamInbox, config: AveragingConfig, tasks: TaskOwner) -> None:
        self._endpoint = endpoint
        self._inbox = inbox
        self._config = config
        self._tasks = tasks
        self.warm = WarmStreams(endpoint, config, self.make_sure_of)
        self._dialled: set[Stream] = set()  # of those that rounds use now
        self._moved: WeakKeyDictionary[Stream, tuple[int, int]] = WeakKeyDictionary()
        endpoint.on_lost.append(self.warm.on_lost)

    def close(self) -> None:
        """Drop all streams; no round uses them any more."""
        self.warm.drop_all()
        if self.warm.on_lost in self._endpoint.on_lost:
            self._endpoint.on_lost.remove(self.warm.on_lost)

    async def connect(self, group: Group, rank: int, other: int, num_bytes: int, stream_id: bytes) -> Stream:
        """Open or await the stream to a partner: a client dials, else the lower rank."""
        member = group.members[other]
        is_dialler = group.members[rank].is_client or (not member.is_client and rank < other)
        try:
            if not is_dialler:
                return await self._await_stream(member, stream_id)
            await self.make_sure_of(member.peer_id)
            self.warm.size_bytes = num_bytes
            if (stream := await self.warm.take(member.peer_id, stream_id)) is None:
                header = msgspec.msgpack.encode(StreamHeader(stream_id))
                stream = await self._endpoint.open_bulk(
                    member.peer_id, STREAM_KIND, header, self._config.stream_timeout_s, size_bytes=num_bytes
                )
        except (Unavailable, PeerError) as error:
            raise RoundAborted(f"no stream to a member: {error}", [member.peer_id]) from error
        self._dialled.add(stream)
        return stream

    async def _await_stream(self, member: Member, stream_id: bytes) -> Stream:
        """Await a partner's stream; a partner that died first may never have had a connection."""
        loop = asyncio.get_running_loop()
        taking = loop.create_task(self._inbox.take(stream_id, member.peer_id))
        try:
            await asyncio.wait([taking], timeout=PROBE_AFTER_S)
            if not taking.done() and not member.is_client:
                await self.make_sure_of(member.peer_id)
            return await taking
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)

    async def make_sure_of(self, peer_id: PeerId) -> None:
        """Open a control connection to a partner: its heartbeats show both ends whether the other is alive."""
        if not self._endpoint.is_connected(peer_id):
            query = VerdictQuery(NOBODY)
            await self._endpoint.call(peer_id, ASK_VERDICT, query, self._config.stream_timeout_s)

    def keep(self, group: Group, stream: Stream) -> bool:
        """Keep a stream that this round is done with for the next one; False if it should be closed."""
        if len(group.members) > MAX_WARM + 1 or self._tasks.is_closed:
            return False
        is_kept = self.warm.keep(stream) if stream in self._dialled else self._inbox.keep(stream)
        if is_kept:
            self._dialled.discard(stream)
            self._moved[stream] = stream.bytes_sent, stream.bytes_received
        return is_kept

    def moved_before(self, stream: Stream) -> tuple[int, int]:
        """Bytes that earlier rounds sent and received on a stream."""
        return self._moved.get(stream, (0, 0))

    def let_go(self, stream: Stream, within_s: float) -> None:
        """Close a stream in the background, so that bytes already sent still arrive."""
        self._dialled.discard(stream)
        closing = self._close(stream, within_s)
        try:
            self._tasks.spawn(closing, name=f"closing a stream to {stream.remote}")
        except RuntimeError:  # this runner is closed, or its loop
            closing.close()
            self._endpoint.release(stream)

    async def _close(self, stream: Stream, within_s: float) -> None:
        try:
            await stream.close(within_s)
        finally:
            self._endpoint.release(stream)
