"""Sending what is made piece by piece, and using what comes piece by piece.

An iterator's work, such as encoding the next piece or decoding the last one, is done beside the loop. Streams that have
a thread of their own for each direction do it there, without going back to the loop in between.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from manyhands.runtime.executor import run_to_end


class Piecewise:
    """What a stream does that has no better way: it asks an executor for each piece."""

    @abstractmethod
    async def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        """As :meth:`manyhands.transport.api.Stream.send`."""

    @abstractmethod
    async def receive_into(self, view: memoryview) -> None:
        """As :meth:`manyhands.transport.api.Stream.receive_into`."""

    @abstractmethod
    def abort(self) -> None:
        """As :meth:`manyhands.transport.api.Stream.abort`."""

    async def send_each(self, pieces: Iterator[memoryview]) -> None:
        """As :meth:`manyhands.transport.api.Stream.send_each`."""
        try:
            while (piece := await run_to_end(next, pieces, None)) is not None:
                await self.send(piece)
        except BaseException:  # nobody could tell where the next message begins
            self.abort()
            raise

    async def receive_each(self, views: Iterator[memoryview]) -> None:
        """As :meth:`manyhands.transport.api.Stream.receive_each`."""
        try:
            while (view := await run_to_end(next, views, None)) is not None:
                await self.receive_into(view)
        except BaseException:
            self.abort()
            raise
