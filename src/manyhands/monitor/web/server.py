"""Serves the page, in a thread of its own with an event loop of its own: browsers never delay the peer."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading

from manyhands.base.text import reason_of
from manyhands.monitor.web.address import is_loopback, url_of
from manyhands.monitor.web.app import Api
from manyhands.monitor.web.page_files import page_files
from manyhands.monitor.web.source import Fill, Source
from manyhands.monitor.web.update_stream import UpdateStream
from manyhands.runtime import TaskOwner
from manyhands.transport.http_connections import bounded_server

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 1.0


class PageServer:
    """The page of a run, until :meth:`close`.

    Args:
        bound: from :func:`manyhands.monitor.web.bind`; closed with the server.
        fill: fills masks with the current parameters, if there is a model.
        join: the command with which visitors join the run; empty for none.
    Attributes:
        url: for a browser on this machine.
    """

    def __init__(self, source: Source, bound: socket.socket, fill: Fill | None = None, join: str = "") -> None:
        self.url = url_of(bound)
        self._bound = bound
        self._is_loopback = is_loopback(bound)
        page = page_files(has_model=fill is not None, join=join)
        self._stream = UpdateStream(source, page.version)
        api = Api(source, self._stream, page, fill)
        self._server = bounded_server(api.app(is_loopback=self._is_loopback))
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._main, name="manyhands page", daemon=True)

    def start(self) -> None:
        """Begin to answer, and log where."""
        self._thread.start()
        logger.info("The page of the run: %s", self.url)
        if not self._is_loopback:
            host, port = self._bound.getsockname()[:2]
            logger.warning(
                "Everybody who can reach this machine can read the page: it listens at %s, port %s", host, port
            )

    def close(self) -> bool:
        """End all connections and the thread; returns whether it has ended. A model that computes delays its end."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end)
            self._thread.join(CLOSE_TIMEOUT_S)
        self._bound.close()
        return not self._thread.is_alive()

    def _end(self) -> None:
        self._server.should_exit = True
        self._stream.close()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:  # noqa: BLE001 (the run goes on without the page)
            logger.error("The page of the run has ended: %s", reason_of(error))  # noqa: TRY400 (one line for a user)
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _serve(self) -> None:
        tasks = TaskOwner("page", on_failure=lambda _: self._end())
        tasks.spawn(self._stream.watch_forever(), name="watching for changes of the picture")
        try:
            await self._server.serve(sockets=[self._bound])
        finally:
            await tasks.close()
