"""Endpoints of manyhands, on the network thread of a peer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from _link import ECHO_BYTES, MIB, Link, LinkClosed, Plan, Serve, Sink

from manyhands.base.address import Address
from manyhands.base.errors import PeerLost
from manyhands.base.identity import Identity, PeerId
from manyhands.rpc import Endpoint, Method
from manyhands.transport import Stream, TlsTransport

PIECE_BYTES = 4 * MIB
KIND = "benchmark"


class Echo(msgspec.Struct):
    """Bytes to send back."""

    body: bytes


ECHO = Method("benchmark.echo", Echo, Echo)


def _endpoint(*, client_mode: bool) -> Endpoint:
    endpoint = Endpoint(TlsTransport(Identity.generate()), client_mode=client_mode)
    endpoint._call_rate.rate = math.inf  # noqa: SLF001 (more than a peer may have)
    return endpoint


def _cut(payload: bytes) -> Sequence[memoryview]:
    view = memoryview(payload)
    return [view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES)]


class StreamLink:
    """A bulk stream, received into reused memory."""

    def __init__(self, stream: Stream, dialled_by: Endpoint | None) -> None:
        self._stream = stream
        self._dialled_by = dialled_by

    async def send(self, piece: memoryview) -> None:
        try:
            await self._stream.send(piece)
        except PeerLost as error:
            raise LinkClosed from error

    async def receive(self, sink: Sink) -> None:
        view = memoryview(bytearray(PIECE_BYTES))
        try:
            while True:
                await self._stream.receive_into(view)
                sink(view)
        except PeerLost:
            return

    async def close(self) -> None:
        await self._stream.close()
        if self._dialled_by is not None:
            self._dialled_by.release(self._stream)


class Server:
    """One endpoint that listens."""

    def __init__(self) -> None:
        self.cut = _cut

    async def start(self, serve: Serve) -> str:
        self._endpoint = _endpoint(client_mode=False)

        async def echo(_: PeerId, request: Echo) -> Echo:
            return request

        async def accept(_: PeerId, header: bytes, stream: Stream) -> None:
            await serve(StreamLink(stream, None), msgspec.json.decode(header, type=Plan))

        self._endpoint.handle(ECHO, echo)
        self._endpoint.accept_bulk(KIND, accept)
        await self._endpoint.listen([Address.parse("/ip4/127.0.0.1/tcp/0")])
        return str(self._endpoint.addresses[0])

    async def close(self) -> None:
        await self._endpoint.close()


class EndpointDial:
    """A control connection of a new peer."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._endpoint = _endpoint(client_mode=True)

    async def open(self) -> None:
        await self._endpoint.connect(self._address)

    async def close(self) -> None:
        await self._endpoint.close()


class Client:
    """One endpoint that dials."""

    def __init__(self) -> None:
        self.cut = _cut
        self._request = Echo(bytes(ECHO_BYTES))

    async def start(self, contact: str) -> None:
        self._address = Address.parse(contact)
        self._endpoint = _endpoint(client_mode=True)
        self._server = await self._endpoint.connect(self._address)

    async def open_link(self, plan: Plan) -> Link:
        stream = await self._endpoint.open_bulk(self._server, KIND, msgspec.json.encode(plan))
        return StreamLink(stream, self._endpoint)

    async def echo(self) -> None:
        await self._endpoint.call(self._server, ECHO, self._request)

    def prepare_dial(self) -> EndpointDial:
        return EndpointDial(self._address)

    async def close(self) -> None:
        await self._endpoint.close()
