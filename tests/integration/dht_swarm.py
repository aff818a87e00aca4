"""Nodes of one DHT for tests, over the memory transport or TLS."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from manyhands.base.address import Address
from manyhands.base.identity import Identity, PeerId
from manyhands.dht import DhtConfig, DhtNode
from manyhands.dht.ids import distance, key_id, node_id
from manyhands.dht.messages import FIND, PING, STORE, FindRequest, FindResponse, StoreRequest
from manyhands.dht.records import AgedRecord, Record
from manyhands.dht.storage import Storage
from manyhands.rpc import Endpoint
from manyhands.transport import TlsTransport, Transport
from tests.dht_requests import records_at, store_at
from tests.intercepted import InterceptedEndpoint
from tests.memory_transport import MemoryNetwork, MemoryTransport
from tests.unit.dht.examples import WALL_NOW, open_record

TTL_S = 60.0
CONFIG = DhtConfig(request_timeout_s=1.0, refresh_period_s=1000.0)  # upkeep happens when a test asks for it


class Swarm:
    """Nodes of one test; each listens in one memory network, or on a loopback port.

    Attributes:
        wall_now: the wall clock of all nodes, to which the skew of each is added.
    """

    def __init__(self, stack: AsyncExitStack) -> None:
        self.nodes: list[DhtNode] = []
        self.endpoints: list[InterceptedEndpoint] = []
        self.wall_now = WALL_NOW
        self._kind = "memory"
        self._network = MemoryNetwork()
        self._stack = stack
        self._client: Endpoint | None = None

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
        port: int = 0,
    ) -> DhtNode:
        """A node that has joined; at the first one, if no other initial peers are given."""
        number = len(self.nodes)
        identity = identity or Identity.from_seed(number.to_bytes(32, "big"))
        self._kind = kind
        endpoint = InterceptedEndpoint(self._transport(identity), client_mode=client_mode)
        self._stack.push_async_callback(endpoint.close)
        if not client_mode:
            await endpoint.listen([Address.of(host, port)])
        node = DhtNode(endpoint, config, random.Random(number), lambda: self.wall_now + clock_skew_s)
        self._stack.push_async_callback(node.close)
        if initial_peers is None:
            initial_peers = self.endpoints[0].addresses if self.endpoints else []
        self.nodes.append(node)
        self.endpoints.append(endpoint)
        await node.join(initial_peers)
        return node

    def endpoint_of(self, node: DhtNode) -> InterceptedEndpoint:
        return self.endpoints[self.nodes.index(node)]

    def nearest(self, key: str) -> list[DhtNode]:
        """All nodes that may hold records, those nearest to the key first."""
        nodes = [node for node in self.nodes if not self.endpoint_of(node).client_mode]
        return sorted(nodes, key=lambda node: distance(node_id(self.endpoint_of(node).peer_id), key_id(key)))

    async def kill(self, node: DhtNode) -> None:
        """Close its connections without a word to the DHT; it stays in the tables of the others."""
        await self.endpoint_of(node).close()

    async def held_by(self, node: DhtNode, key: str) -> dict[str, Record]:
        """The records of a key that a node holds, by subkey: what it shows to a client."""
        return await records_at(await self._client_of(node), self.endpoint_of(node).peer_id, key)

    async def store_at(self, node: DhtNode, records: Sequence[Record]) -> None:
        """Have one node hold records, which a client sends to it and to no other."""
        outcomes = await store_at(await self._client_of(node), self.endpoint_of(node).peer_id, records)
        assert [outcome.code for outcome in outcomes] == ["accepted"] * len(records)

    def show(self, node: DhtNode, records: Sequence[Record]) -> Callable[[PeerId, FindRequest], FindResponse]:
        """Have a node show records that nobody has sent it, as if it held them; returns what answers."""
        endpoint, storage = self.endpoint_of(node), Storage(replace(CONFIG, max_bytes_per_owner=1 << 30), {}, {})
        now, key = asyncio.get_running_loop().time(), records[0].key
        honest: Any = endpoint.handlers[FIND.name]
        for record in records:
            assert storage.offer(AgedRecord(record, 0.0), now, self.wall_now, "").is_stored

        def answer(remote: PeerId, request: FindRequest) -> FindResponse:
            response: FindResponse = honest(remote, request)
            now = asyncio.get_running_loop().time()
            if request.key != key:
                return response
            if not request.wants_records:
                return msgspec.structs.replace(response, digest=storage.digest(key, now, request.owners))
            held, is_more = storage.page(key, request.after, now, request.owners, request.most)
            num_held = storage.num_held(key, now) if request.most is not None else 0
            page = [one.aged(now) for one in held]
            return msgspec.structs.replace(response, records=page, is_more=is_more, num_held=num_held)

        endpoint.answer_with(FIND, answer)
        return answer

    async def lose(self, node: DhtNode, key: str, subkeys: Sequence[str] = ("",)) -> None:
        """Have a node hold unsigned records no more, as if it had missed the write.

        A client deletes them there, and the deletion expires at once.
        """
        held = await self.held_by(node, key)
        for subkey in subkeys:
            deletion = open_record(None, key=key, subkey=subkey, sequence=held[subkey].sequence + 1)
            request = StoreRequest([AgedRecord(deletion, deletion.ttl_s - 1e-6)])
            await (await self._client_of(node)).call(self.endpoint_of(node).peer_id, STORE, request)
        assert not (await self.held_by(node, key)).keys() & {*subkeys}

    async def _client_of(self, node: DhtNode) -> Endpoint:
        """An endpoint that is in no table, connected to a node."""
        if self._client is None:
            self._client = Endpoint(self._transport(Identity.generate()), client_mode=True)
            self._stack.push_async_callback(self._client.close)
        await self._client.connect(self.endpoint_of(node).addresses[0])
        return self._client

    def _transport(self, identity: Identity) -> Transport:
        return TlsTransport(identity) if self._kind == "tls" else MemoryTransport(identity, self._network)


async def drop(node: DhtNode, endpoints: Sequence[InterceptedEndpoint]) -> None:
    """Have a node drop peers from its table, as they answer none of its pings for a while."""
    for endpoint in endpoints:
        endpoint.unhandle(PING)
    for _ in range(CONFIG.max_failures):
        await node.anyone_answers()
    for endpoint in endpoints:
        endpoint.answer_again(PING)
    assert not {endpoint.peer_id for endpoint in endpoints} & {contact.peer_id for contact in node.contacts()}


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of all peers from now on, by method."""
    counts: Counter[str] = Counter()
    call = Endpoint.call

    async def counted(self: Endpoint, peer_id: PeerId, method: Any, request: Any, timeout_s: float = 5.0) -> Any:
        counts[method.name] += 1
        return await call(self, peer_id, method, request, timeout_s)

    monkeypatch.setattr(Endpoint, "call", counted)
    return counts


async def values(node: DhtNode, key: str) -> dict[str, object]:
    return {subkey: stored.value for subkey, stored in (await node.get(key)).items()}
