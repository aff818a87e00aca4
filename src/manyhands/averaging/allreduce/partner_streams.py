"""The streams between a member of a round and its partners: who dials whom, and how both know that the other lives.

Dialling a stream takes several round trips, and much CPU. So both ends keep it after a round, and the next round sends
its name on it first. A stream that no round uses for a while is closed, and so is one to a peer whose control
connection was lost: nobody knows then whether it still carries anything.
"""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

import msgspec

from manyhands.averaging.allreduce.stream_inbox import StreamInbox
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import (
    ASK_VERDICT,
    NAME_BYTES,
    NOBODY,
    STREAM_KIND,
    Group,
    Member,
    StreamHeader,
    VerdictQuery,
)
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.errors import PeerError, RoundAborted, Unavailable
from manyhands.base.identity import PeerId
from manyhands.runtime import TaskOwner
from manyhands.transport.api import Stream

PROBE_AFTER_S = 0.3
"""A partner that has not opened its stream by then is looked for."""

MAX_KEPT = 16
"""Streams are kept in groups of up to so many others: in larger ones each member meets others in each round."""
KEPT_S = 60.0
"""A stream that was not used for so long is closed; the other end waits for longer."""


class PartnerStreams:
    """Opens, awaits and closes the streams of one peer's rounds.

    Args:
        inbox: gets those that partners open.
        tasks: close streams in the background.
    """

    def __init__(self, endpoint: RunEndpoint, inbox: StreamInbox, config: AveragingConfig, tasks: TaskOwner) -> None:
        self._endpoint = endpoint
        self._inbox = inbox
        self._config = config
        self._tasks = tasks
        self._kept: dict[PeerId, tuple[Stream, asyncio.TimerHandle]] = {}  # that this peer has dialled, and their ends
        self._dialled: set[Stream] = set()  # of those that rounds use now
        self._moved: WeakKeyDictionary[Stream, tuple[int, int]] = WeakKeyDictionary()
        endpoint.on_lost.append(self._drop)

    def close(self) -> None:
        """No round uses any stream any more."""
        for peer_id in list(self._kept):
            self._drop(peer_id)
        if self._drop in self._endpoint.on_lost:
            self._endpoint.on_lost.remove(self._drop)

    async def connect(self, group: Group, rank: int, other: int, num_bytes: int, stream_id: bytes) -> Stream:
        """Open or await the stream to a partner: a client dials, else the lower rank."""
        member = group.members[other]
        is_dialler = group.members[rank].is_client or (not member.is_client and rank < other)
        try:
            if not is_dialler:
                return await self._await_stream(member, stream_id)
            await self.make_sure_of(member.peer_id)
            if (stream := await self._take_kept(member.peer_id, stream_id)) is None:
                header = msgspec.msgpack.encode(StreamHeader(stream_id))
                stream = await self._endpoint.open_bulk(
                    member.peer_id, STREAM_KIND, header, self._config.stream_timeout_s, size_bytes=num_bytes
                )
        except (Unavailable, PeerError) as error:
            raise RoundAborted(f"no stream to a member: {error}", [member.peer_id]) from error
        self._dialled.add(stream)
        return stream

    async def _await_stream(self, member: Member, stream_id: bytes) -> Stream:
        """The stream that a partner opens; one that died before it did so has perhaps never been connected."""
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
        """Have a control connection to a partner: its heartbeats show both ends whether the other is alive."""
        if not self._endpoint.is_connected(peer_id):
            query = VerdictQuery(NOBODY)
            await self._endpoint.call(peer_id, ASK_VERDICT, query, self._config.stream_timeout_s)

    def keep(self, group: Group, stream: Stream) -> bool:
        """Have a stream for the next round: nothing more travels on it in this one. False if it is to be let go."""
        if len(group.members) > MAX_KEPT + 1 or self._tasks.is_closed:
            return False
        is_kept = self._keep_dialled(stream) if stream in self._dialled else self._inbox.keep(stream)
        if is_kept:
            self._dialled.discard(stream)
            self._moved[stream] = stream.bytes_sent, stream.bytes_received
        return is_kept

    def _keep_dialled(self, stream: Stream) -> bool:
        peer_id = stream.remote
        if len(self._kept) >= MAX_KEPT or peer_id in self._kept or not self._endpoint.is_connected(peer_id):
            return False
        self._kept[peer_id] = stream, asyncio.get_running_loop().call_later(KEPT_S, self._drop, peer_id)
        return True

    async def _take_kept(self, peer_id: PeerId, name: bytes) -> Stream | None:
        """The stream to a peer from an earlier round, for the round of this name; None if there is none that lives."""
        if len(name) != NAME_BYTES or (stream := self._pop(peer_id)) is None:
            return None
        try:
            await stream.send(name)
        except BaseException as error:
            self._endpoint.release(stream)
            if isinstance(error, (Unavailable, PeerError)):
                return None
            raise
        return stream

    def _pop(self, peer_id: PeerId) -> Stream | None:
        if peer_id not in self._kept:
            return None
        stream, timer = self._kept.pop(peer_id)
        timer.cancel()
        return stream

    def _drop(self, peer_id: PeerId) -> None:
        if (stream := self._pop(peer_id)) is not None:
            self._endpoint.release(stream)

    def moved_before(self, stream: Stream) -> tuple[int, int]:
        """Bytes that earlier rounds sent and received on a stream."""
        return self._moved.get(stream, (0, 0))

    def let_go(self, stream: Stream, within_s: float) -> None:
        """Close a stream in the background, so that what was sent still arrives."""
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
