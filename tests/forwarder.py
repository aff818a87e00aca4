"""A TCP forwarder that cuts, as a tunnel does; it knows nothing of what it carries."""

from __future__ import annotations

import asyncio
import contextlib


class Forwarder:
    """Leads connections to a port of the loopback address to another port, on the running loop.

    Attributes:
        port: where it listens; another one after each :meth:`open`.
        num_carried: connections so far.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.num_carried = 0

    async def open(self) -> int:
        """Listen on a free port; return it."""
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self.port

    def cut(self) -> None:
        """Stop listening, and reset all connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_carried += 1
        with contextlib.suppress(OSError):
            onward_reader, onward = await asyncio.open_connection(*self._target)
            self._writers |= {writer, onward}
            try:
                await asyncio.gather(_copy(reader, onward), _copy(onward_reader, writer))
            finally:
                self._writers -= {writer, onward}
                onward.close()
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
