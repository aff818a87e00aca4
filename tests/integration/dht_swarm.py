"""Nodes of one DHT for tests, over the memory transport or TLS."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AsyncExitStack

from manyhands.base.address import Address
from manyhands.base.identity import Identity
from manyhands.dht import DhtConfig, DhtNode
from manyhands.dht.ids import distance, key_id, node_id
from manyhands.rpc import Endpoint
from manyhands.transport import MemoryNetwork, MemoryTransport, TlsTransport, Transport
from tests.unit.dht.examples import WALL_NOW

TTL_S = 60.0
CONFIG = DhtConfig(request_timeout_s=1.0, refresh_period_s=1000.0)  # upkeep happens when a test asks for it


class Swarm:
    """Nodes of one test; each listens in one memory network, or on a loopback port."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.nodes: list[DhtNode] = []
        self.endpoints: list[Endpoint] = []
        self._network = MemoryNetwork()
        self._stack = stack

    async def add(
        self,
        *,
        kind: str = "memory",
        initial_peers: Sequence[Address] | None = None,
        client_mode: bool = False,
        config: DhtConfig = CONFIG,
        clock_skew_s: float = 0.0,
        identity: Identity | None = None,
        host: str = "127.0.0.1",
    ) -> DhtNode:
        """A node that has joined; at the first one, if no other initial peers are given."""
        number = len(self.nodes)
        identity = identity or Identity.from_seed(number.to_bytes(32, "big"))
        transport: Transport = TlsTransport(identity) if kind == "tls" else MemoryTransport(identity, self._network)
        endpoint = Endpoint(transport, client_mode=client_mode)
        self._stack.push_async_callback(endpoint.close)
        if not client_mode:
            await endpoint.listen([Address.of(host, 0)])
        node = DhtNode(endpoint, config, random.Random(number), lambda: WALL_NOW + clock_skew_s)
        self._stack.push_async_callback(node.close)
        if initial_peers is None:
            initial_peers = self.endpoints[0].addresses if self.endpoints else []
        self.nodes.append(node)
        self.endpoints.append(endpoint)
        await node.join(initial_peers)
        return node

    def endpoint_of(self, node: DhtNode) -> Endpoint:
        return self.endpoints[self.nodes.index(node)]

    def nearest(self, key: str) -> list[DhtNode]:
        """All nodes, those nearest to the key first."""
        return sorted(self.nodes, key=lambda node: distance(node_id(self.endpoint_of(node).peer_id), key_id(key)))

    async def kill(self, node: DhtNode) -> None:
        """Close its connections without a word to the DHT; it stays in the tables of the others."""
        await self.endpoint_of(node).close()


async def values(node: DhtNode, key: str) -> dict[str, object]:
    return {subkey: stored.value for subkey, stored in (await node.get(key)).items()}
