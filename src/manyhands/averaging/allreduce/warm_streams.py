"""Keeps bulk streams open ahead of the round that uses them: a dial takes several round trips and much CPU.

Streams are opened ahead, or kept from the last round. The group is not known yet, so the header of a stream that is
opened ahead names no round. Its next bytes name one, and each further round is named in the same way. A stream that
stays unused is closed. So is one to a peer whose control connection broke: it may not carry anything any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

import msgspec

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import NAME_BYTES, STREAM_KIND, StreamHeader
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.errors import PeerError, Unavailable
from manyhands.base.identity import PeerId
from manyhands.transport.api import Stream

logger = logging.getLogger(__name__)

MAX_WARM = 16
"""Above this number of peers, a peer cannot predict its partners."""
PERIOD_S = 1.0
"""New peers are dialled at this period."""
UNUSED_S = 1.0
"""How long the streams are kept after the search, unless a round has begun."""
KEPT_S = 60.0
"""A stream that is unused for this long is closed; the other end waits longer."""


class WarmStreams:
    """The idle streams that this peer has dialled, one for each partner.

    Args:
        prepare: opens a control connection to a peer, which shows whether it is alive.

    Attributes:
        size_bytes: approximate bytes that one of them will carry in each direction.
    """

    def __init__(
        self, endpoint: RunEndpoint, config: AveragingConfig, prepare: Callable[[PeerId], Awaitable[None]]
    ) -> None:
        self._endpoint = endpoint
        self._config = config
        self._prepare = prepare
        self._open: dict[PeerId, tuple[Stream, float]] = {}  # opened ahead, and since when
        self._kept: dict[PeerId, tuple[Stream, asyncio.TimerHandle]] = {}  # from the last round, and its end
        self._num_users = 0
        self.size_bytes = 0

    @asynccontextmanager
    async def kept(self, expected: Callable[[], Mapping[PeerId, bool]]) -> AsyncIterator[None]:
        """Within the block, and a moment longer, keep streams open to the peers that this peer would dial in a round.

        Args:
            expected: the peers that should come, and whether each is in client mode.
        """
        loop = asyncio.get_running_loop()
        self._num_users += 1
        opening = loop.create_task(self._keep(expected))
        try:
            yield
        finally:
            self._num_users -= 1
            opening.cancel()
            [outcome] = await asyncio.gather(opening, return_exceptions=True)
            if isinstance(outcome, Exception):  # rounds dial for themselves then, but log it
                logger.error("no streams were opened ahead of a round", exc_info=outcome)
            loop.call_later(UNUSED_S, self._drop_unused)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let a round take streams within the block; those that it leaves are closed after it."""
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            self._drop_unused()

    def _drop_unused(self) -> None:
        if not self._num_users:
            for stream, _ in self._open.values():
                self._endpoint.release(stream)
            self._open.clear()

    async def _keep(self, expected: Callable[[], Mapping[PeerId, bool]]) -> None:
        own_id, is_client = self._endpoint.peer_id, self._endpoint.client_mode
        while True:
            others = expected()
            if len(others) <= MAX_WARM:
                hosts = [peer_id for peer_id, is_other_client in others.items() if not is_other_client]
                await self._open_to([peer_id for peer_id in hosts if is_client or own_id < peer_id])
            await asyncio.sleep(PERIOD_S)

    async def _open_to(self, peer_ids: Iterable[PeerId]) -> None:
        """Dial the peers without a stream; one that cannot be dialled is left to the round."""
        now = asyncio.get_running_loop().time()
        for peer_id, (_, since) in list(self._open.items()):
            if now - since > KEPT_S:
                self._drop(peer_id)
        known = self._open.keys() | self._kept.keys()
        await asyncio.gather(*(self._dial(peer_id) for peer_id in peer_ids if peer_id not in known))

    async def take(self, peer_id: PeerId, name: bytes) -> Stream | None:
        """The stream to a peer, for the round of this name; None if no open one exists."""
        while len(name) == NAME_BYTES and (stream := self._pop(peer_id)) is not None:
            try:
                await stream.send(name)
            except BaseException as error:
                self._endpoint.release(stream)
                if not isinstance(error, (Unavailable, PeerError)):
                    raise
            else:
                return stream
        return None

    def _pop(self, peer_id: PeerId) -> Stream | None:
        if peer_id in self._kept:
            stream, timer = self._kept.pop(peer_id)
            timer.cancel()
            return stream
        return self._open.pop(peer_id)[0] if peer_id in self._open else None

    def keep(self, stream: Stream) -> bool:
        """Keep a stream that a round has used up to its end for the next one; False if there is no room."""
        peer_id = stream.remote
        if len(self._kept) >= MAX_WARM or peer_id in self._kept or not self._endpoint.is_connected(peer_id):
            return False
        timer = asyncio.get_running_loop().call_later(KEPT_S, self._drop, peer_id)
        self._kept[peer_id] = stream, timer
        return True

    def on_lost(self, peer_id: PeerId) -> None:
        """The control connection to a peer was lost."""
        self._drop(peer_id)

    def drop_all(self) -> None:
        """Close all streams; no round uses them any more."""
        for peer_id in [*self._open, *self._kept]:
            self._drop(peer_id)

    async def _dial(self, peer_id: PeerId) -> None:
        header = msgspec.msgpack.encode(StreamHeader(b""))
        try:
            await self._prepare(peer_id)
            stream = await self._endpoint.open_bulk(
                peer_id, STREAM_KIND, header, self._config.stream_timeout_s, size_bytes=self.size_bytes
            )
        except (Unavailable, PeerError) as error:
            logger.debug("no stream to peer %s ahead of the round: %s", peer_id, error)
        else:
            self._open[peer_id] = (stream, asyncio.get_running_loop().time())

    def _drop(self, peer_id: PeerId) -> None:
        while (stream := self._pop(peer_id)) is not None:
            self._endpoint.release(stream)
