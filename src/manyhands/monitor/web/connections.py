"""HTTP connections of strangers: their number, their silence and their unread answers are bounded."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 1100
"""Open ones in all: :data:`manyhands.monitor.web.app.MAX_STREAMS`, and room for short requests beside them."""
REQUEST_TIMEOUT_S = 10.0
"""From the connection to the end of the head of its first request."""
UNREAD_TIMEOUT_S = 30.0
"""A browser that reads nothing for this long, although there is something to read, is disconnected."""

FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: 22\r\nRetry-After: 10\r\n"
    b"Connection: close\r\n\r\ntoo many connections\r\n"
)


class BoundedProtocol(H11Protocol):
    """Uvicorn's protocol, with these bounds."""

    _timer: asyncio.TimerHandle | None = None

    @property
    def _has_asked(self) -> bool:
        return bool(self.cycle)  # None before the first request, whatever its annotation says

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.write(FULL)
            transport.close()
            return
        self._timer = self.loop.call_later(REQUEST_TIMEOUT_S, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if not self._has_asked:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():  # refused
            super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_timer()
        self._timer = self.loop.call_later(UNREAD_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        super().connection_lost(exc)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
