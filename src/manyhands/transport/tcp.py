"""TCP sockets that dial and listen, with an error message for each failure that a person can act on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import functools
import ipaddress
import logging
import math
import socket
import struct
import sys
import threading
from collections.abc import Collection, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from aiohappyeyeballs import start_connection

from manyhands.base.address import Address, ip_of
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ConfigError, DialFailed, DialReason, Timeout
from manyhands.transport.api import Delivery, Ends, Pay

logger = logging.getLogger(__name__)

BACKLOG = 128  # connections that the system holds until they are accepted

HEAD_START_S = 0.25
"""Seconds until the next address of a name or a peer is tried too, as RFC 8305 recommends."""

ENDED = "connection closed"

SILENT = "waited {:.3g} s; a firewall may drop the packets, or the host is down"

MAX_UNACCEPTED = 4
"""Connections to one port for hole punching that the system holds until they are accepted."""

CONNECT_ATTEMPTS = 4
"""Attempts to connect from one port to one place: the router of the other end may refuse what comes too early."""

REFUSED_PAUSE_S = 0.1
"""Seconds until the second attempt; each further pause is twice as long."""

STALLED_S = 60.0
"""Seconds for which one end of a forwarded connection may read nothing although there is something to read."""

DEAD_S = 120
"""Seconds without an answer after which the other machine of a forwarded connection counts as gone."""

LAST_BYTES_S = 10.0
"""Seconds that one end of a forwarded connection may still send after the other has closed."""

MAX_LOOKUPS = 32
"""Concurrent name lookups; each has a thread, which a hanging lookup occupies for half a minute."""

LOOKUP_POLL_S = 0.05
"""Seconds between two looks for a free thread while there are as many lookups as allowed."""

LONG_RTT_S = 0.01
"""Round trip, in seconds, from which a link counts as long."""

MIN_RTT_OFFSET = 148
"""Offset of ``tcpi_min_rtt`` in ``struct tcp_info`` of linux/tcp.h: microseconds, in 4 bytes."""

NO_RTT = 2**32 - 1
"""Value of ``tcpi_min_rtt`` while nothing was measured."""

# offsets in ``struct tcp_info``
SEGMENT_OFFSET = 16  # tcpi_snd_mss
SACKED_OFFSET = 28  # tcpi_sacked, in segments
ACKED_OFFSET = 120  # tcpi_bytes_acked
BUSY_OFFSET = 168  # tcpi_busy_time and tcpi_rwnd_limited, in microseconds
SENT_OFFSET = 200  # tcpi_bytes_sent and tcpi_bytes_retrans

INFO_BYTES = 216
"""Size of ``struct tcp_info`` up to these fields, which Linux has since 4.19."""

SO_MAX_PACING_RATE = 47
"""A socket option of Linux (asm-generic/socket.h); its value is in bytes per second, in 4 bytes."""

IPV6_ADDR_PREFERENCES = 72  # linux/in6.h
IPV6_PREFER_SRC_PUBLIC = 2

PROBES = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Documentation addresses (RFC 5737, RFC 3849): "connecting" a UDP socket looks up the route, and sends nothing."""

MAX_PACING_RATE = 2**32 - 2  # bytes per second
NO_PACING = 2**32 - 1  # the value that removes the limit

_lookups = threading.BoundedSemaphore(MAX_LOOKUPS)

_FAMILIES = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}

Places = Sequence[tuple[Any, ...]]
"""The result of ``getaddrinfo``: family, type, protocol, name and socket address of each place."""


async def connect(address: Address, timeout_s: float) -> socket.socket:
    """Connect to the first of the host's addresses that accepts.

    If a name has several, each has a head start before the next one is tried too (RFC 8305).

    Raises:
        DialFailed: with the reason; also after ``timeout_s``.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    places = await look_up(address, timeout_s)
    return await connect_to(address, places, deadline - loop.time())


async def connect_to(address: Address, places: Places, timeout_s: float) -> socket.socket:
    """Like :func:`connect`, for places that were looked up before."""
    try:
        async with time_limit(timeout_s, f"connecting to {address}"):
            sock: socket.socket = await start_connection(list(places), happy_eyeballs_delay=HEAD_START_S)
    except Timeout as error:
        raise DialFailed(str(address), DialReason.TIMED_OUT, SILENT.format(timeout_s)) from error
    except ConnectionRefusedError as error:
        raise DialFailed(str(address), DialReason.REFUSED) from error
    except OSError as error:
        reason = DialReason.TIMED_OUT if error.errno == errno.ETIMEDOUT else DialReason.UNREACHABLE
        raise DialFailed(str(address), reason, error.strerror or "") from error
    try:
        prepare(sock)
    except OSError as error:
        sock.close()
        raise DialFailed(str(address), DialReason.UNREACHABLE, error.strerror or "") from error
    return sock


def prepare(sock: socket.socket) -> None:
    """Configure a connected socket: non-blocking, without Nagle's algorithm, with keepalive."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def round_trip_s(sock: socket.socket) -> float:
    """Return the shortest round trip that the system has measured on a connection, in seconds; infinite if unknown.

    It does not depend on the load of either process, since the kernels answer.
    """
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, MIN_RTT_OFFSET + 4)
    except (OSError, AttributeError):  # the socket is closed, or this is not Linux
        return math.inf
    if len(info) < MIN_RTT_OFFSET + 4:
        return math.inf
    microseconds = int.from_bytes(info[MIN_RTT_OFFSET:], sys.byteorder)
    return microseconds / 1e6 if 0 < microseconds < NO_RTT else math.inf


def is_long(sock: socket.socket) -> bool:
    """Whether the other end of a connection is known to be distant."""
    return LONG_RTT_S <= round_trip_s(sock) < math.inf


def prepare_for_bulk(sock: socket.socket) -> None:
    """Use BBR on a long link, where the system can, so that losses do not slow it down (draft-ietf-ccwg-bbr).

    Other congestion control takes each loss for a full link, and halves its rate.
    """
    if is_long(sock):
        _use_bbr(sock)


@functools.cache
def has_bbr() -> bool:
    """Whether :func:`prepare_for_bulk` can use BBR here."""
    with socket.socket() as sock:
        return _use_bbr(sock)


def _use_bbr(sock: socket.socket) -> bool:
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
    except (OSError, AttributeError):  # not available, or not permitted
        return False
    return True


def delivery(sock: socket.socket) -> Delivery | None:
    """Return the delivery counters of a connection; None where the system has none.

    Selectively acknowledged data counts as delivered: on a lossy line the cumulative acknowledgement advances in leaps.
    """
    if sys.platform != "linux":
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    except OSError:  # closed
        return None
    if len(info) < INFO_BYTES:
        return None
    (segment_bytes,) = struct.unpack_from("=I", info, SEGMENT_OFFSET)
    (num_sacked,) = struct.unpack_from("=I", info, SACKED_OFFSET)
    (num_acked,) = struct.unpack_from("=Q", info, ACKED_OFFSET)
    busy_us, no_room_us = struct.unpack_from("=QQ", info, BUSY_OFFSET)
    num_sent, num_resent = struct.unpack_from("=QQ", info, SENT_OFFSET)
    return Delivery(num_acked + num_sacked * segment_bytes, num_sent, num_resent, (busy_us - no_room_us) / 1e6)


def pace(sock: socket.socket, bytes_per_s: float) -> None:
    """Limit the send rate with even spacing, without bursts that overflow the queue of a line, where supported."""
    if sys.platform != "linux":
        return
    rate = NO_PACING if math.isinf(bytes_per_s) else min(max(1, round(bytes_per_s)), MAX_PACING_RATE)
    with suppress(OSError):  # the socket is closed, or the system has no pacing
        sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("=I", rate))


async def listen(address: Address) -> list[socket.socket]:
    """Open listening sockets, one for each address of the host.

    ``::`` means all interfaces, with IPv4 and IPv6; with IPv4 alone where the system has no IPv6.

    Raises:
        ConfigError: the port is taken, or the host is not an address of this machine.
    """
    sockets: list[socket.socket] = []
    try:
        if address.is_unspecified and address.protocol == "ip6":
            sockets.append(_listen_with_both_families(address.port))
        else:
            for family, _, _, _, where in await _look_up(address):
                sockets.append(socket.create_server(where, family=family, backlog=BACKLOG))
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise ConfigError(_why_not_listening(address, error)) from error
    for sock in sockets:
        sock.setblocking(False)
    return sockets


def _listen_with_both_families(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    logger.debug("this machine has no IPv6: listening with IPv4 only")
    return socket.create_server(("", port), backlog=BACKLOG)


def bound_addresses(sock: socket.socket) -> list[Address]:
    """Return where a listening socket accepts connections: two addresses if it takes IPv4 and IPv6."""
    host, port = sock.getsockname()[:2]
    address = Address.of(host, port)
    if sock.family == socket.AF_INET6 and not sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
        return [Address("ip4", "0.0.0.0", port), address]
    return [address]


def source_host(family: socket.AddressFamily, *, lasts: bool = False) -> str:
    """Return the IP address of this machine from which it connects to the internet; empty if there is no route.

    Args:
        lasts: of several IPv6 addresses rather one that stays than a temporary one, which is replaced each day
            (RFC 8981). Connections come from a temporary one if the machine has any.
    """
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            if lasts and family == socket.AF_INET6:
                with suppress(OSError):  # not Linux
                    sock.setsockopt(socket.IPPROTO_IPV6, IPV6_ADDR_PREFERENCES, IPV6_PREFER_SRC_PUBLIC)
            sock.connect((PROBES[family], 9))
            return plain_host(sock.getsockname()[0])
    except OSError:
        return ""


def public_ip6() -> str:
    """Return the global IPv6 address from which this machine connects; empty if it has none."""
    host = source_host(socket.AF_INET6)
    return host if host and ipaddress.ip_address(host).is_global else ""


def accept(sock: socket.socket) -> tuple[socket.socket, str]:
    """Accept a connection; return it with the IP address of its other end, IPv4 in its own form on every socket."""
    accepted, where = sock.accept()
    return accepted, plain_host(str(where[0]))


def ends(sock: socket.socket) -> Ends | None:
    """Return both ends of a connection, IPv4 in its own form; None once it is closed."""
    try:
        here = sock.getsockname()
        there = sock.getpeername()
    except OSError:
        return None
    return Ends((plain_host(here[0]), here[1]), (plain_host(there[0]), there[1]))


def plain_host(host: str) -> str:
    """Return an IP address with IPv4 in its own form."""
    ip = ip_of(host)
    return str(ip) if ip.version == 4 else host


def why_ended(error: OSError) -> str:
    """Why a connection has ended, for people."""
    return f"{ENDED} ({error.strerror or error})"


def has_data(sock: socket.socket) -> bool:
    """Whether unread data has arrived; False at the end of the connection."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except OSError:  # no data yet, or the connection was reset
        return False


class TcpPort:
    """A local port that both listens and connects, for a connection that both ends open at the same time.

    If the packets of the two ends cross, TCP makes one connection of them (RFC 9293, section 3.5). If those of one end
    arrive before the other connects, it accepts them.

    Raises:
        ConfigError: this system cannot share a port between sockets.
    """

    def __init__(self) -> None:
        if not hasattr(socket, "SO_REUSEPORT"):
            raise ConfigError("this system cannot open a connection from both ends at the same time")
        self._listening = [_bound(socket.AF_INET, 0)]
        self.number: int = self._listening[0].getsockname()[1]
        with suppress(OSError):  # the system has no IPv6, or the port is taken there
            self._listening.append(_bound(socket.AF_INET6, self.number))
        for sock in self._listening:
            sock.listen(MAX_UNACCEPTED)

    def close(self) -> None:
        """Close the port at once, also while :meth:`connections` wait; inside the event loop in which they do."""
        loop = asyncio.get_running_loop()
        for sock in self._listening:
            if sock.fileno() >= 0:
                loop.remove_reader(sock)  # else the next socket with this file descriptor inherits the wait
            sock.close()

    def connections(self, places: Sequence[Address]) -> list[Coroutine[Any, Any, tuple[socket.socket, Address]]]:
        """Return the attempts to get a connection with another end that may come from any of these places.

        Each returns a connection and its other end. They have no timeout.
        """
        hosts = {place.host for place in places}
        accepting = [self._accept(listening, hosts) for listening in self._listening]
        return [*(self._connect(place) for place in places), *accepting]

    async def _accept(self, listening: socket.socket, hosts: Collection[str]) -> tuple[socket.socket, Address]:
        loop = asyncio.get_running_loop()
        while True:
            sock, where = await loop.sock_accept(listening)
            with suppress(OSError):  # it was reset at once
                if where[0] in hosts:
                    prepare(sock)
                    return sock, Address.of(where[0], where[1])
            sock.close()

    async def _connect(self, place: Address) -> tuple[socket.socket, Address]:
        """Connect from this port, at most :data:`CONNECT_ATTEMPTS` times.

        Raises:
            DialFailed: all attempts were refused.
        """
        loop = asyncio.get_running_loop()
        family = socket.AF_INET if place.protocol == "ip4" else socket.AF_INET6
        reason = ""
        for attempt in range(CONNECT_ATTEMPTS):
            if attempt:
                await asyncio.sleep(REFUSED_PAUSE_S * 2 ** (attempt - 1))
            try:
                sock = _bound(family, self.number)
            except OSError as error:  # no IPv6, or another program has the port there
                raise DialFailed(str(place), DialReason.UNREACHABLE, error.strerror or "") from error
            try:
                await loop.sock_connect(sock, (place.host, place.port))
                prepare(sock)
            except OSError as error:  # refused: the other end was not ready, or its router has answered
                sock.close()
                reason = error.strerror or ""
            except BaseException:
                sock.close()
                raise
            else:
                return sock, place
        raise DialFailed(str(place), DialReason.REFUSED, reason)


def _bound(family: socket.AddressFamily, port: int) -> socket.socket:
    """Return a socket that is bound to a port, which it shares with others that are made here."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(("", port))
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


async def forward(one: socket.socket, other: socket.socket, chunk_bytes: int, pay: Pay) -> None:
    """Forward bytes between two connections until both are at their end, or one fails; then close them.

    Once one end has closed, the other has :data:`LAST_BYTES_S` for what it still sends. A machine that has vanished
    counts as failed after :data:`DEAD_S`.

    Args:
        chunk_bytes: most bytes that are held in each direction.
    """
    for sock in (one, other):
        _end_if_dead(sock)
    directions = [
        asyncio.ensure_future(_forward_one_way(source, sink, chunk_bytes, pay))
        for source, sink in ((one, other), (other, one))
    ]
    try:
        done, rest = await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        if rest and not any(direction.exception() for direction in done):
            await asyncio.wait(rest, timeout=LAST_BYTES_S)
    finally:
        for direction in directions:
            direction.cancel()
        try:
            for outcome in await asyncio.gather(*directions, return_exceptions=True):
                if isinstance(outcome, (OSError, Timeout)):
                    logger.debug("a forwarded connection failed: %s", outcome)
        finally:
            one.close()
            other.close()


def _end_if_dead(sock: socket.socket) -> None:
    """Have the system end an idle connection whose other machine does not answer, where it can."""
    for name, value in (("TCP_KEEPIDLE", DEAD_S // 2), ("TCP_KEEPINTVL", DEAD_S // 6), ("TCP_KEEPCNT", 3)):
        if (option := getattr(socket, name, None)) is not None:
            with suppress(OSError):  # it was reset at once
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


async def _forward_one_way(source: socket.socket, sink: socket.socket, chunk_bytes: int, pay: Pay) -> None:
    loop = asyncio.get_running_loop()
    room = memoryview(bytearray(chunk_bytes))
    while num_bytes := await loop.sock_recv_into(source, room):
        await pay(num_bytes)
        try:
            num_sent = sink.send(room[:num_bytes])
        except BlockingIOError:
            num_sent = 0
        if num_sent < num_bytes:  # a time limit for each chunk would take an eighth of the relay's time
            async with time_limit(STALLED_S, "forwarding to an end that reads nothing"):
                await loop.sock_sendall(sink, room[num_sent:num_bytes])
    sink.shutdown(socket.SHUT_WR)


async def look_up(address: Address, timeout_s: float) -> Places:
    """Resolve a host to its places.

    Raises:
        DialFailed: its name does not resolve, or there was no answer within ``timeout_s``.
    """
    try:
        async with time_limit(timeout_s, f"looking up {address.host}"):
            return await _look_up(address)
    except Timeout as error:
        detail = f"no answer within {timeout_s:.3g} s"
        raise DialFailed(str(address), DialReason.NAME_NOT_FOUND, detail) from error
    except socket.gaierror as error:
        raise DialFailed(str(address), DialReason.NAME_NOT_FOUND, error.strerror or "") from error


async def _look_up(address: Address) -> Places:
    """Resolve a host; a name is looked up in a separate thread, which is abandoned if the caller gives up.

    A lookup can hang for half a minute and cannot be interrupted. In asyncio's thread pool a few of them would block
    all others, and then the exit of the process.
    """
    family = _FAMILIES.get(address.protocol, socket.AF_UNSPEC)
    if address.protocol.startswith("ip"):
        flags = socket.AI_NUMERICHOST
        return socket.getaddrinfo(address.host, address.port, family, socket.SOCK_STREAM, flags=flags)
    while not _lookups.acquire(blocking=False):  # noqa: ASYNC110 (released by threads; the lookup timeout applies)
        await asyncio.sleep(LOOKUP_POLL_S)
    outcome: concurrent.futures.Future[Places] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()

    def look_up() -> None:
        try:
            outcome.set_result(socket.getaddrinfo(address.host, address.port, family, socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            outcome.set_exception(error)
        finally:
            _lookups.release()

    try:
        threading.Thread(target=look_up, name=f"looking up {address.host}", daemon=True).start()
    except RuntimeError as error:  # the system has no threads left
        _lookups.release()
        raise socket.gaierror(socket.EAI_AGAIN, str(error)) from error
    return await asyncio.wrap_future(outcome)


def _why_not_listening(address: Address, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return (
            f"cannot listen on {address}: the host name does not resolve; 0.0.0.0 means all addresses of this machine"
        )
    if error.errno == errno.EADDRINUSE:
        return f"cannot listen on {address}: port {address.port} is taken; choose another, or 0 for a free one"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"cannot listen on {address}: this machine has no such address; 0.0.0.0 means all of its addresses"
    if error.errno == errno.EACCES:
        return f"cannot listen on {address}: port {address.port} needs special rights; choose one above 1023"
    return f"cannot listen on {address}: {error.strerror}"
