"""Reports to other peers how this peer sees them and where it has reached others, and dials them on request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError, DialFailed, Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.rate import Buckets, SharedBuckets
from manyhands.dht.node import DhtNode
from manyhands.reach.messages import (
    BAD_ADDRESS,
    DIAL_BACK,
    EXAMINE,
    MAX_TEXT,
    NOT_ALLOWED,
    REACHED,
    DialBackRequest,
    DialBackResponse,
    DialOutcome,
    ExamineRequest,
    ExamineResponse,
    ReachedRequest,
    ReachedResponse,
)
from manyhands.rpc.dial_rules import may_dial
from manyhands.rpc.endpoint import AGENT, Endpoint
from manyhands.transport import tcp
from manyhands.transport.admission import source_of

DIAL_TIMEOUT_S = 3.0
"""Seconds for the name lookup, TCP and TLS of one address; all addresses of a request are dialled concurrently."""

MAX_UNDER_WAY = 4
"""Concurrent requests to dial back, of all peers."""

REQUESTS_PER_S_OF_SOURCE, BURST_OF_SOURCE = 0.1, 4
"""Requests to dial back, or name lookups, a second and at once, from one source: an IP address, or a /64 of IPv6, since
peer ids cost nothing."""

REQUESTS_PER_S, BURST = 1.0, 16
"""The same from all sources together."""

NAMES_PER_S, NAMES_BURST = 0.25, 8
"""Name lookups for others. A lookup can occupy one of the few threads for this peer's own dials for half a minute
(:data:`manyhands.transport.tcp.MAX_LOOKUPS`); with this rate they never occupy more than half of them."""


class _NotAllowed(Exception):
    """The address is not dialled for this caller."""


class Reach:
    """Serves ``reach.*`` on an endpoint while that is open.

    Dial-backs must not serve to scan networks. So they are limited in number and time, and send nothing but a TLS
    handshake. They dial nothing that is nearer to this peer than the caller
    (:func:`manyhands.rpc.dial_rules.may_dial`), and resolve a name only once, so that the address that was checked is
    the one that is dialled.

    Args:
        wall_clock: seconds since 1970.
    """

    def __init__(self, endpoint: Endpoint, dht: DhtNode, wall_clock: Callable[[], float] = time.time) -> None:
        self._endpoint = endpoint
        self._dht = dht
        self._wall_clock = wall_clock
        each = Buckets(REQUESTS_PER_S_OF_SOURCE, BURST_OF_SOURCE)
        self._requests = SharedBuckets(each, Buckets(REQUESTS_PER_S, BURST))
        names = Buckets(REQUESTS_PER_S_OF_SOURCE, BURST_OF_SOURCE)
        self._names = SharedBuckets(names, Buckets(NAMES_PER_S, NAMES_BURST))
        self._num_under_way = 0
        endpoint.handle(EXAMINE, self._on_examine)
        endpoint.handle(DIAL_BACK, self._on_dial_back)
        endpoint.handle(REACHED, self._on_reached)

    def _on_examine(self, remote: PeerId, request: ExamineRequest) -> ExamineResponse:
        host = self._host_of(remote)
        return ExamineResponse(self._wall_clock(), host[:64], self._dht.num_known_peers, AGENT)

    def _on_reached(self, remote: PeerId, request: ReachedRequest) -> ReachedResponse:
        return ReachedResponse([self._endpoint.reached_host(peer_id) for peer_id in request.peers])

    async def _on_dial_back(self, remote: PeerId, request: DialBackRequest) -> DialBackResponse:
        host = self._host_of(remote)
        if not host:
            raise Refused(
                self._endpoint.peer_id, "not_connected", "the caller is not connected, or only through a relay"
            )
        if self._num_under_way >= MAX_UNDER_WAY:
            self._refuse("this peer is dialling back for others; ask again in a few seconds")
        if not self._requests.take(source_of(host), asyncio.get_running_loop().time()):
            self._refuse("too many requests to dial back; ask again in some seconds")
        self._endpoint.counters["dial_backs"] += 1
        self._num_under_way += 1
        try:
            outcomes = await asyncio.gather(*(self._outcome_of(text, remote, host) for text in request.addresses))
        finally:
            self._num_under_way -= 1
        return DialBackResponse(outcomes)

    def _host_of(self, remote: PeerId) -> str:
        """Return the IP address of a caller; empty if it is unknown, as behind a relay."""
        way = self._endpoint.way_to(remote)
        return "" if way is None or way.relay is not None else self._endpoint.host_of(remote)

    def _refuse(self, message: str) -> None:
        self._endpoint.counters["refused_dial_backs"] += 1
        raise Refused(self._endpoint.peer_id, "busy", message)

    async def _outcome_of(self, text: str, caller: PeerId, caller_host: str) -> DialOutcome:
        try:
            await self._dial(Address.parse(text).with_peer(caller), caller_host)
        except ConfigError as error:
            return DialOutcome(text, BAD_ADDRESS, str(error)[:MAX_TEXT])
        except DialFailed as failure:
            return DialOutcome(text, failure.reason.name.lower(), failure.detail[:MAX_TEXT])
        except Unavailable as error:  # this peer is closing
            return DialOutcome(text, "unavailable", str(error)[:MAX_TEXT])
        except _NotAllowed as error:
            return DialOutcome(text, NOT_ALLOWED, str(error)[:MAX_TEXT])
        return DialOutcome(text)

    async def _dial(self, address: Address, caller_host: str) -> None:
        """Check that the peer of an address answers at one of its IP addresses.

        Raises:
            DialFailed: it was not found.
            _NotAllowed: the address is not dialled for this caller.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + DIAL_TIMEOUT_S
        if not address.protocol.startswith("ip") and not self._names.take(source_of(caller_host), loop.time()):
            raise _NotAllowed("too many name lookups for other peers")
        places = await tcp.look_up(address, DIAL_TIMEOUT_S)
        allowed = [place for place in places if may_dial(str(place[4][0]), caller_host)]
        if not allowed:
            raise _NotAllowed(f"{places[0][4][0]} is not dialled for a peer at {caller_host}")
        hosts = {place[0]: str(place[4][0]) for place in reversed(allowed)}.values()  # the first of each family
        targets = [Address.of(host, address.port, address.peer_id) for host in hosts]
        probes = (self._endpoint.probe(target, deadline - loop.time(), caller_host) for target in targets)
        outcomes = await asyncio.gather(*probes, return_exceptions=True)
        failures = [outcome for outcome in outcomes if outcome is not None]
        if len(failures) == len(outcomes):
            raise failures[0]
