"""Checks one initial peer step by step: name, TCP, TLS, identity, protocol, DHT."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from manyhands.base.address import Address
from manyhands.base.errors import DialFailed, DialReason, ManyhandsError, PeerError, Unavailable
from manyhands.base.identity import PeerId
from manyhands.dht.messages import PING, PingRequest
from manyhands.doctor import findings
from manyhands.doctor.checks import NAMES, STEPS, Check, Finding, Kind
from manyhands.reach.messages import EXAMINE, ExamineRequest, ExamineResponse
from manyhands.rpc.endpoint import Endpoint
from manyhands.transport import TlsTransport, tcp

OnCheck = Callable[[Check], None]

STEP_TIMEOUT_S = 4.0
ADDRESS_TIMEOUT_S = 8.0
"""Longest time in seconds for all steps of one address together; a step takes :data:`STEP_TIMEOUT_S` at most."""

MIN_TIMEOUT_S = 0.2


@dataclass
class Probed:
    """The results for one address.

    Attributes:
        checks: in the order in which they were made.
        peer_id: the peer at this address, once it has passed all steps.
        clock_offset_s: how far this machine's clock is ahead of the peer's; None if unknown.
        clock_error_s: the largest error of ``clock_offset_s``: half of the round trip.
        dialled_host: the IP address at which the peer was reached.
        seen_host: this machine's IP address as the peer sees it; empty if unknown.
        examine_error: why the peer did not report its clock and view.
    """

    address: Address
    checks: list[Check] = field(default_factory=list)
    peer_id: PeerId | None = None
    clock_offset_s: float | None = None
    clock_error_s: float = 0.0
    dialled_host: str = ""
    seen_host: str = ""
    examine_error: ManyhandsError | None = None


class _StepFailed(Exception):
    """A step failed; its check was recorded."""


class Probe:
    """Checks one address up to the first failure; takes :data:`ADDRESS_TIMEOUT_S` at most.

    Args:
        transport: dials to find out which peer is there.
        endpoint: of the same identity, opens a connection that is kept.
        on_check: called with each check once it is done.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        address: Address,
        transport: TlsTransport,
        endpoint: Endpoint,
        on_check: OnCheck,
        wall_clock: Callable[[], float],
    ) -> None:
        self._address = address
        self._transport = transport
        self._endpoint = endpoint
        self._on_check = on_check
        self._wall_clock = wall_clock
        self._probed = Probed(address)
        self._peer_id: PeerId | None = None
        self._began = asyncio.get_running_loop().time()
        self._deadline = self._began + ADDRESS_TIMEOUT_S

    async def run(self) -> Probed:
        """Run the steps up to the first that fails."""
        try:
            await self._take_all_steps()
        except _StepFailed:
            self._skip_the_rest()
        return self._probed

    async def _take_all_steps(self) -> None:
        sock = await self._connect()
        remote = await self._shake_hands(sock)
        self._identify(remote)
        await self._say_hello(self._address.with_peer(remote))
        await self._ask(remote)
        self._probed.peer_id = remote

    def _skip_the_rest(self) -> None:
        done = [check.check for check in self._probed.checks]
        self._begin()
        for kind in STEPS:
            if kind not in done:
                self._note(kind, findings.not_tried(f"{NAMES[done[-1]]} comes first"))

    async def _connect(self) -> socket.socket:
        address = self._address
        self._begin()
        try:
            places = await tcp.look_up(address, self._timeout_s())
        except DialFailed as failure:
            raise self._failed("dns", findings.name_not_found(address, failure)) from failure
        self._note("dns", findings.name_found(address, list(dict.fromkeys(str(place[4][0]) for place in places))))
        began = self._begin()
        try:
            sock = await tcp.connect_to(address, places, self._timeout_s())
        except DialFailed as failure:
            raise self._failed("tcp", findings.not_connected(address, failure)) from failure
        self._note("tcp", findings.connected(address, asyncio.get_running_loop().time() - began))
        return sock

    async def _shake_hands(self, sock: socket.socket) -> PeerId:
        """Return the peer that answers, even if another is expected."""
        anybody = Address(self._address.protocol, self._address.host, self._address.port)
        self._begin()
        try:
            stream = await self._transport.dial_over(sock, anybody, self._timeout_s())
        except DialFailed as failure:
            if failure.reason is DialReason.ITSELF:
                self._note("tls", findings.tls_done())
                raise self._failed("identity", findings.itself()) from failure
            if failure.reason is DialReason.PROTOCOL_VERSION:
                self._note("tls", findings.tls_done())
                raise self._failed("protocol", findings.other_version()) from failure
            raise self._failed("tls", findings.tls_failed(anybody, failure)) from failure
        stream.abort()
        self._probed.dialled_host = stream.remote_host
        self._peer_id = stream.remote
        self._note("tls", findings.tls_done())
        return stream.remote

    def _identify(self, remote: PeerId) -> None:
        self._begin()
        finding = findings.identified(self._address, remote)
        if finding.ok is False:
            raise self._failed("identity", finding)
        self._note("identity", finding)

    async def _say_hello(self, address: Address) -> None:
        self._begin()
        try:
            await self._endpoint.connect(address, self._timeout_s())
        except (Unavailable, PeerError) as error:
            raise self._failed("protocol", findings.not_welcomed(error)) from error
        self._note("protocol", findings.welcomed())

    async def _ask(self, remote: PeerId) -> None:
        self._begin()
        try:
            await self._endpoint.call(remote, PING, PingRequest(), self._timeout_s())
        except (Unavailable, PeerError) as error:
            raise self._failed("dht", findings.does_not_answer(error)) from error
        seen: ExamineResponse | None = None
        try:
            seen = await self._examine(remote)
        except (Unavailable, PeerError) as error:
            self._probed.examine_error = error
        self._note("dht", findings.answers(seen))

    async def _examine(self, remote: PeerId) -> ExamineResponse:
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        seen = await self._endpoint.call(remote, EXAMINE, ExamineRequest(), self._timeout_s())
        round_trip_s = loop.time() - asked_at
        self._probed.clock_offset_s = self._wall_clock() - round_trip_s / 2 - seen.wall_time_s
        self._probed.clock_error_s = round_trip_s / 2
        self._probed.seen_host = findings.ip_address(seen.host)
        return seen

    def _timeout_s(self) -> float:
        return max(min(STEP_TIMEOUT_S, self._deadline - asyncio.get_running_loop().time()), MIN_TIMEOUT_S)

    def _begin(self) -> float:
        self._began = asyncio.get_running_loop().time()
        return self._began

    def _note(self, kind: Kind, finding: Finding) -> None:
        seconds = asyncio.get_running_loop().time() - self._began
        address = str(self._address)
        check = Check(kind, finding.ok, finding.detail, finding.advice, address, self._peer_id, round(seconds, 3))
        self._probed.checks.append(check)
        self._on_check(check)

    def _failed(self, kind: Kind, finding: Finding) -> _StepFailed:
        self._note(kind, finding)
        return _StepFailed()
