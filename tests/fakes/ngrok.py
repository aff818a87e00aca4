"""Stands in for the package ``ngrok`` (1.4), as far as manyhands uses it: tests put its folder first on the path.

A tunnel is a real forwarder on the loopback address. The token decides what the service says; errors have the form of
those of the package: a ``ValueError`` with what failed and what the service said.

Attributes:
    sessions: all that were opened in this process.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from tests.forwarder import Forwarder

DROP_FILE = "FAKE_NGROK_DROP_FILE"
"""Environment variable: the first session drops as soon as this file is there."""

REFUSALS = {
    "token-refused": (
        "authentication failed: The authtoken you specified does not look like a proper ngrok tunnel authtoken.\r\n"
        "Your authtoken: token-refused\r\nInstructions: https://dashboard.ngrok.com/get-started/your-authtoken\r\n\r\n"
        "ERR_NGROK_105"
    ),
    "token-limited": (
        "authentication failed: Your account is limited to 1 simultaneous ngrok agent sessions.\r\n\r\nERR_NGROK_108"
    ),
}
LISTEN_REFUSALS = {
    "token-no-card": (
        "You must add a credit or debit card before you can use TCP endpoints on a free account. This card will NOT be "
        "charged.\r\nERR_NGROK_8013"
    ),
    "token-odd": "Something new.\r\nERR_NGROK_99999",
}
Handler = Callable[[str, str], object]

sessions: list[Session] = []
is_offline = False


class SessionBuilder:
    def authtoken(self, authtoken: str) -> SessionBuilder:
        self._token = authtoken
        return self

    def client_info(self, client_type: str, version: str, comments: str | None = None) -> SessionBuilder:
        return self

    def handle_disconnection(self, handler: Handler) -> SessionBuilder:
        self._handler = handler
        return self

    async def connect(self) -> Session:
        if is_offline or self._token == "token-offline":
            raise ValueError("failed to connect session", "failed to establish tcp connection")
        if self._token in REFUSALS:
            raise ValueError("failed to connect session", REFUSALS[self._token])
        session = Session(self._token, self._handler)
        sessions.append(session)
        if len(sessions) == 1 and DROP_FILE in os.environ:
            session.drop_at(Path(os.environ[DROP_FILE]))
        return session


class Session:
    def __init__(self, token: str, handler: Handler) -> None:
        self.token = token
        self.handler = handler
        self.forwarder: Forwarder | None = None
        self.is_closed = False

    def tcp_endpoint(self) -> TcpListenerBuilder:
        return TcpListenerBuilder(self)

    async def close(self) -> None:
        self.is_closed = True
        if self.forwarder is not None:
            self.forwarder.cut()

    def drop_at(self, file: Path) -> None:
        """Drop once the file is there."""
        if file.exists():
            self.drop()
        else:
            asyncio.get_running_loop().call_later(0.05, self.drop_at, file)

    def drop(self) -> None:
        """Break the session, as an outage does: the handler is called on another thread, and cancels the next one."""
        assert self.forwarder is not None
        self.forwarder.cut()

        def tell() -> None:
            try:
                self.handler("connect.ngrok-agent.com:443", "reconnecting: session closed")
            except ConnectionError:
                return
            raise AssertionError("the package would reconnect by itself, at an address that it does not tell")

        threading.Thread(target=tell, name="ngrok").start()


class TcpListenerBuilder:
    def __init__(self, session: Session) -> None:
        self._session = session

    async def listen_and_forward(self, url: str) -> Listener:
        if self._session.token in LISTEN_REFUSALS:
            raise ValueError("failed to start listener", LISTEN_REFUSALS[self._session.token])
        target = urlsplit(url)
        assert target.scheme == "tcp"
        assert target.hostname
        assert target.port
        self._session.forwarder = Forwarder(target.hostname, target.port)
        return Listener(await self._session.forwarder.open())


class Listener:
    def __init__(self, port: int) -> None:
        self._port = port

    def url(self) -> str:
        return f"tcp://localhost:{self._port}"
