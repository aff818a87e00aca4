"""An honest peer that is served while another one misbehaves, and what must hold then."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from manyhands.base.address import Address
from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerLost
from manyhands.base.identity import Identity, PeerId
from manyhands.rpc import RpcConfig
from manyhands.rpc.frames import CONTROL, Hello, Request, Welcome, receive_frame, send_frame
from manyhands.transport import Stream, Transport
from manyhands.transport.api import is_control
from tests.machine import Machine
from tests.network import ECHO, Text, endpoints, identity_of, serve_echo, transport_beside, until
from tests.sweeps import few_of
from tests.wire import WatchedEndpoint

KINDS = few_of(["tls", "memory"])
"""Of transports: strangers come over TLS."""
MAX_LATENCY_S = 0.5
"""The 99th percentile of the honest peer's calls, with the attacker in the same process."""
CALL_EVERY_S = 0.002
ATTACKER = identity_of(99)
TLS_RECORD = b"\x16\x03\x01\xff\xff\x01\x00\xff\xff\xfb\x03\x03"  # the longest client hello there could be, cut off
FAST = RpcConfig(heartbeat_period_s=0.05, heartbeat_timeout_s=0.4, hello_timeout_s=0.3)


@dataclass
class Siege:
    """What goes on around one attack.

    Attributes:
        there: the attacked endpoint; it serves ``ECHO``.
        honest: the endpoint that goes on calling it.
        latencies: of the honest calls, in seconds.
        num_sockets: sockets and files that may be open in the end.
    """

    there: WatchedEndpoint
    honest: WatchedEndpoint
    latencies: list[float] = field(default_factory=list)
    address: Address = field(init=False)
    num_sockets: int = 0
    _streams: list[Stream] = field(default_factory=list)
    _transports: dict[PeerId, Transport] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.address = self.there.addresses[0]

    async def dial(self, identity: Identity = ATTACKER, *, is_bulk: bool = False) -> Any:
        """A stream of the attacker, before its hello; it ends with the block at the latest."""
        if identity.peer_id not in self._transports:
            self._transports[identity.peer_id] = transport_beside(self.there, identity)
        transport = self._transports[identity.peer_id]
        stream: Any = await (transport.dial_bulk if is_bulk else transport.dial)(self.address, 5.0)
        self._streams.append(stream)
        return stream

    async def connect(self, identity: Identity = ATTACKER) -> Any:
        """A control stream of the attacker, welcomed."""
        stream = await self.dial(identity)
        await send_frame(stream, Hello(CONTROL))
        assert isinstance(await receive_frame(stream), Welcome)
        return stream

    def leave(self) -> None:
        """The attacker goes, without a word."""
        for stream in self._streams:
            stream.abort()
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()

    async def served(self, num_calls: int = 20) -> None:
        """Wait until the honest peer got some more answers."""
        goal = len(self.latencies) + num_calls
        await until(lambda: len(self.latencies) >= goal, "the honest peer is served")

    async def counted(self, counter: str, num: int) -> None:
        """Wait until the attacked endpoint has counted something."""
        await until(lambda: self.there.counters[counter] >= num, f"{counter} are {num}: {self.there.counters}")

    @property
    def where(self) -> tuple[str, int]:
        """For sockets that speak no TLS."""
        return self.address.host, self.address.port

    def expect_sockets(self, more: int) -> None:
        """So many more than before are open in the end, as the test opened them for the attacked peer."""
        self.num_sockets += more

    async def call_forever(self) -> None:
        """Call as the honest peer, and check and time each answer."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            answer = await self.honest.call(self.there.peer_id, ECHO, Text("hi"))
            self.latencies.append(loop.time() - began)
            assert answer.text == f"hi from {self.there.peer_id}"
            await asyncio.sleep(CALL_EVERY_S)


@asynccontextmanager
async def siege(
    kind: str, config: RpcConfig | None = None, max_latency_s: float = MAX_LATENCY_S
) -> AsyncIterator[Siege]:
    """Within the block a test attacks; after it, nothing may be left of that, and the honest peer was served."""
    gc.collect()  # what earlier tests left is not collected while answers are timed
    async with endpoints(2, kind=kind, config=config) as (there, honest):
        serve_echo(there)
        scene = Siege(there, honest)
        await honest.call(there.peer_id, ECHO, Text("hi"))  # now all that belongs to the honest connection runs
        await asyncio.sleep(0.01)
        tasks_before = _num_tasks()
        scene.expect_sockets(num_sockets())
        calling = asyncio.ensure_future(scene.call_forever())
        with Machine() as machine:
            try:
                await scene.served()
                yield scene
                scene.leave()
                await scene.served()
                assert not calling.done(), "every call of the honest peer is answered"
            finally:
                scene.leave()
                calling.cancel()
                await asyncio.wait([calling])
        if not calling.cancelled():
            calling.result()
        await until(lambda: _num_tasks() <= tasks_before, "the attacker's tasks have ended")
        await until(lambda: num_sockets() <= scene.num_sockets, "the attacker's sockets are closed")
        assert not there.is_connected(ATTACKER.peer_id)
        latencies = sorted(scene.latencies)
        p50, p99 = (latencies[int(len(latencies) * part)] for part in (0.5, 0.99))
        print(f"{len(latencies)} calls, p50 {1000 * p50:.1f} ms, p99 {1000 * p99:.1f} ms, {dict(there.counters)}")
        assert p99 < machine.allows(max_latency_s), f"the slowest took {latencies[-5:]} s"


def request(number: int, text: str = "hi", timeout_s: float = 5.0, method: str = ECHO.name) -> Request:
    """A call of the attacker."""
    return Request(number, method, timeout_s, msgspec.Raw(msgspec.msgpack.encode(Text(text))))


async def ended(stream: Stream, timeout_s: float = 3.0) -> None:
    """Wait until the other end has closed a stream, reading what still comes."""
    async with time_limit(timeout_s, "for the stream to be closed"):
        try:
            while True:
                await (stream.receive() if is_control(stream) else stream.receive_into(memoryview(bytearray(1))))
        except PeerLost:
            pass


@contextmanager
def raw_socket(where: tuple[str, int], source: str = "") -> Iterator[socket.socket]:
    """A TCP connection without TLS, not blocking."""
    with socket.create_connection(where, 5.0, (source, 0) if source else None) as sock:
        sock.setblocking(False)
        yield sock


async def hung_up(sock: socket.socket, timeout_s: float = 3.0) -> None:
    """Wait until the other end has closed a raw connection."""
    loop = asyncio.get_running_loop()
    async with time_limit(timeout_s, "for the connection to be closed"):
        try:
            while await loop.sock_recv(sock, 65536):
                pass
        except ConnectionError:
            pass


def num_sockets() -> int:
    """Open sockets and files of this process; 0 where the system does not tell."""
    folder = Path("/proc/self/fd")
    return sum(1 for _ in folder.iterdir()) if folder.exists() else 0


def _num_tasks() -> int:
    return sum(not task.done() for task in asyncio.all_tasks())
