"""Sends data while it is produced, and consumes data while it arrives, piece by piece.

An iterator encodes the next piece or decodes the last one outside the loop. Streams with a thread for each direction
run it there, without returning to the loop in between.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from manyhands.runtime.executor import run_to_end


class Piecewise:
    """The default implementation for streams: it runs the iterator on an executor for each piece."""

    @abstractmethod
    async def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        """See :meth:`manyhands.transport.api.Stream.send`."""

    @abstractmethod
    async def receive_into(self, view: memoryview) -> None:
        """See :meth:`manyhands.transport.api.Stream.receive_into`."""

    @abstractmethod
    def abort(self) -> None:
        """See :meth:`manyhands.transport.api.Stream.abort`."""

    async def send_each(self, pieces: Iterator[memoryview]) -> None:
        """See :meth:`manyhands.transport.api.Stream.send_each`."""
        try:
            while (piece := await run_to_end(next, pieces, None)) is not None:
                await self.send(piece)
        except BaseException:  # the receiver could not find the start of the next message
            self.abort()
            raise

    async def receive_each(self, views: Iterator[memoryview]) -> None:
        """See :meth:`manyhands.transport.api.Stream.receive_each`."""
        try:
            while (view := await run_to_end(next, views, None)) is not None:
                await self.receive_into(view)
        except BaseException:
            self.abort()
            raise
