"""The streams that other members open for a round."""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import NAME_BYTES, STREAM_KIND, StreamHeader
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerLost, ProtocolViolation
from manyhands.base.identity import PeerId
from manyhands.rpc.frames import UNREADABLE
from manyhands.transport.api import Stream

REMEMBERED_GROUPS = 16
MAX_UNNAMED = 64
"""Streams that were opened ahead and say no round yet; one of each peer."""
UNNAMED_S = 120.0


class StreamInbox:
    """Bulk streams that other members opened, until the round takes them; they may come before the group is known."""

    def __init__(self, endpoint: RunEndpoint, config: AveragingConfig) -> None:
        self._endpoint = endpoint
        self._config = config
        self._waiting: dict[tuple[bytes, PeerId], asyncio.Future[Stream]] = {}
        self._unnamed: dict[PeerId, Stream] = {}
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

    def lose(self, peer_id: PeerId) -> None:
        """Another member has lost a peer; here nothing is known of one that is not connected."""
        if not self._endpoint.is_connected(peer_id):
            self._on_lost(peer_id)

    def _on_lost(self, peer_id: PeerId) -> None:
        for (_, awaited), future in self._waiting.items():
            if awaited == peer_id and not future.done():
                future.set_exception(PeerLost(peer_id, "it was lost before it opened its stream"))

    def _check_is_awaited(self, key: tuple[bytes, PeerId]) -> None:
        """A member that has gone to another round does not come to this one any more."""
        if key in self._waiting:
            return
        for (_, awaited), future in self._waiting.items():
            if awaited == key[1] and not future.done():
                future.set_exception(ProtocolViolation(awaited, "it opened a stream for another round"))

    async def _name_of(self, remote: PeerId, stream: Stream) -> bytes:
        """What a stream that was opened ahead is for, as soon as its owner knows."""
        if (former := self._unnamed.pop(remote, None)) is not None:
            former.abort()
        if len(self._unnamed) >= MAX_UNNAMED:
            raise ProtocolViolation(remote, "a stream ahead of its round, and there are too many of them")
        self._unnamed[remote] = stream
        name = bytearray(NAME_BYTES)
        try:
            async with time_limit(UNNAMED_S, "learning what a stream is for"):
                await stream.receive_into(memoryview(name))
        finally:
            if self._unnamed.get(remote) is stream:
                del self._unnamed[remote]
        return bytes(name)

    def _future(self, key: tuple[bytes, PeerId]) -> asyncio.Future[Stream]:
        if key not in self._waiting:
            self._waiting[key] = asyncio.get_running_loop().create_future()
        return self._waiting[key]

    async def _on_stream(self, remote: PeerId, header: bytes, stream: Stream) -> None:
        try:
            name = msgspec.msgpack.decode(header, type=StreamHeader).group_id
        except UNREADABLE as error:
            raise ProtocolViolation(remote, "a stream header that cannot be read") from error
        key = (name or await self._name_of(remote, stream), remote)
        if key[0] in self._ended:
            return
        self._check_is_awaited(key)
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
