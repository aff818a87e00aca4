"""A tunnel that drops: for some seconds, a relay with a public address forwards TCP to a peer that asked for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading

from _star import enter

from manyhands.base.address import Address
from manyhands.base.errors import Unavailable

CONTROL_PORT = 4040


class Relay:
    """The service, in its own process and namespace. Each tunnel has a port of its own and is cut after ``drop_s``."""

    def __init__(self, namespace: str, drop_s: float) -> None:
        enter(namespace)
        self._drop_s = drop_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10.0)

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "0.0.0.0", CONTROL_PORT)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Open one tunnel; it ends with the connection that asked for it."""
        host = writer.get_extra_info("peername")[0]
        target = (host, int(await reader.readline()))
        carried: set[asyncio.StreamWriter] = set()

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            carried.add(writer)
            with contextlib.suppress(OSError):
                onward_reader, onward = await asyncio.open_connection(*target)
                carried.add(onward)
                try:
                    await asyncio.gather(_copy(reader, onward), _copy(onward_reader, writer))
                finally:
                    onward.close()
            writer.close()

        public = await asyncio.start_server(carry, "0.0.0.0", 0)
        writer.write(b"%d\n" % public.sockets[0].getsockname()[1])
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError, OSError):
            await asyncio.wait_for(reader.read(), self._drop_s)
        public.close()
        for one in (*carried, writer):
            one.transport.abort()

    def ready(self) -> None:
        """Called to wait for the start."""

    def close(self) -> None:
        with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(2.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2.0)

    async def _end(self) -> None:
        self._server.close()
        self._loop.set_exception_handler(lambda loop, context: None)  # streams complain of cancelled tasks
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RelayTunnel:
    """The peer's end; see :class:`manyhands.tunnels.Tunnel`."""

    name = "relay"

    def __init__(self, host: str) -> None:
        self._host = host
        self._writer: asyncio.StreamWriter | None = None
        self.num_dropped = 0

    async def open(self, target: Address) -> Address:
        try:
            self._reader, self._writer = await asyncio.open_connection(self._host, CONTROL_PORT)
            self._writer.write(b"%d\n" % target.port)
            port = int(await self._reader.readline())
        except (OSError, ValueError) as error:
            raise Unavailable(f"the relay does not answer: {error}") from error
        return Address.of(self._host, port)

    async def wait_dropped(self) -> str:
        with contextlib.suppress(OSError):
            await self._reader.read()
        self.num_dropped += 1
        return "the relay has closed it"

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
