"""One peer: its identity, its network thread, its connections and its part of the DHT."""

from __future__ import annotations

import atexit
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from manyhands.base.address import Address, parse_addresses
from manyhands.base.errors import Timeout
from manyhands.base.identity import Identity, PeerId
from manyhands.dht import DhtConfig, DhtNode
from manyhands.rpc import Endpoint, RpcConfig
from manyhands.runtime import LoopThread
from manyhands.transport import TlsTransport

T = TypeVar("T")
logger = logging.getLogger(__name__)

ALL_INTERFACES = ("/ip4/0.0.0.0/tcp/0",)
START_TIMEOUT_S = 15.0
CLOSE_TIMEOUT_S = 4.0


class Peer:
    """A machine's presence in the swarm. Use it as a context manager, or call :meth:`close`.

    Args:
        initial_peers: multiaddrs or ``HOST:PORT`` of any peers that are already there; none makes this the first peer.
        listen: where to accept connections; by default on all interfaces, on a free port.
        announce: what to tell others to dial instead of what this machine finds out by itself (behind a tunnel, say).
        client_mode: dial out only; for machines that nobody can dial, such as those behind a firewall.
        identity: a file with the private key, made when it does not exist; by default a new identity each time.
    Raises:
        ConfigError: an address or the identity file cannot be used, or the port is taken.
        JoinFailed: none of the initial peers answered; it names each address with its own reason.
    """

    def __init__(
        self,
        initial_peers: Sequence[str | Address] = (),
        *,
        listen: Sequence[str | Address] = ALL_INTERFACES,
        announce: Sequence[str | Address] = (),
        client_mode: bool = False,
        identity: str | Path | Identity | None = None,
        rpc_config: RpcConfig | None = None,
        dht_config: DhtConfig | None = None,
    ) -> None:
        initial_addresses = parse_addresses(initial_peers)
        listen_addresses = [] if client_mode else parse_addresses(listen)
        announce_addresses = parse_addresses(announce)
        if isinstance(identity, (str, Path)):
            identity = Identity.load_or_create(identity)
        self.identity = identity or Identity.generate()
        self.peer_id: PeerId = self.identity.peer_id
        self.client_mode = client_mode
        self.rng = random.Random()
        self.on_close: list[Callable[[], Awaitable[None]]] = []
        self.endpoint: Endpoint
        self.dht: DhtNode
        self._is_closed = False
        self._runtime = LoopThread(f"manyhands {self.peer_id[-6:]}")
        atexit.register(self.close)
        try:
            self.run(
                self._start(initial_addresses, listen_addresses, announce_addresses, rpc_config, dht_config),
                START_TIMEOUT_S,
                "starting this peer",
            )
        except BaseException:
            self.close()
            raise

    async def _start(
        self,
        initial_peers: Sequence[Address],
        listen: Sequence[Address],
        announce: Sequence[Address],
        rpc_config: RpcConfig | None,
        dht_config: DhtConfig | None,
    ) -> None:
        self.endpoint = Endpoint(TlsTransport(self.identity), client_mode=self.client_mode, config=rpc_config)
        await self.endpoint.listen(listen, announce)
        self.dht = DhtNode(self.endpoint, dht_config or DhtConfig(), rng=self.rng, wall_clock=time.time)
        await self.dht.join(initial_peers)

    @property
    def addresses(self) -> list[str]:
        """Multiaddrs that others can dial, with this peer's id; empty in client mode."""
        return [str(address) for address in self.endpoint.addresses]

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float, phase: str) -> T:
        """Run a coroutine on the network thread and wait for its result.

        Raises:
            Timeout: ``timeout_s`` seconds were over; ``phase`` says what was waited for.
        """
        return self._runtime.run(coro, timeout_s, phase)

    def close(self) -> None:
        """Leave the swarm: say goodbye, close all connections, end the network thread. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        try:
            self.run(self._stop(), CLOSE_TIMEOUT_S, "closing this peer")
        except Timeout as error:
            logger.warning("%s; what is left ends with the network thread", error)
        finally:
            self._runtime.close()

    async def _stop(self) -> None:
        for close_part in reversed(list(self.on_close)):
            await close_part()
        if hasattr(self, "dht"):
            await self.dht.close()
        if hasattr(self, "endpoint"):
            await self.endpoint.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Peer({self.peer_id})"
