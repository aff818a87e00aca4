"""A bulk stream of a round that notes when it sent how much."""

from __future__ import annotations

import asyncio

from manyhands.averaging.bandwidth import Send
from manyhands.base.identity import PeerId
from manyhands.transport.api import Stream


class MeteredStream:
    """Passes everything on.

    Args:
        receiver: the rank at the other end.
        sends: gets what was sent, when it has been sent.
    """

    def __init__(self, stream: Stream, receiver: int, sends: list[Send]) -> None:
        self._stream = stream
        self._receiver = receiver
        self._sends = sends

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
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._stream.send(*buffers)
        num_bytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        self._sends.append(Send(self._receiver, began, loop.time(), num_bytes))

    async def receive_into(self, view: memoryview) -> None:
        await self._stream.receive_into(view)

    async def close(self, timeout_s: float = 1.0) -> None:
        await self._stream.close(timeout_s)

    async def wait_closed(self) -> None:
        await self._stream.wait_closed()

    def abort(self) -> None:
        self._stream.abort()
