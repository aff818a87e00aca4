"""The streams between a member and its partners: dialled or awaited, and kept for the next round.

::

    the side that dials                                   the side that accepts
    -------------------                                   ---------------------
    opens a stream, its header names the round    ──>     gives it to that round
    the round is done with it: keeps it                   keeps it, waits for a name
        sends the name of the next round          ──>     gives it to that round

Keeping a stream saves a dial, which takes several round trips and much CPU. The accepting side closes a stream that
stays unused. A stream to a peer whose control connection broke is closed, too: it may be as dead as that connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

import msgspec

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import NAME_BYTES, STREAM_KIND, Group, Member, StreamHeader, read_header
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.averaging.timing import MINUTE_S, TWO_DIALS_S, TWO_MINUTES_S
from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerError, PeerLost, ProtocolViolation, RoundAborted, Unavailable
from manyhands.base.identity import PeerId
from manyhands.runtime import TaskOwner
from manyhands.transport.api import Stream
from manyhands.transport.passing import PassingStream

MAX_KEPT = 64
"""Limit of the kept streams that a peer has dialled; the oldest is closed. As many as there are clients that reduce: to
open a stream from both ends again costs several round trips."""
MAX_UNNAMED = 512
"""Limit of the accepted streams that wait for the name of a round, at most one from each peer. Strangers may open
streams, and a reducer may have hundreds of clients."""
REMEMBERED_ROUNDS = 16
"""The last ended exchanges that are remembered: a stream that comes late for one of them is closed."""


def dials(group: Group, rank: int, other: int) -> bool:
    """Whether a member dials a partner, rather than wait for its stream: the only client does, else the lower rank."""
    member, partner = group.members[rank], group.members[other]
    return rank < other if member.is_client == partner.is_client else member.is_client


class RoundStream(PassingStream):
    """A stream while a round uses it; counts the bytes of this round only, with the name of the round.

    Args:
        before: bytes that earlier rounds sent and received on the stream.

    Attributes:
        kept: if the partner dialled the stream, a future; its result says that a later round may use the stream. Else
            None.
    """

    def __init__(
        self, stream: Stream, before: tuple[int, int] = (0, 0), kept: asyncio.Future[None] | None = None
    ) -> None:
        super().__init__(stream)
        self.stream = stream
        self.kept = kept
        self._before = before

    @property
    def bytes_sent(self) -> int:
        return super().bytes_sent - self._before[0]

    @property
    def bytes_received(self) -> int:
        return super().bytes_received - self._before[1]


class PartnerStreams:
    """Opens, accepts, keeps and closes the streams of one peer's rounds."""

    def __init__(self, endpoint: RunEndpoint, config: AveragingConfig, tasks: TaskOwner) -> None:
        self._loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self._config = config
        self._tasks = tasks
        self._idle: dict[PeerId, tuple[Stream, float]] = {}  # dialled; with the loop time since when; oldest first
        self._unnamed: dict[PeerId, Stream] = {}  # accepted; no round was named yet
        self._awaited: dict[tuple[bytes, PeerId], asyncio.Future[RoundStream]] = {}
        self._ended: deque[bytes] = deque(maxlen=REMEMBERED_ROUNDS)
        endpoint.accept_bulk(STREAM_KIND, self._on_stream)
        endpoint.on_lost.append(self._on_lost)

    def close(self) -> None:
        """Close the idle streams, and accept no more. The caller has ended all rounds before."""
        self._endpoint.refuse_bulk(STREAM_KIND)
        self.drop_idle(list(self._idle))
        if self._on_lost in self._endpoint.on_lost:
            self._endpoint.on_lost.remove(self._on_lost)

    # in a round

    async def connect(
        self, group: Group, rank: int, other: int, num_bytes: int, stream_id: bytes, within_s: float
    ) -> RoundStream:
        """Open or await the stream to a partner.

        Args:
            num_bytes: approximate bytes that it will carry in each direction.
            stream_id: names the exchange.
            within_s: limit of the wait.
        Raises:
            RoundAborted: no stream to the partner came up.
        """
        member = group.members[other]
        try:
            if not dials(group, rank, other):
                return await self._await_stream(member, stream_id, within_s)
            await self._make_sure_of(member.peer_id, within_s)
            if (stream := await self._take_idle(member.peer_id, stream_id)) is None:
                header = msgspec.msgpack.encode(StreamHeader(stream_id))
                opening = self._endpoint.open_bulk(member.peer_id, STREAM_KIND, header, within_s, size_bytes=num_bytes)
                stream = RoundStream(await opening)
        except (Unavailable, PeerError) as error:
            raise RoundAborted(f"no stream to a member: {error}", [member.peer_id]) from error
        return stream

    async def _await_stream(self, member: Member, stream_id: bytes, within_s: float) -> RoundStream:
        key = (stream_id, member.peer_id)
        future = self._future(key)
        try:
            async with time_limit(within_s, f"waiting for the stream of peer {member.peer_id}"):
                return await future
        except BaseException:
            self._release_awaited(future)  # the stream may have come at the same moment
            raise
        finally:
            self._awaited.pop(key, None)

    async def _make_sure_of(self, peer_id: PeerId, within_s: float) -> None:
        """Open a control connection to a partner: its heartbeats show both ends whether the other is alive."""
        if not self._endpoint.is_connected(peer_id):
            await self._endpoint.ping(peer_id, within_s)

    def give_up(self, peer_id: PeerId) -> None:
        """Stop waiting for the stream of a peer that has given up its round."""
        self._give_up(peer_id, PeerLost(peer_id, "it gave the round up before it opened its stream"))

    def end(self, stream_id: bytes) -> None:
        """End an exchange: release streams that came too late, so that their partners do not wait for this peer."""
        self._ended.append(stream_id)
        for (name, _), future in list(self._awaited.items()):
            if name == stream_id:
                self._release_awaited(future)

    def give_back(self, stream: RoundStream, *, is_used_up: bool, within_s: float) -> None:
        """Keep a stream for the next round, or close it in the background, so that bytes already sent still arrive.

        Args:
            is_used_up: whether all that was due has travelled on the stream, in both directions.
            within_s: limit for closing it.
        """
        if is_used_up and not self._tasks.is_closed and self._keep(stream):
            return
        closing = self._close(stream.stream, within_s)
        try:
            self._tasks.spawn(closing, name=f"closing a stream to {stream.remote}")
        except RuntimeError:  # this runner is closed, or its loop
            closing.close()
            self._endpoint.release(stream.stream)

    def _keep(self, stream: RoundStream) -> bool:
        if stream.kept is not None:  # the partner has dialled it
            is_kept = not stream.kept.done() and len(self._unnamed) < MAX_UNNAMED
            if is_kept:
                stream.kept.set_result(None)
            return is_kept
        if stream.remote in self._idle or not self._endpoint.is_connected(stream.remote):
            return False
        self._idle[stream.remote] = stream.stream, self._loop.time()
        if len(self._idle) > MAX_KEPT:
            self.drop_idle([next(iter(self._idle))])
        return True

    async def _close(self, stream: Stream, within_s: float) -> None:
        try:
            await stream.close(within_s)
        finally:
            self._endpoint.release(stream)

    # idle streams that this peer has dialled

    async def _take_idle(self, peer_id: PeerId, name: bytes) -> RoundStream | None:
        """Take the idle stream to a peer and name the round on it; None if no open stream to the peer is idle."""
        if len(name) != NAME_BYTES or peer_id not in self._idle:
            return None
        stream, since = self._idle.pop(peer_id)
        named = RoundStream(stream, (stream.bytes_sent, stream.bytes_received))
        is_named = False
        try:
            if self._loop.time() - since < MINUTE_S:
                await stream.send(name)
                is_named = True
        except (Unavailable, PeerError):
            pass
        finally:
            if not is_named:
                self._endpoint.release(stream)
        return named if is_named else None

    def drop_idle(self, peer_ids: Iterable[PeerId]) -> None:
        """Close the idle streams to some peers, such as the members of a round that was aborted.

        They may have closed their ends in mid-round, and would wait for another stream.
        """
        for peer_id in peer_ids:
            if peer_id in self._idle:
                self._endpoint.release(self._idle.pop(peer_id)[0])

    # streams that partners open; they may come before this peer knows the group

    async def _on_stream(self, remote: PeerId, header: bytes, stream: Stream) -> None:
        name = read_header(remote, header, StreamHeader).group_id
        before = (0, 0)
        while True:
            if not name:
                name = await self._next_name(remote, stream)
            if not await self._serve_round(name, remote, stream, before):
                return
            name = b""
            before = (stream.bytes_sent, stream.bytes_received)

    async def _next_name(self, remote: PeerId, stream: Stream) -> bytes:
        """Wait until the partner names the round that a stream is for. A newer stream of it replaces one that waits."""
        if (former := self._unnamed.pop(remote, None)) is not None:
            former.abort()
        if len(self._unnamed) >= MAX_UNNAMED:
            raise ProtocolViolation(remote, "a stream without a round, and there are too many of them")
        self._unnamed[remote] = stream
        name = bytearray(NAME_BYTES)
        try:
            # the partner does not use a stream that was idle for MINUTE_S
            async with time_limit(TWO_MINUTES_S, "learning what a stream is for"):
                await stream.receive_into(memoryview(name))
            return bytes(name)
        finally:
            if self._unnamed.get(remote) is stream:
                del self._unnamed[remote]

    async def _serve_round(self, name: bytes, remote: PeerId, stream: Stream, before: tuple[int, int]) -> bool:
        """Give a stream to a round until that ends; returns whether another round may follow on it."""
        key = (name, remote)
        if name in self._ended:
            return False
        if key not in self._awaited:
            self._give_up(remote, ProtocolViolation(remote, "it opened a stream for another round"))
        future = self._future(key)
        if future.cancelled() or (future.done() and future.exception() is not None):
            raise PeerLost(remote, "its stream came after it was given up")
        if future.done():
            raise ProtocolViolation(remote, "a second stream for one round")
        kept: asyncio.Future[None] = self._loop.create_future()
        future.set_result(RoundStream(stream, before, kept))
        closing = self._loop.create_task(stream.wait_closed())
        try:  # from here on the round owns the stream, and closes or keeps it
            async with time_limit(self._config.averaging_timeout_s + TWO_DIALS_S, "for a round to end"):
                await asyncio.wait([kept, closing], return_when=asyncio.FIRST_COMPLETED)
            return kept.done()
        finally:
            kept.cancel()
            if self._awaited.get(key) is future:
                del self._awaited[key]
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)

    def _future(self, key: tuple[bytes, PeerId]) -> asyncio.Future[RoundStream]:
        return self._awaited.setdefault(key, self._loop.create_future())

    def _release_awaited(self, future: asyncio.Future[RoundStream]) -> None:
        if future.done() and not future.cancelled() and future.exception() is None:
            self._endpoint.release(future.result().stream)

    def _give_up(self, peer_id: PeerId, error: Unavailable | PeerError) -> None:
        for (_, awaited), future in self._awaited.items():
            if awaited == peer_id and not future.done():
                future.set_exception(error)

    def _on_lost(self, peer_id: PeerId) -> None:
        self.drop_idle([peer_id])
        if (unnamed := self._unnamed.get(peer_id)) is not None:
            unnamed.abort()
        self._give_up(peer_id, PeerLost(peer_id, "it was lost before it opened its stream"))
