"""Streams between two peers that cannot dial each other: both dial at the same time (hole punching over TCP).

A firewall or router lets in what answers the connections of the machine behind it. If both ends connect from agreed
ports at about the same time, each of the two connection attempts looks like the answer to the other, and TCP makes one
connection of them (simultaneous open, RFC 9293, section 3.5). The ports can be agreed if each router keeps the port
that a machine chose. About 70% of the pairs of homes can be connected so (arXiv:2510.27500). With IPv6 there is usually
a firewall without a router that changes addresses, so both ends need only send first.

=====  ===============  ================================================================================
order  from, to         message
=====  ===============  ================================================================================
1      caller, target   ``rpc.punch``, over the control connection of the two, which may be relayed: the
                        places from which the caller is going to connect
2      target, caller   the places from which the target is going to connect
3      both             connect to all places, those with IPv6 first: the caller at once, and the target when
                        its answer has arrived there
4      caller, target   TLS handshake with the caller as client, its hello, and what the stream is for
=====  ===============  ================================================================================

No third peer has to be trusted: both ends name only their own places, over a connection that has proven who they are.
A place is dialled under the rules for all addresses that others name (:mod:`manyhands.rpc.dial_rules`), and at their
rate, but counted apart, so that nobody can use up what other dials need. A target that announces addresses is first
dialled at these, as by any caller. Inside addresses are dialled only if both peers are in one network: the other one
also names an address at which this one is seen, or this one is seen in that network.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated

import msgspec

from manyhands.base.address import Address, AddressText
from manyhands.base.deadline import wait_at_most
from manyhands.base.errors import ConfigError, DialFailed, DialReason, ManyhandsError, PeerError, Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc.announce import own_hosts
from manyhands.rpc.connection import ControlConnection
from manyhands.rpc.dial_rules import HeardDials, may_dial_heard
from manyhands.rpc.dialling import Dialler, Opened
from manyhands.rpc.frames import CONTROL, MAX_STRIPES, Hello
from manyhands.rpc.method import Method
from manyhands.rpc.outside import OutsideView
from manyhands.rpc.streams import OpenStreams
from manyhands.rpc.ways import PUNCHED, Way
from manyhands.runtime.tasks import TaskOwner
from manyhands.transport.api import Port, Stream, Transport

logger = logging.getLogger(__name__)

MAX_PLACES = 4
"""Most places in one message: outside and inside the router, in both families."""

DIAL_TIMEOUT_S = 5.0
"""Time for one attempt with its calls and its hello."""

CONNECT_TIMEOUT_S = 2.0
"""Time to connect. Connections that are made at all are made within two round trips."""

MAX_UNDER_WAY = 256
"""Attempts that this peer makes at a time for the requests of all others."""

MAX_OF_ONE_PEER = 4 * MAX_STRIPES
"""Attempts for one other peer, and connections that they led to, at a time."""

PAUSES_S = (1.0, 4.0, 600.0)
"""Seconds after each failed attempt until the next one, in turns. Of the pairs that can be connected, 97.6% are at the
first (arXiv:2510.27500); the second and third are for targets that were busy."""

SYMMETRIC = "symmetric"
"""Code of the refusal of a target whose router takes another port for each connection."""

EARLY_PERIOD_S = 60.0
"""Least time between two announcements of one peer that end a pause, so that it cannot use up the dials of all."""


class PunchRequest(msgspec.Struct, frozen=True):
    """Asks a connected peer to connect to the caller, which connects to it at the same time.

    Attributes:
        places: from which the caller is going to connect, as multiaddrs of IP addresses.
    """

    places: Annotated[list[AddressText], msgspec.Meta(max_length=MAX_PLACES)]


class PunchResponse(msgspec.Struct, frozen=True):
    """The places from which the target is going to connect."""

    places: Annotated[list[AddressText], msgspec.Meta(max_length=MAX_PLACES)]


PUNCH = Method("rpc.punch", PunchRequest, PunchResponse)


@dataclass(eq=False)
class _Attempts:
    """To connect to a relayed peer without the relay.

    Attributes:
        has_moved: ends the pause before the next attempt.
        early_at: loop time from which on the next announcement of the other peer may end it.
        obstacle: why the last one failed, in words.
    """

    has_moved: asyncio.Event = field(default_factory=asyncio.Event)
    early_at: float = -math.inf
    obstacle: str = ""


class PunchedStreams:
    """Both sides of hole punching, for one endpoint.

    Args:
        outside: how others see this peer.
        own_hosts: as for :func:`manyhands.rpc.dial_rules.may_dial_heard`.
        connection_to: returns the open control connection to a peer; None if there is none.
        serve: serves a stream for the purpose in its hello, and releases it at the end.
    """

    def __init__(
        self,
        transport: Transport,
        dialler: Dialler,
        streams: OpenStreams,
        tasks: TaskOwner,
        counters: Counter[str],
        outside: OutsideView,
        own_hosts: set[str],
        connection_to: Callable[[PeerId], ControlConnection | None],
        serve: Callable[[Stream, Way], Awaitable[None]],
    ) -> None:
        self._transport = transport
        self._dialler = dialler
        self._streams = streams
        self._tasks = tasks
        self._counters = counters
        self._outside = outside
        self._rules = HeardDials(own_hosts)
        self._connection_to = connection_to
        self._serve = serve
        self._num_under_way = 0
        self._num_of: Counter[PeerId] = Counter()
        self._attempts: dict[ControlConnection, _Attempts] = {}

    # the caller

    def obstacle_to(self, peer_id: PeerId) -> str:
        """Why the last attempt to connect to a relayed peer without the relay failed, in words; empty if none did."""
        attempts = [one for connection, one in self._attempts.items() if connection.remote == peer_id]
        return attempts[-1].obstacle if attempts else ""

    def moved(self, peer_id: PeerId | None = None) -> None:
        """Try a peer again at once, as it has announced other addresses.

        By default try all: others see this peer at another address, or its router is known now.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection, attempts in self._attempts.items():
            if peer_id is None:
                attempts.has_moved.set()
            elif peer_id == connection.remote and attempts.early_at <= now + EARLY_PERIOD_S:  # else one is to come
                at = max(now, attempts.early_at)
                loop.call_at(at, attempts.has_moved.set)
                attempts.early_at = at + EARLY_PERIOD_S

    async def open_some_time(
        self,
        connection: ControlConnection,
        hello: Callable[[], Hello],
        dial: Callable[[Hello, float], Awaitable[Opened]],
    ) -> Opened:
        """Dial, or try :meth:`open`, until one succeeds; without a timeout, as the caller ends it with the connection.

        Args:
            hello: returns it for an attempt: it has the addresses that this peer announces then.
            dial: opens a connection to a target that announces addresses, within some seconds; it may only have been
                down, or this peer may have moved. That comes first, as bulk streams of a punched pair are punched too.
        """
        attempts = self._attempts[connection] = _Attempts()
        try:
            for pause_s in itertools.cycle(PAUSES_S):
                attempts.has_moved.clear()  # also a move during the attempt ends the pause after it
                if not connection.is_client:
                    with suppress(Unavailable, PeerError):
                        return await dial(hello(), CONNECT_TIMEOUT_S)
                if self._outside.is_known:
                    try:
                        return await self.open(connection, hello(), DIAL_TIMEOUT_S)
                    except (Unavailable, PeerError) as error:
                        attempts.obstacle = self._obstacle_of(error) or attempts.obstacle
                await wait_at_most(attempts.has_moved, pause_s)
        finally:
            del self._attempts[connection]
        raise AssertionError("the pauses have no end")

    async def open(self, connection: ControlConnection, hello: Hello, timeout_s: float) -> Opened:
        """Connect to the other end of a control connection while it connects to this one.

        Raises:
            Unavailable: there was no connection within a few seconds.
            Refused: the target refuses the attempt, or this stream.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            stream = await self._connected(connection, timeout_s, is_bulk=hello.purpose != CONTROL)
            opened = await self._dialler.greet(stream, None, hello, deadline - loop.time())
        except (Unavailable, Refused) as error:
            self._counters["punches_failed"] += 1
            logger.debug("no direct connection to peer %s: %s", connection.remote, error)
            raise
        self._counters["punched_streams"] += 1
        return replace(opened, way=PUNCHED)

    async def _connected(self, connection: ControlConnection, timeout_s: float, *, is_bulk: bool) -> Stream:
        port = self._port()
        try:
            request = PunchRequest(self._places_from(port))
            response = await connection.call(PUNCH, request, timeout_s)
            places = self._allowed(connection.remote, response.places)
        except BaseException:
            port.close()
            raise
        limit_s = min(CONNECT_TIMEOUT_S, timeout_s)
        try:
            stream = await self._transport.dial_from(port, places, connection.remote, limit_s, is_bulk=is_bulk)
        except DialFailed as error:
            logger.debug("no connection with peer %s from both ends: %s", connection.remote, error)
            raise Unavailable(self._obstacle(places, error)) from error
        self._rules.found(stream.remote_host)
        self._streams.add(stream)
        return stream

    @staticmethod
    def _obstacle_of(error: Unavailable | PeerError) -> str:
        """What stood in the way, as far as the error tells; a refusal of another kind tells nothing of routers."""
        if not isinstance(error, Refused):
            return str(error)
        return "its router takes another port for each connection (symmetric)" if error.code == SYMMETRIC else ""

    def _obstacle(self, places: Sequence[Address], error: DialFailed) -> str:
        """What stood in the way of a connection from both ends."""
        if any(place.protocol == "ip4" and place.host in self._outside.hosts for place in places):
            return "both are behind one router, which does not connect the machines behind it"
        if error.reason is DialReason.UNREACHABLE:
            return "a router refuses what it does not expect"
        return "no answer: a router drops what it does not expect, or has several addresses"

    # the target

    def on_punch(self, remote: PeerId, request: PunchRequest) -> PunchResponse:
        """Tell where this peer is going to connect from, and do so once the answer has arrived."""
        connection = self._connection_to(remote)
        is_full = self._num_under_way >= MAX_UNDER_WAY or self._num_of[remote] >= MAX_OF_ONE_PEER
        if connection is None or is_full:
            self._counters["refused_punches"] += 1
            raise Refused(remote, "busy", f"this peer makes {self._num_under_way} such attempts already")
        if not self._outside.is_known:
            code = SYMMETRIC if self._outside.router == "symmetric" else "no_places"
            raise Refused(remote, code, f"the router of this peer is {self._outside.router}")
        places = self._allowed(remote, request.places)
        try:
            port = self._port()
        except Unavailable as error:
            raise Refused(remote, "no_places", str(error)) from error
        rtt_s = connection.shortest_rtt_s  # unknown just after the first hello: what comes too early is sent again
        delay_s = min(rtt_s / 2, CONNECT_TIMEOUT_S / 2) if math.isfinite(rtt_s) else 0.0
        self._tasks.spawn(self._meet(remote, port, places, delay_s), name=f"connecting at the same time as {remote}")
        self._num_of[remote] += 1  # now, as more requests may come before the task runs
        self._num_under_way += 1
        return PunchResponse(self._places_from(port))

    async def _meet(self, remote: PeerId, port: Port, places: Sequence[Address], delay_s: float) -> None:
        try:
            try:
                await asyncio.sleep(delay_s)
                stream = await self._transport.accept_from(port, places, remote, CONNECT_TIMEOUT_S)
            finally:
                port.close()
                self._num_under_way -= 1
            self._rules.found(stream.remote_host)
            self._streams.add(stream)
            await self._serve(stream, PUNCHED)
        except Unavailable as error:
            logger.debug("no direct connection with peer %s: %s", remote, error)
        finally:
            self._num_of[remote] -= 1
            if not self._num_of[remote]:
                del self._num_of[remote]

    # places

    def _port(self) -> Port:
        try:
            return self._transport.take_port()
        except (ConfigError, OSError) as error:
            raise Unavailable(f"no connection can be opened from both ends: {error}") from error

    def _places_from(self, port: Port) -> list[str]:
        """Return where a connection from a port comes from: outside the router, and inside for those behind it too.

        With IPv6 both are the same.
        """
        hosts = self._outside.known_hosts
        if any(":" not in host for host in hosts):
            hosts += sorted(host for host in own_hosts([]) if ":" not in host)
        return [str(Address.of(host, port.number)) for host in dict.fromkeys(hosts)][:MAX_PLACES]

    def _allowed(self, remote: PeerId, texts: Sequence[str]) -> list[Address]:
        """Return the places that this peer dials, those with IPv6 first: of the families in which its own are known.

        Raises:
            Refused: there are none.
        """
        now = asyncio.get_running_loop().time()
        outside = self._outside.hosts
        families = {Address.of(host, 1).protocol for host in self._outside.known_hosts}
        named: list[Address] = []
        for text in texts:
            with suppress(ManyhandsError):
                named.append(Address.parse(text))
        places = [place for place in named if place.protocol in families]
        if not any(place.host in outside for place in places):
            places = [place for place in places if may_dial_heard(place.host, place.port, outside)]
        allowed = [place for place in places if not self._rules.refusal(place.host, place.port, "", now)]
        if not allowed:
            raise Refused(remote, "no_places", "none of the places that it names may be dialled from here")
        return sorted(allowed, key=lambda place: place.protocol != "ip6")
