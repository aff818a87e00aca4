"""The base class of streams that wrap another stream."""

from __future__ import annotations

from collections.abc import Iterator

from manyhands.base.identity import PeerId
from manyhands.transport.api import Delivery, Stream


class PassingStream:
    """Forwards everything to another stream; subclasses override what they change."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    @property
    def is_bulk(self) -> bool:
        return self._stream.is_bulk

    @property
    def remote(self) -> PeerId:
        return self._stream.remote

    @property
    def remote_host(self) -> str:
        return self._stream.remote_host

    @property
    def bytes_sent(self) -> int:
        return self._stream.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._stream.bytes_received

    @property
    def last_received(self) -> float:
        return self._stream.last_received

    async def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        await self._stream.send(*buffers)

    async def receive_into(self, view: memoryview) -> None:
        await self._stream.receive_into(view)

    async def send_each(self, pieces: Iterator[memoryview]) -> None:
        await self._stream.send_each(pieces)

    async def receive_each(self, views: Iterator[memoryview]) -> None:
        await self._stream.receive_each(views)

    def delivery(self) -> Delivery | None:
        return self._stream.delivery()

    def pace(self, bytes_per_s: float) -> None:
        self._stream.pace(bytes_per_s)

    async def close(self, timeout_s: float = 1.0) -> None:
        await self._stream.close(timeout_s)

    async def wait_closed(self) -> None:
        await self._stream.wait_closed()

    def abort(self) -> None:
        self._stream.abort()
