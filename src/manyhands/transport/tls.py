"""TCP with mutual TLS 1.3, on asyncio.

Every outcome of a dial is one of :class:`manyhands.base.errors.DialReason`, so that a person can act on it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl

from manyhands.base.address import Address
from manyhands.base.deadline import time_limit
from manyhands.base.errors import DialFailed, DialReason, PeerLost, Timeout
from manyhands.base.identity import Identity
from manyhands.runtime.tasks import TaskOwner
from manyhands.transport import tcp
from manyhands.transport.api import OnStream
from manyhands.transport.certificate import ALPN, client_context, server_context
from manyhands.transport.tls_stream import TlsStream

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
ACCEPT_PAUSE_S = 0.5  # when the system has no sockets left


class TlsListener:
    """An open TCP port; each handshaken stream is handed to ``on_stream`` in a task of its own."""

    def __init__(self, identity: Identity, on_stream: OnStream, sockets: list[socket.socket]) -> None:
        self.addresses = [Address.of(*sock.getsockname()[:2]) for sock in sockets]
        self._identity = identity
        self._on_stream = on_stream
        self._sockets = sockets
        self._context = server_context(identity)
        self._accepted: set[socket.socket] = set()  # whose task has not begun yet
        self._streams: set[TlsStream] = set()
        self._tasks = TaskOwner("listener")
        for sock in sockets:
            self._resume(sock)

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, where = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            logger.warning("cannot accept connections: %s; trying again in %.3g s", error.strerror, ACCEPT_PAUSE_S)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listening)
            loop.call_later(ACCEPT_PAUSE_S, self._resume, listening)
            return
        sock.setblocking(False)
        self._accepted.add(sock)
        self._tasks.spawn(self._serve(sock), name=f"stream from {where[0]}")

    async def _serve(self, sock: socket.socket) -> None:
        self._accepted.discard(sock)  # asyncio closes it from now on
        try:
            stream = await self._handshake(sock)
        except (Timeout, OSError) as error:  # all errors of TLS are OSErrors
            logger.debug("no handshake: %s", error)
            return
        self._streams.add(stream)
        try:
            if self._admit(stream):
                await self._on_stream(stream)
        except PeerLost as error:
            logger.debug("%s", error)
        finally:
            self._streams.discard(stream)
            stream.abort()

    async def _handshake(self, sock: socket.socket) -> TlsStream:
        loop = asyncio.get_running_loop()
        async with time_limit(HANDSHAKE_TIMEOUT_S, "in the TLS handshake"):
            _, stream = await loop.connect_accepted_socket(TlsStream, sock, ssl=self._context)
        return stream

    def _admit(self, stream: TlsStream) -> bool:
        remote = stream.certified_peer_id()
        if remote is None or stream.selected_alpn != ALPN or remote == self._identity.peer_id:
            return False
        stream.remote = remote
        return True

    async def close(self) -> None:
        while self._sockets:
            listening = self._sockets.pop()
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        for stream in self._streams:
            stream.abort()
        await self._tasks.close()
        while self._accepted:
            self._accepted.pop().close()


class TlsTransport:
    """Dials and listens as one identity."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self._client_context = client_context(identity)

    async def listen(self, address: Address, on_stream: OnStream) -> TlsListener:
        return TlsListener(self.identity, on_stream, await tcp.listen(address))

    async def dial(self, address: Address, timeout_s: float) -> TlsStream:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        sock = await tcp.connect(address, timeout_s)
        try:
            async with time_limit(deadline - loop.time(), f"in the TLS handshake with {address}"):
                _, stream = await loop.create_connection(
                    TlsStream, sock=sock, ssl=self._client_context, server_hostname=""
                )
        except Timeout as error:
            detail = "TCP connects, but no TLS handshake follows"
            raise DialFailed(str(address), DialReason.TIMED_OUT, detail) from error
        except ssl.SSLCertVerificationError as error:
            detail = "a TLS server of something else"
            raise DialFailed(str(address), DialReason.NOT_MANYHANDS, detail) from error
        except OSError as error:  # all errors of TLS are OSErrors
            detail = "it accepts TCP connections, but does not answer in TLS 1.3"
            raise DialFailed(str(address), DialReason.NOT_MANYHANDS, detail) from error
        self._check(address, stream)
        return stream

    def _check(self, address: Address, stream: TlsStream) -> None:
        remote = stream.certified_peer_id()
        failure = None
        if stream.selected_alpn != ALPN:
            failure = DialFailed(str(address), DialReason.PROTOCOL_VERSION, f"this peer speaks {ALPN}")
        elif remote is None:
            failure = DialFailed(str(address), DialReason.NOT_MANYHANDS, "its key is not Ed25519")
        elif remote == self.identity.peer_id:
            failure = DialFailed(str(address), DialReason.ITSELF)
        elif address.peer_id not in (None, remote):
            failure = DialFailed(str(address), DialReason.WRONG_IDENTITY, f"found {remote}")
        if failure is not None or remote is None:
            stream.abort()
            assert failure is not None
            raise failure
        stream.remote = remote
