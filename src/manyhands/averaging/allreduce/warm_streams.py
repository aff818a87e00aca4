"""Bulk streams that are there before the round that uses them: dialling one takes several round trips, and much CPU.

They are opened ahead, or kept from the round before. Nobody knows yet what the group will be, so the header of a stream
that is opened ahead names no round. Its next bytes do, once there is one; so it is with each further round. A stream
that is not used in the end is closed, and so is one to a peer whose control connection was lost: nobody knows then
whether it still carries anything.
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
"""With more peers than that nobody knows with whom each will exchange values."""
PERIOD_S = 1.0
"""Who has come since is dialled then."""
UNUSED_S = 1.0
"""After the search the streams are kept for so long, unless a round has begun."""
KEPT_S = 60.0
"""A stream that was not used for so long is closed; the other end waits for longer."""


class WarmStreams:
    """The streams that this peer has dialled, one for each partner, and that no round uses now.

    Args:
        prepare: makes sure of a control connection to a peer, which tells whether it lives.

    Attributes:
        size_bytes: about what one of them will carry each way.
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
        """Within the block, and a moment longer, have streams to those that this peer would dial in a round.

        Args:
            expected: who should come to it, and whether each is in client mode.
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
            if isinstance(outcome, Exception):  # rounds dial for themselves then, but somebody should know
                logger.error("no streams were opened ahead of a round", exc_info=outcome)
            loop.call_later(UNUSED_S, self._drop_unused)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A round takes streams within the block; those that it has not taken are closed then."""
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
        """Dial those to whom there is no stream; who cannot be dialled is left to the round."""
        now = asyncio.get_running_loop().time()
        for peer_id, (_, since) in list(self._open.items()):
            if now - since > KEPT_S:
                self._drop(peer_id)
        known = self._open.keys() | self._kept.keys()
        await asyncio.gather(*(self._dial(peer_id) for peer_id in peer_ids if peer_id not in known))

    async def take(self, peer_id: PeerId, name: bytes) -> Stream | None:
        """The stream to a peer, for the round of this name; None if there is none that lives."""
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
        """Have a stream that a round has used up to its end for the next one; whether there is room for it."""
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
        """No round uses them any more."""
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
