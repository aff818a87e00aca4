"""TCP with mutual TLS 1.3, on asyncio.

Every outcome of a dial is one of :class:`manyhands.base.errors.DialReason`, so that a person can act on it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, cast

from manyhands.base.address import Address
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ConfigError, DialFailed, DialReason, PeerLost, Timeout
from manyhands.base.identity import Identity, PeerId
from manyhands.runtime.tasks import TaskOwner
from manyhands.transport.api import OnStream
from manyhands.transport.buffer import ReceiveBuffer
from manyhands.transport.certificate import ALPN, client_context, peer_id_of_certificate, server_context

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
RECEIVE_BACKLOG_BYTES = 256 * 1024
SEND_CHUNK_BYTES = 256 * 1024
"""What is encrypted in one go: about 0.2 ms of the loop's time."""

_FAMILIES = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}
_UNREACHABLE = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN}


class TlsStream(asyncio.BufferedProtocol):
    """One TLS connection. Made by asyncio; usable once the handshake is over."""

    remote: PeerId

    def __init__(self, on_secured: Callable[[TlsStream], None]) -> None:
        self.remote_host = ""
        self.bytes_sent = 0
        self.bytes_received = 0
        self._on_secured = on_secured
        self._buffer = ReceiveBuffer(RECEIVE_BACKLOG_BYTES, self._resume_reading)
        self._sending = asyncio.Lock()
        self._writable = asyncio.Event()
        self._writable.set()
        self._closed = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    # what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.remote_host = transport.get_extra_info("peername")[0]
        self._on_secured(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        view: memoryview = self._buffer.get_buffer()
        return view

    def buffer_updated(self, nbytes: int) -> None:
        self.bytes_received += nbytes
        self._buffer.updated(nbytes)
        if self._buffer.is_full and self._transport is not None:
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._buffer.end(PeerLost(self._remote_name(), f"connection closed{f' ({exc})' if exc else ''}"))
        self._writable.set()
        if not self._closed.done():
            self._closed.set_result(None)

    # what the layers above call

    @property
    def selected_alpn(self) -> str | None:
        assert self._transport is not None
        alpn: str | None = self._transport.get_extra_info("ssl_object").selected_alpn_protocol()
        return alpn

    @property
    def certificate(self) -> bytes:
        assert self._transport is not None
        der: bytes = self._transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return der

    async def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        async with self._sending:
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                for start in range(0, len(view), SEND_CHUNK_BYTES):
                    await self._send_chunk(view[start : start + SEND_CHUNK_BYTES])

    async def _send_chunk(self, chunk: memoryview) -> None:
        if self._closed.done() or self._transport is None or self._transport.is_closing():
            raise PeerLost(self._remote_name(), "connection closed")
        self._transport.write(chunk)
        self.bytes_sent += len(chunk)
        await self._writable.wait()

    async def receive_into(self, view: memoryview) -> None:
        try:
            await self._buffer.fill(view)
        except asyncio.CancelledError:
            self.abort()
            raise

    async def close(self, timeout_s: float = 1.0) -> None:
        if self._transport is not None:
            self._transport.close()
            await asyncio.wait([self._closed], timeout=timeout_s)
        self.abort()

    async def wait_closed(self) -> None:
        await asyncio.wait([self._closed])

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._buffer.end(PeerLost(self._remote_name(), "the stream was aborted here"))

    def _resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _remote_name(self) -> str:
        return getattr(self, "remote", self.remote_host or "unknown")


class TlsListener:
    """An open TCP port; each handshaken stream is handed to ``on_stream`` in a task of its own."""

    def __init__(self, identity: Identity, on_stream: OnStream) -> None:
        self.addresses: list[Address] = []
        self._identity = identity
        self._on_stream = on_stream
        self._streams: set[TlsStream] = set()
        self._tasks = TaskOwner("listener")
        self._server: asyncio.Server | None = None
        self._is_closed = False

    async def open(self, address: Address) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: TlsStream(self._secured),
                address.host,
                address.port,
                family=_FAMILIES.get(address.protocol, socket.AF_UNSPEC),
                ssl=server_context(self._identity),
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
            )
        except socket.gaierror as error:
            raise ConfigError(f"cannot listen on {address}: the host name does not resolve") from error
        except OSError as error:
            raise ConfigError(_why_not_listening(address, error)) from error
        for sock in self._server.sockets:
            host, port = sock.getsockname()[:2]
            self.addresses.append(Address.of(host, port))

    def _secured(self, stream: TlsStream) -> None:
        remote = peer_id_of_certificate(stream.certificate)
        is_welcome = not self._is_closed and stream.selected_alpn == ALPN and remote != self._identity.peer_id
        if remote is None or not is_welcome:
            stream.abort()
            return
        stream.remote = remote
        self._tasks.spawn(self._serve(stream), name=f"stream from {remote}")

    async def _serve(self, stream: TlsStream) -> None:
        self._streams.add(stream)
        try:
            await self._on_stream(stream)
        except PeerLost as error:
            logger.debug("%s", error)
        finally:
            self._streams.discard(stream)
            stream.abort()

    async def close(self) -> None:
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        for stream in self._streams:
            stream.abort()
        await self._tasks.close()


class TlsTransport:
    """Dials and listens as one identity."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self._client_context = client_context(identity)

    async def listen(self, address: Address, on_stream: OnStream) -> TlsListener:
        listener = TlsListener(self.identity, on_stream)
        await listener.open(address)
        return listener

    async def dial(self, address: Address, timeout_s: float) -> TlsStream:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        sock = await _connect(address, timeout_s)
        try:
            async with time_limit(deadline - loop.time(), f"in the TLS handshake with {address}"):
                _, stream = await loop.create_connection(
                    lambda: TlsStream(lambda stream: None), sock=sock, ssl=self._client_context, server_hostname=""
                )
        except Timeout as error:
            detail = "TCP connects, but no TLS handshake follows"
            raise DialFailed(str(address), DialReason.TIMED_OUT, detail) from error
        except ssl.SSLCertVerificationError as error:
            detail = "a TLS server of something else"
            raise DialFailed(str(address), DialReason.NOT_MANYHANDS, detail) from error
        except (ssl.SSLError, OSError) as error:
            detail = "it accepts TCP connections, but does not answer in TLS 1.3"
            raise DialFailed(str(address), DialReason.NOT_MANYHANDS, detail) from error
        self._check(address, stream)
        return stream

    def _check(self, address: Address, stream: TlsStream) -> None:
        remote = peer_id_of_certificate(stream.certificate)
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


async def _connect(address: Address, timeout_s: float) -> socket.socket:
    """A connected TCP socket, to the first of the host's addresses that accepts."""
    loop = asyncio.get_running_loop()
    try:
        async with time_limit(timeout_s, f"connecting to {address}"):
            family = _FAMILIES.get(address.protocol, socket.AF_UNSPEC)
            infos = await loop.getaddrinfo(address.host, address.port, family=family, type=socket.SOCK_STREAM)
            return await _connect_to_first(infos)
    except Timeout as error:
        raise DialFailed(str(address), DialReason.TIMED_OUT, f"waited {timeout_s:.3g} s") from error
    except socket.gaierror as error:
        raise DialFailed(str(address), DialReason.NAME_NOT_FOUND, error.strerror or "") from error
    except ConnectionRefusedError as error:
        raise DialFailed(str(address), DialReason.REFUSED) from error
    except OSError as error:
        reason = DialReason.UNREACHABLE if error.errno in _UNREACHABLE else DialReason.TIMED_OUT
        raise DialFailed(str(address), reason, error.strerror or "") from error


async def _connect_to_first(infos: Sequence[tuple[Any, ...]]) -> socket.socket:
    loop = asyncio.get_running_loop()
    error: OSError = OSError(errno.EADDRNOTAVAIL, "no address")
    for family, kind, protocol, _, where in infos:
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await loop.sock_connect(sock, where)
        except OSError as failure:
            sock.close()
            error = failure
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise error


def _why_not_listening(address: Address, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"cannot listen on {address}: port {address.port} is taken; choose another, or 0 for a free one"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"cannot listen on {address}: this machine has no such address; 0.0.0.0 means all of its addresses"
    if error.errno == errno.EACCES:
        return f"cannot listen on {address}: port {address.port} needs special rights; choose one above 1023"
    return f"cannot listen on {address}: {error.strerror}"
