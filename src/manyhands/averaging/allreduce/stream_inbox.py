"""Streams that other members open, for one round or for several in a row."""

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
"""Limit of streams that were opened ahead and name no round yet; one for each peer."""
"""The same limit for streams kept from the last round."""
UNNAMED_S = 120.0


class StreamInbox:
    """Holds bulk streams from other members until a round takes them; they may come before the group is known."""

    def __init__(self, endpoint: RunEndpoint, config: AveragingConfig) -> None:
        self._endpoint = endpoint
        self._config = config
        self._waiting: dict[tuple[bytes, PeerId], asyncio.Future[Stream]] = {}
        self._unnamed: dict[PeerId, Stream] = {}  # opened ahead
        self._kept: dict[PeerId, Stream] = {}  # from the last round
        self._in_round: dict[Stream, asyncio.Future[None]] = {}  # done when it was used to its end and is kept
        self._ended: deque[bytes] = deque(maxlen=REMEMBERED_GROUPS)
        endpoint.accept_bulk(STREAM_KIND, self._on_stream)
        endpoint.on_lost.append(self._on_lost)

    def close(self) -> None:
        self._endpoint.refuse_bulk(STREAM_KIND)
        if self._on_lost in self._endpoint.on_lost:
            self._endpoint.on_lost.remove(self._on_lost)

    async def take(self, group_id: bytes, peer_id: PeerId) -> Stream:
        """Wait for a member's stream for a round.

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
        """Release a round's streams, so that no member waits for this peer on them."""
        self._ended.append(group_id)
        for key, future in list(self._waiting.items()):
            if key[0] == group_id:
                self._drop(future)

    def _drop(self, future: asyncio.Future[Stream]) -> None:
        if future.done() and not future.cancelled() and future.exception() is None:
            self._endpoint.release(future.result())

    def keep(self, stream: Stream) -> bool:
        """Keep a stream that a round has used up to its end for the next one; False if it is not kept."""
        used = self._in_round.get(stream)
        if used is None or used.done() or len(self._kept) >= MAX_UNNAMED:
            return False
        used.set_result(None)
        return True

    def lose(self, peer_id: PeerId) -> None:
        """Another member has lost a peer: without a connection to that peer, stop waiting for its stream."""
        if not self._endpoint.is_connected(peer_id):
            self._on_lost(peer_id)

    def _on_lost(self, peer_id: PeerId) -> None:
        if (kept := self._kept.get(peer_id)) is not None:
            kept.abort()
        for (_, awaited), future in self._waiting.items():
            if awaited == peer_id and not future.done():
                future.set_exception(PeerLost(peer_id, "it was lost before it opened its stream"))

    def _check_is_awaited(self, key: tuple[bytes, PeerId]) -> None:
        """Stop waiting for a member's stream when it has opened one for another round."""
        if key in self._waiting:
            return
        for (_, awaited), future in self._waiting.items():
            if awaited == key[1] and not future.done():
                future.set_exception(ProtocolViolation(awaited, "it opened a stream for another round"))

    async def _name_of(self, remote: PeerId, stream: Stream) -> bytes:
        """Read the round's name from a stream that was opened ahead."""
        if (former := self._unnamed.pop(remote, None)) is not None:
            former.abort()
        if len(self._unnamed) >= MAX_UNNAMED:
            raise ProtocolViolation(remote, "a stream ahead of its round, and there are too many of them")
        self._unnamed[remote] = stream
        try:
            return await _read_name(stream)
        finally:
            if self._unnamed.get(remote) is stream:
                del self._unnamed[remote]

    def _future(self, key: tuple[bytes, PeerId]) -> asyncio.Future[Stream]:
        if key not in self._waiting:
            self._waiting[key] = asyncio.get_running_loop().create_future()
        return self._waiting[key]

    async def _on_stream(self, remote: PeerId, header: bytes, stream: Stream) -> None:
        try:
            name = msgspec.msgpack.decode(header, type=StreamHeader).group_id
        except UNREADABLE as error:
            raise ProtocolViolation(remote, "a stream header that cannot be read") from error
        name = name or await self._name_of(remote, stream)
        while await self._is_kept_after(name, remote, stream):
            if (former := self._kept.get(remote)) is not None:
                former.abort()
            self._kept[remote] = stream
            try:
                name = await _read_name(stream)
            finally:
                if self._kept.get(remote) is stream:
                    del self._kept[remote]

    async def _is_kept_after(self, name: bytes, remote: PeerId, stream: Stream) -> bool:
        """Give a stream to a round; returns whether another round may follow on it."""
        key = (name, remote)
        if name in self._ended:
            return False
        self._check_is_awaited(key)
        future = self._future(key)
        if future.done():
            raise _too_late(remote, future)
        future.set_result(stream)
        used = self._in_round[stream] = asyncio.get_running_loop().create_future()
        closing = asyncio.get_running_loop().create_task(stream.wait_closed())
        try:  # from here on the round owns the stream, and closes or keeps it
            async with time_limit(self._config.averaging_timeout_s, "for a round to end"):
                await asyncio.wait([used, closing], return_when=asyncio.FIRST_COMPLETED)
            return used.done()
        finally:
            del self._in_round[stream]
            if self._waiting.get(key) is future:
                del self._waiting[key]
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)


def _too_late(remote: PeerId, future: asyncio.Future[Stream]) -> ProtocolViolation | PeerLost:
    """Why a stream is refused: its round has one from the sender already, or has just given up waiting."""
    if future.cancelled():
        return PeerLost(remote, "its stream came after the round was over here")
    if (error := future.exception()) is not None:
        return PeerLost(remote, f"its stream came after it was given up: {error}")
    return ProtocolViolation(remote, "a second stream for one round")


async def _read_name(stream: Stream) -> bytes:
    name = bytearray(NAME_BYTES)
    async with time_limit(UNNAMED_S, "learning what a stream is for"):
        await stream.receive_into(memoryview(name))
    return bytes(name)
