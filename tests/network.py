"""Endpoints for the tests of the layers below averaging: no torch here."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from types import UnionType

import msgspec

from manyhands.base.address import Address
from manyhands.base.deadline import time_limit
from manyhands.base.identity import Identity, PeerId
from manyhands.rpc import Endpoint, Method, RpcConfig
from manyhands.rpc.frames import CONTROL, Frame, Hello, Welcome, receive_frame, send_frame
from manyhands.transport import ControlStream, TlsTransport, Transport
from tests.memory_transport import MemoryNetwork, MemoryTransport
from tests.wire import WatchedEndpoint

PATIENCE_S = 20.0
"""For whatever must come in one process: a busy machine takes long, and a test that passes does not wait for it."""

LOOPBACK = Address.parse("/ip4/127.0.0.1/tcp/0")
KINDS = ["memory", "tls"]


def free_port() -> int:
    """A port outside the range from which systems give out ports: no other socket gets it before it is used."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with suppress(OSError), socket.create_server(("", port)):
            return port


class Text(msgspec.Struct):
    """The request and the response of the methods in these tests."""

    text: str


ECHO: Method[Text, Text] = Method("test.echo", Text, Text)
STUCK: Method[Text, Text] = Method("test.stuck", Text, Text)


def identity_of(number: int) -> Identity:
    """The same identity for the same number, in every run of the tests."""
    return Identity.from_seed(number.to_bytes(32, "big"))


@asynccontextmanager
async def endpoints(
    num_peers: int,
    *,
    kind: str = "memory",
    clients: Sequence[int] = (),
    config: RpcConfig | None = None,
    make: Callable[..., WatchedEndpoint] = WatchedEndpoint,
    are_acquainted: bool = True,
) -> AsyncIterator[list[WatchedEndpoint]]:
    """``num_peers`` endpoints; those numbered in ``clients`` do not listen.

    Args:
        are_acquainted: whether they know each other's addresses.
    """
    network = MemoryNetwork()
    swarm: list[WatchedEndpoint] = []
    try:
        for number in range(num_peers):
            endpoint = make(transport_of(number, kind, network), client_mode=number in clients, config=config)
            if number not in clients:
                await endpoint.listen([LOOPBACK])
            swarm.append(endpoint)
        for endpoint in swarm if are_acquainted else ():
            for other in swarm:
                endpoint.learn(other.peer_id, other.addresses)
        yield swarm
    finally:
        for endpoint in swarm:
            await endpoint.close()


def transport_of(number: int, kind: str, network: MemoryNetwork) -> Transport:
    identity = identity_of(number)
    return TlsTransport(identity) if kind == "tls" else MemoryTransport(identity, network)


def transport_beside(endpoint: WatchedEndpoint, identity: Identity) -> Transport:
    """The transport of another peer, with which an endpoint can be dialled."""
    own = endpoint.wire.transport
    return MemoryTransport(identity, own.network) if isinstance(own, MemoryTransport) else TlsTransport(identity)


def serve_echo(endpoint: Endpoint) -> None:
    async def echo(remote: PeerId, request: Text) -> Text:
        return Text(f"{request.text} from {endpoint.peer_id}")

    endpoint.handle(ECHO, echo)


class StuckHandler:
    """Serves ``STUCK``: never answers, and shows when it was called and cancelled, and how many calls are running."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.called = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.num_calls = 0
        self.num_running = 0
        endpoint.handle(STUCK, self._serve)

    async def _serve(self, remote: PeerId, request: Text) -> Text:
        self.num_calls += 1
        self.num_running += 1
        self.called.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.num_running -= 1
            self.cancelled.set()
        raise AssertionError("nobody sets that event")


@asynccontextmanager
async def raw_control(endpoint: WatchedEndpoint, number: int = 99) -> AsyncIterator[ControlStream]:
    """A stream to a listening endpoint after hello and welcome, for a peer that behaves as the test wants."""
    transport = transport_beside(endpoint, identity_of(number))
    stream = await transport.dial(endpoint.addresses[0], 5.0)
    try:
        await send_frame(stream, Hello(CONTROL))
        assert isinstance(await receive_frame(stream), Welcome)
        yield stream
    finally:
        stream.abort()
        transport.close()


async def next_frame(stream: ControlStream, kind: type[Frame] | UnionType) -> Frame:
    """The next frame of one kind, or of some; the pings between are skipped."""
    async with time_limit(PATIENCE_S, f"waiting for a frame: {kind}"):
        while not isinstance(frame := await receive_frame(stream), kind):
            pass
    return frame


async def until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Let the loop run until something holds that no event tells of."""
    async with time_limit(timeout_s, f"waiting until {what}"):
        while not condition():
            await asyncio.sleep(0.001)
