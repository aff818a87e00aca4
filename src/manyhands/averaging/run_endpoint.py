"""One run's view of the peer's endpoint: methods and bulk streams that belong to that run alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from manyhands.access.gate import RunGate
from manyhands.averaging.messages import ASK_IN_ROUND, NOBODY, InRoundQuery
from manyhands.base.address import Address
from manyhands.base.errors import Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint, Method
from manyhands.rpc.bulk import BulkAcceptor
from manyhands.rpc.method import RequestT, ResponseT
from manyhands.transport.api import Stream


class RunEndpoint:
    """An endpoint whose methods and streams belong to one run; see :class:`manyhands.rpc.Endpoint` for all else.

    On the wire, the name of each method and kind of stream begins with the run id (it has no ``.`` in it), so each run
    sees only its own groups. In a run with a charter each call and stream passes its gate (:mod:`manyhands.access`).
    """

    def __init__(self, endpoint: Endpoint, run_id: str) -> None:
        self._endpoint = endpoint
        self.run_id = run_id
        self._gate = RunGate(endpoint, run_id)
        self._methods: dict[str, Method[Any, Any]] = {}  # by name without the run id
        self.peer_id = endpoint.peer_id
        self.on_lost = endpoint.on_lost
        self.uplink = endpoint.uplink
        self.ways = endpoint.ways
        self.addresses_to_tell = endpoint.addresses_to_tell
        self.learn = endpoint.learn
        self.is_connected = endpoint.is_connected
        self.rtt_s = endpoint.rtt_s
        self.outside = endpoint.outside
        self.carries_bulk = endpoint.carries_bulk
        self.held = endpoint.held
        self.release = endpoint.release
        self.fell_short = endpoint.fell_short

    @property
    def client_mode(self) -> bool:
        return self._endpoint.client_mode

    @property
    def num_connected_peers(self) -> int:
        return self._endpoint.num_connected_peers

    @property
    def addresses(self) -> list[Address]:
        return self._endpoint.addresses

    def name_of(self, name: str) -> str:
        """The name on the wire of a method or a kind of stream of this run."""
        return f"{self.run_id}.{name}"

    def method(self, method: Method[RequestT, ResponseT]) -> Method[RequestT, ResponseT]:
        """A method under its name in this run."""
        if method.name not in self._methods:
            self._methods[method.name] = Method(self.name_of(method.name), method.request, method.response)
        return self._methods[method.name]

    def handle(
        self,
        method: Method[RequestT, ResponseT],
        handler: Callable[[PeerId, RequestT], Awaitable[ResponseT] | ResponseT],
    ) -> None:
        self._endpoint.handle(self.method(method), handler, self._gate.check)

    def unhandle(self, method: Method[RequestT, ResponseT]) -> None:
        self._endpoint.unhandle(self.method(method))

    async def call(
        self, peer_id: PeerId, method: Method[RequestT, ResponseT], request: RequestT, timeout_s: float
    ) -> ResponseT:
        """Call a peer; in a run with a charter, once both peers know that the other may take part.

        Raises:
            Unavailable: also if the peer takes no part in the run. A peer that has published a record serves its calls.
        """
        named = self.method(method)
        try:
            return await self._gate.through(
                peer_id, timeout_s, lambda left_s: self._endpoint.call(peer_id, named, request, left_s)
            )
        except Refused as refusal:
            if refusal.code != "unknown_method":
                raise
            raise Unavailable(f"peer {peer_id} takes no part in the run {self.run_id!r}") from refusal

    async def ping(self, peer_id: PeerId, timeout_s: float) -> None:
        """Check that a peer takes part in the run; this also opens a control connection, whose heartbeats go on."""
        await self.call(peer_id, ASK_IN_ROUND, InRoundQuery(NOBODY), timeout_s)

    def accept_bulk(self, kind: str, acceptor: BulkAcceptor) -> None:
        self._endpoint.accept_bulk(self.name_of(kind), acceptor, self._gate.check)

    def refuse_bulk(self, kind: str) -> None:
        self._endpoint.refuse_bulk(self.name_of(kind))

    async def open_bulk(
        self, peer_id: PeerId, kind: str, header: bytes, timeout_s: float, *, size_bytes: int = 0
    ) -> Stream:
        return await self._gate.through(
            peer_id,
            timeout_s,
            lambda left_s: self._endpoint.open_bulk(peer_id, self.name_of(kind), header, left_s, size_bytes=size_bytes),
        )
