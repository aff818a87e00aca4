"""Limits of HTTP connections of strangers: their number, in all and by address, and how long they may be silent.

Needs uvicorn, of the extras ``web`` and ``data``.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from manyhands.transport.admission import source_of

MAX_CONNECTIONS = 1100
"""Most open connections: a thousand pages that stay open, and room for short requests beside them."""
MAX_CONNECTIONS_PER_ADDRESS = 256
"""Most open connections from one public address, or one /64 of IPv6: a quarter of all. A browser has one to six, a
trainer one. Other addresses have no limit of their own, as a reverse proxy makes all connections from one."""
REQUEST_TIMEOUT_S = 10.0
"""Longest time in seconds for the head of a request, from the connection or the first byte after an answer."""
UNREAD_TIMEOUT_S = 30.0
"""A client that reads nothing for this many seconds, although there is something to read, is disconnected."""

FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: 22\r\nRetry-After: 10\r\n"
    b"Connection: close\r\n\r\ntoo many connections\r\n"
)


class BoundedProtocol(H11Protocol):
    """Uvicorn's protocol, with these limits."""

    _source: str | None = None
    _request_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None

    @property
    def _is_answering(self) -> bool:
        return bool(self.cycle) and not self.cycle.response_complete  # no cycle before the first request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS or self._is_one_of_too_many():
            transport.write(FULL)
            transport.close()
            return
        self._request_timer = self.loop.call_later(REQUEST_TIMEOUT_S, self.transport.abort)

    def _is_one_of_too_many(self) -> bool:
        """Whether too many connections are from the public address of this one."""
        self._source = public_source(self.client)
        if self._source is None:
            return False
        sources = [getattr(other, "_source", None) for other in self.connections]
        return sources.count(self._source) > MAX_CONNECTIONS_PER_ADDRESS

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # refused
            return
        super().data_received(data)
        if self._is_answering:
            self._end_request_timer()
        elif self._request_timer is None:  # the first bytes after an answer
            self._request_timer = self.loop.call_later(REQUEST_TIMEOUT_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_unread_timer()
        self._unread_timer = self.loop.call_later(UNREAD_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_unread_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_request_timer()
        self._end_unread_timer()
        super().connection_lost(exc)

    def _end_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _end_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None


def bounded_server(app: Any) -> uvicorn.Server:
    """A server of an ASGI application with these limits, which logs nothing itself; it needs a socket."""
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=logging.CRITICAL,  # mistakes of clients are not worth a line
        access_log=False,
        server_header=False,
        proxy_headers=False,  # who connects is who connects, whatever a header says
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


def public_source(client: tuple[str, int] | None) -> str | None:
    """Return the address of a client as :func:`.source_of` does; None unless it is public."""
    try:
        source = source_of(client[0]) if client is not None else ""
        address = ipaddress.ip_network(source).network_address
    except ValueError:
        return None
    return source if address.is_global else None
