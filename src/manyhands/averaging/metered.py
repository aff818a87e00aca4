"""A bulk stream as one round sees it: what earlier rounds moved does not count."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from manyhands.averaging.bandwidth import Send
from manyhands.transport.api import Stream
from manyhands.transport.passing import PassingStream


class MeteredStream(PassingStream):
    """Passes everything on, counts from 0 on, and notes when it sent how much.

    Args:
        receiver: the rank at the other end.
        sends: gets what was sent, when it has been sent.
        before: bytes that earlier rounds sent and received on it.
    """

    def __init__(self, stream: Stream, receiver: int, sends: list[Send], before: tuple[int, int]) -> None:
        super().__init__(stream)
        self._receiver = receiver
        self._sends = sends
        self._sent_before, self._received_before = before

    @property
    def bytes_sent(self) -> int:
        return super().bytes_sent - self._sent_before

    @property
    def bytes_received(self) -> int:
        return super().bytes_received - self._received_before

    async def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await super().send(*buffers)
        num_bytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        self._sends.append(Send(self._receiver, began, loop.time(), num_bytes))

    async def send_each(self, pieces: Iterator[memoryview]) -> None:
        loop = asyncio.get_running_loop()

        def metered() -> Iterator[memoryview]:
            for piece in pieces:  # making it takes no time of the link
                began = loop.time()
                yield piece
                self._sends.append(Send(self._receiver, began, loop.time(), len(piece)))

        await super().send_each(metered())
