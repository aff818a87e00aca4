"""TCP with mutual TLS 1.3.

Every failure of a dial is one of :class:`manyhands.base.errors.DialReason`, so that a person can act on it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from manyhands.base.address import Address
from manyhands.base.deadline import time_limit
from manyhands.base.errors import DialFailed, DialReason, PeerLost, Timeout
from manyhands.base.identity import Identity, PeerId
from manyhands.runtime.tasks import TaskOwner
from manyhands.runtime.threads import BlockingThreads
from manyhands.transport import tcp
from manyhands.transport.admission import Admission, ListenLimits, source_of
from manyhands.transport.api import OnStream, Pay, Port, Stream
from manyhands.transport.certificate import ALPN, BULK_ALPN
from manyhands.transport.sealed_stream import SealedStream
from manyhands.transport.tls_session import TlsFailed, TlsSession, tls_context
from manyhands.transport.tls_stream import TlsStream

logger = logging.getLogger(__name__)

ACCEPT_PAUSE_S = 0.5  # after an error, such as when the system has no sockets left

TELL_FULL_PERIOD_S = 60.0  # least time between two warnings of that

READ_BYTES = 1 << 14
"""Most bytes received in one call. In each direction of a session, OpenSSL keeps memory for the most bytes that ever
waited there."""


class TlsListener:
    """An open TCP port; each stream is passed to ``on_stream`` in its own task after its handshake."""

    def __init__(self, transport: TlsTransport, on_stream: OnStream, sockets: list[socket.socket]) -> None:
        self.addresses = [address for sock in sockets for address in tcp.bound_addresses(sock)]
        self._transport = transport
        self._limits = transport.limits
        self._on_stream = on_stream
        self._sockets = sockets
        self._evicted: set[socket.socket] = set()  # their tasks have not ended yet
        self._paused: set[socket.socket] = set()  # listening sockets that wait for a handshake to end
        self._admission = Admission(transport.limits)
        self._accepted: set[socket.socket] = set()  # without a stream yet
        # the sockets whose handshake has received nothing, with their hosts; the oldest first
        self._silent: dict[socket.socket, str] = {}
        self._streams: set[TlsStream | SealedStream] = set()
        self._tasks = TaskOwner("listener")
        self._told_full_at = -math.inf  # loop time
        for sock in sockets:
            self._resume(sock)

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if self._admission.is_full and not self._evict_silent():
            loop.remove_reader(listening)
            self._paused.add(listening)
            return
        try:
            sock, host = tcp.accept(listening)
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            if loop.time() >= self._told_full_at + TELL_FULL_PERIOD_S:
                self._told_full_at = loop.time()
                logger.warning(
                    "Cannot accept connections: %s; trying again each %.3g s. If too many files are open, raise their "
                    "limit (ulimit -n)", error.strerror, ACCEPT_PAUSE_S,
                )  # fmt: skip
            loop.remove_reader(listening)
            loop.call_later(ACCEPT_PAUSE_S, self._resume, listening)
            return
        if not self._admission.is_within_rate(host, loop.time()):
            logger.debug("too many handshakes a second from %s", host)
            sock.close()
            return
        if not self._admission.admit(host) and not (self._evict_silent(host) and self._admission.admit(host)):
            logger.debug("too many connections from %s", host)
            sock.close()
            return
        try:
            tcp.prepare(sock)
        except OSError as error:  # already reset
            logger.debug("no connection from %s: %s", host, error)
            self._admission.left(host, in_handshake=True)
            sock.close()
            return
        self._accepted.add(sock)
        self._silent[sock] = host
        self._tasks.spawn(self._serve(sock, host), name=f"stream from {host}")

    def _evict_silent(self, host: str | None = None) -> bool:
        """End the oldest handshake that has received nothing, of one host or of all; return whether there was one."""
        for sock, its_host in self._silent.items():
            if (host is None or source_of(its_host) == source_of(host)) and not tcp.has_data(sock):
                del self._silent[sock]
                self._evicted.add(sock)
                self._admission.left(its_host, in_handshake=True)
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # its task sees the end
                return True
        return False

    async def _serve(self, sock: socket.socket, host: str) -> None:
        stream = None
        try:
            stream = await self._shake_hands(sock, host)
        except (Timeout, TlsFailed, OSError) as error:
            logger.debug("no handshake with %s: %s", host, error)
        finally:
            self._accepted.discard(sock)
            self._silent.pop(sock, None)
            is_evicted = sock in self._evicted
            self._evicted.discard(sock)
            if stream is None:
                sock.close()
                if not is_evicted:
                    self._admission.left(host, in_handshake=True)
            self._resume_paused()
        if stream is None:
            return
        self._streams.add(stream)
        try:
            await self._on_stream(stream)
        except PeerLost as error:
            logger.debug("%s", error)
        finally:
            self._streams.discard(stream)
            stream.abort()
            self._admission.left(host, in_handshake=False)
            self._resume_paused()

    async def _shake_hands(self, sock: socket.socket, host: str) -> TlsStream | SealedStream | None:
        timeout_s = self._limits.handshake_timeout_s
        stream = await self._transport.accepted(sock, host, timeout_s, lambda: self._silent.pop(sock, None))
        if stream is not None:
            self._admission.shaken_hands(host)
        return stream

    def _resume_paused(self) -> None:
        while self._paused and not self._admission.is_full:
            self._resume(self._paused.pop())

    async def close(self) -> None:
        self._paused.clear()
        while self._sockets:
            listening = self._sockets.pop()
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        for stream in self._streams:
            stream.abort()
        await self._tasks.close()
        while self._accepted:  # their tasks had not begun
            self._accepted.pop().close()


class TlsTransport:
    """Dials and listens as one identity.

    Args:
        limits: on accepted connections.
    """

    def __init__(self, identity: Identity, limits: ListenLimits | None = None) -> None:
        self.identity = identity
        self.limits = limits or ListenLimits()
        self._client_contexts = {alpn: tls_context(identity, is_server=False, alpn=alpn) for alpn in (ALPN, BULK_ALPN)}
        self._server_context = tls_context(identity, is_server=True)  # now: it writes a file, and the disk may fill
        self._threads = BlockingThreads(f"manyhands bulk {identity.peer_id[-6:]}")
        self._ciphertext = bytearray(READ_BYTES)

    def close(self) -> None:
        self._threads.close()

    async def accepted(
        self, sock: socket.socket, host: str, timeout_s: float, on_data: Callable[[], object] = lambda: None
    ) -> TlsStream | SealedStream | None:
        """Answer the handshake of a peer that has dialled; return the stream, or None if it is no other peer.

        Args:
            on_data: called when data has arrived.
        Raises:
            Timeout, TlsFailed, OSError: the handshake failed.
        """
        session = TlsSession(self._server_context, is_server=True)
        async with time_limit(timeout_s, "in the TLS handshake"):
            await _shake_hands(sock, session, on_data)
        remote = session.remote_peer_id()
        is_known = session.selected_alpn in (ALPN, BULK_ALPN)
        if remote is None or not is_known or remote == self.identity.peer_id:
            return None
        return self.stream_of(sock, session, remote, host)

    def stream_of(
        self, sock: socket.socket, session: TlsSession, remote: PeerId, remote_host: str
    ) -> TlsStream | SealedStream:
        """Return the stream for a socket after its handshake."""
        if session.is_bulk:
            tcp.prepare_for_bulk(sock)
            sealer, opener = session.sealing()
            return SealedStream(sock, sealer, opener, remote, remote_host, self._threads, session.rest())
        return TlsStream(sock, session, remote, remote_host, self._ciphertext)

    async def listen(self, address: Address, on_stream: OnStream) -> TlsListener:
        return TlsListener(self, on_stream, await tcp.listen(address))

    async def dial(self, address: Address, timeout_s: float) -> TlsStream:
        stream = await self._dial(address, timeout_s, ALPN)
        assert isinstance(stream, TlsStream)
        return stream

    async def dial_bulk(self, address: Address, timeout_s: float) -> SealedStream:
        stream = await self._dial(address, timeout_s, BULK_ALPN)
        assert isinstance(stream, SealedStream)
        return stream

    async def _dial(self, address: Address, timeout_s: float, alpn: str) -> TlsStream | SealedStream:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        sock = await tcp.connect(address, timeout_s)
        return await self._dial_over(sock, str(address), address.peer_id, deadline - loop.time(), alpn)

    async def dial_through(
        self, carrier: Stream, peer_id: PeerId, timeout_s: float, *, is_bulk: bool
    ) -> TlsStream | SealedStream:
        where = f"peer {peer_id} through relay {carrier.remote}"
        return await self._dial_over(_socket_of(carrier), where, peer_id, timeout_s, BULK_ALPN if is_bulk else ALPN)

    async def accept_through(self, carrier: Stream, timeout_s: float) -> TlsStream | SealedStream:
        where = f"a peer through relay {carrier.remote}"
        return await self._accept_over(_socket_of(carrier), carrier.remote_host, timeout_s, where)

    async def _accept_over(
        self, sock: socket.socket, host: str, timeout_s: float, where: str
    ) -> TlsStream | SealedStream:
        """Answer the handshake of a peer over a connected socket; takes ownership of it, also on failure."""
        stream = None
        try:
            stream = await self.accepted(sock, host, timeout_s)
        except Timeout as error:
            raise DialFailed(where, DialReason.TIMED_OUT, str(error)) from error
        except (TlsFailed, OSError) as error:
            raise DialFailed(where, DialReason.NOT_MANYHANDS, str(error)) from error
        finally:
            if stream is None:
                sock.close()
        if stream is None:
            raise DialFailed(where, DialReason.NOT_MANYHANDS, "it has proven no identity")
        return stream

    def public_ip6(self) -> str:
        return tcp.public_ip6()

    def take_port(self) -> tcp.TcpPort:
        return tcp.TcpPort()

    async def dial_from(
        self, port: Port, places: Sequence[Address], peer_id: PeerId, timeout_s: float, *, is_bulk: bool
    ) -> TlsStream | SealedStream:
        turn = asyncio.Lock()  # one handshake at a time, so that both ends keep the same connection

        async def dial(sock: socket.socket, place: Address) -> TlsStream | SealedStream:
            try:
                await turn.acquire()
            except BaseException:
                sock.close()
                raise
            try:
                return await self._dial_over(sock, str(place), peer_id, timeout_s, BULK_ALPN if is_bulk else ALPN)
            finally:
                turn.release()

        return await _first_from(port, places, peer_id, timeout_s, dial)

    async def accept_from(
        self, port: Port, places: Sequence[Address], peer_id: PeerId, timeout_s: float
    ) -> TlsStream | SealedStream:
        async def accept(sock: socket.socket, place: Address) -> TlsStream | SealedStream:
            stream = await self._accept_over(sock, place.host, timeout_s, str(place))
            if stream.remote != peer_id:
                stream.abort()
                raise DialFailed(str(place), DialReason.WRONG_IDENTITY, f"found {stream.remote}")
            return stream

        return await _first_from(port, places, peer_id, timeout_s, accept)

    async def forward(self, one: Stream, other: Stream, chunk_bytes: int, pay: Pay) -> None:
        try:
            one_socket = _socket_of(one)
            try:
                other_socket = _socket_of(other)
            except PeerLost:
                one_socket.close()
                raise
            await tcp.forward(one_socket, other_socket, chunk_bytes, pay)
        finally:
            one.abort()
            other.abort()

    async def dial_over(self, sock: socket.socket, address: Address, timeout_s: float) -> TlsStream:
        """Like :meth:`dial`, over a connected socket; takes ownership of it, also on failure."""
        stream = await self._dial_over(sock, str(address), address.peer_id, timeout_s, ALPN)
        assert isinstance(stream, TlsStream)
        return stream

    async def _dial_over(
        self, sock: socket.socket, where: str, peer_id: PeerId | None, timeout_s: float, alpn: str
    ) -> TlsStream | SealedStream:
        """Run the handshake with a peer, or with any if ``peer_id`` is None, over a socket that leads there."""
        try:
            session = await self._handshake(where, sock, timeout_s, alpn)
            remote = self._checked(where, peer_id, session, alpn)
            return self.stream_of(sock, session, remote, str(sock.getpeername()[0]))
        except OSError as error:
            sock.close()
            detail = "it accepts TCP connections, and closes them in the TLS handshake: it is not a peer, or is full"
            raise DialFailed(where, DialReason.NOT_MANYHANDS, detail) from error
        except BaseException:
            sock.close()
            raise

    async def _handshake(self, where: str, sock: socket.socket, timeout_s: float, alpn: str) -> TlsSession:
        session = TlsSession(self._client_contexts[alpn], is_server=False)
        try:
            async with time_limit(timeout_s, f"in the TLS handshake with {where}"):
                await _shake_hands(sock, session)
        except Timeout as error:
            detail = "TCP connects, but no TLS handshake follows: another program listens there, or the peer hangs"
            raise DialFailed(where, DialReason.TIMED_OUT, detail) from error
        except TlsFailed as error:
            detail = "it accepts TCP connections, but does not answer in TLS 1.3"
            if error.is_stranger:
                detail = "the TLS server of another program"
            raise DialFailed(where, DialReason.NOT_MANYHANDS, detail) from error
        return session

    def _checked(self, where: str, peer_id: PeerId | None, session: TlsSession, alpn: str) -> PeerId:
        remote = session.remote_peer_id()
        if session.selected_alpn != alpn:
            raise DialFailed(where, DialReason.PROTOCOL_VERSION, f"it does not speak {alpn}, as this peer does")
        if remote is None:
            raise DialFailed(where, DialReason.NOT_MANYHANDS, "its key is not Ed25519")
        if remote == self.identity.peer_id:
            raise DialFailed(where, DialReason.ITSELF)
        if peer_id not in (None, remote):
            raise DialFailed(where, DialReason.WRONG_IDENTITY, f"found {remote}")
        return remote


def _socket_of(carrier: Stream) -> socket.socket:
    assert isinstance(carrier, SealedStream), "bulk streams of this transport are sealed"
    return carrier.detach()


async def _first_from(
    port: Port,
    places: Sequence[Address],
    peer_id: PeerId,
    timeout_s: float,
    shake_hands: Callable[[socket.socket, Address], Coroutine[Any, Any, TlsStream | SealedStream]],
) -> TlsStream | SealedStream:
    """Connect from a port to all places, and accept there; return the stream of the first handshake that succeeds."""
    assert isinstance(port, tcp.TcpPort), "ports of this transport are of TCP"

    async def attempt(connecting: Coroutine[Any, Any, tuple[socket.socket, Address]]) -> TlsStream | SealedStream:
        return await shake_hands(*await connecting)

    first: TlsStream | SealedStream | None = None

    def drop(ended: asyncio.Task[TlsStream | SealedStream]) -> None:
        if not ended.cancelled() and ended.exception() is None and ended.result() is not first:
            ended.result().abort()

    attempts = [asyncio.ensure_future(attempt(connecting)) for connecting in port.connections(places)]
    failures: list[str] = []
    try:
        async with time_limit(timeout_s, f"connecting at the same time as peer {peer_id}"):
            waiting = set(attempts)
            while waiting and first is None:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                failures += [str(one.exception()) for one in done if one.exception() is not None]
                first = next((one.result() for one in done if one.exception() is None), None)
    except Timeout as error:
        reason = DialReason.UNREACHABLE if failures else DialReason.TIMED_OUT
        raise DialFailed(f"peer {peer_id}", reason, "; ".join(failures) or str(error)) from error
    finally:
        port.close()
        for one in attempts:
            one.cancel()
            one.add_done_callback(drop)
    if first is None:
        raise DialFailed(f"peer {peer_id}", DialReason.UNREACHABLE, "; ".join(failures))
    return first


async def _shake_hands(sock: socket.socket, session: TlsSession, on_data: Callable[[], object] = lambda: None) -> None:
    """Run the TLS handshake over a socket.

    Args:
        on_data: called when data has arrived.
    Raises:
        TlsFailed, OSError: it failed, or the other end closed the connection.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            is_over = session.handshake()
        finally:
            data = session.ciphertext()  # on failure, this includes the alert for the other end
            if data:
                await loop.sock_sendall(sock, data)
        if is_over:
            return
        received = await loop.sock_recv(sock, READ_BYTES)
        if not received:
            raise ConnectionError("closed in the TLS handshake")
        on_data()
        session.received(memoryview(received))
