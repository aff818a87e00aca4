"""Peers that declare an address where nobody can dial them, and do not know it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from manyhands.base.address import Address
from manyhands.base.identity import PeerId
from manyhands.dht import DhtConfig, DhtNode
from manyhands.dht.holder import Holder
from manyhands.dht.messages import FIND, PING, STORE
from manyhands.dht.proving import DOUBTED_AFTER_S
from manyhands.rpc import Endpoint
from manyhands.testing import Host, World, between
from tests.simulation.worlds import KEY, join

TTL_S = 60.0
PERIOD_S = 5.0
HOLE = "hole"
"""A host that takes packets and answers none: the public side of the firewall."""


class Swarm:
    """Peers that publish what time it is and read what the others say, every few seconds.

    Attributes:
        named_after_s: who was named by whom, and how long after it had asked it for the first time; just the last time.
        took_s: how long each read took, by reader.
        ages_s: of the values that a reader saw last, and quickly, by writer.
    """

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.world.network.default_link.latency_s = 0.02
        self.named_after_s: dict[tuple[str, str], float] = {}
        self.took_s: dict[str, list[float]] = {}
        self.ages_s: dict[str, dict[str, float]] = {}
        self.nodes: dict[str, DhtNode] = {}
        self._initial_peers: list[Address] = []
        self._names: dict[PeerId, str] = {}

    def start(self, names: list[str], firewalled: list[str], period_s: float = 0.5) -> None:
        """Start peers one after the other."""
        everybody = [*names, *firewalled]
        for number, name in enumerate(everybody):

            async def program(host: Host, begin_s: float = number * period_s) -> None:
                await asyncio.sleep(begin_s)
                await self._live(host, is_firewalled=host.name in firewalled)

            self.world.start(name, program)
            self._names[self.world.identity(name).peer_id] = name
        self.world.start(HOLE, lambda host: asyncio.sleep(1e6))
        self.world.schedule(between(0, 1e6).partition({HOLE}, set(everybody)))

    async def _live(self, host: Host, *, is_firewalled: bool) -> None:
        world, name = self.world, host.name
        endpoint = Endpoint(world.transport(host))
        node = self.nodes[name] = DhtNode(endpoint, DhtConfig(), world.rng(name), host.wall_clock)
        self._listen_in(name, endpoint, node._holder)
        try:
            announced = [Address.of(world.host(HOLE).ip, 99)] if is_firewalled else []
            await endpoint.listen([Address.of(host.ip, 0)], announced)
            await join(node, self._initial_peers)
            if not self._initial_peers:
                self._initial_peers += endpoint.addresses
            while True:
                await node.store(KEY, [name, world.loop.time()], TTL_S, subkey=endpoint.peer_id)
                started = world.loop.time()
                found = await node.get(KEY)
                self.took_s.setdefault(name, []).append(world.loop.time() - started)
                found |= await node.get(KEY, quickly=True)
                self.ages_s[name] = {writer: started - at for writer, at in (stored.value for stored in found.values())}
                await asyncio.sleep(PERIOD_S)
        finally:
            await node.close()
            await endpoint.close()

    def _listen_in(self, name: str, endpoint: Endpoint, holder: Holder) -> None:
        asked_at: dict[PeerId, float] = {}

        def listening(handler: Callable[[PeerId, Any], Any]) -> Callable[[PeerId, Any], Any]:
            def answer(remote: PeerId, request: Any) -> Any:
                now = self.world.loop.time()
                asked_at.setdefault(remote, now)
                response = handler(remote, request)
                for contact in getattr(response, "contacts", ()):
                    self.named_after_s[self._names[contact.peer_id], name] = now - asked_at.get(contact.peer_id, 0.0)
                return response

            return answer

        for method, handler in ((PING, holder._on_ping), (FIND, holder._on_find), (STORE, holder._on_store)):
            endpoint.unhandle(method)
            endpoint.handle(method, listening(handler))


def names_of(prefix: str, num: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(num)]


def test_peers_behind_a_firewall_are_named_to_nobody_and_slow_nobody_down() -> None:
    swarm = Swarm(seed=1)
    ordinary, firewalled = names_of("p", 12), names_of("f", 4)
    swarm.start(ordinary, firewalled)
    swarm.world.run(300.0)
    assert {named for named, _ in swarm.named_after_s} >= set(ordinary)
    late = {pair: seconds for pair, seconds in swarm.named_after_s.items() if pair[0] in firewalled}
    assert max(late.values(), default=0.0) <= DOUBTED_AFTER_S, late
    for name in [*ordinary, *firewalled]:
        assert known(swarm, name) == {self_id(swarm, other) for other in ordinary if other != name}
    slowest = {name: max(seconds) for name, seconds in swarm.took_s.items()}
    assert max(slowest[name] for name in ordinary) < 0.5, slowest


def test_peers_behind_a_firewall_read_and_write() -> None:
    swarm = Swarm(seed=2)
    ordinary, firewalled = names_of("p", 8), names_of("f", 3)
    swarm.start(ordinary, firewalled)
    swarm.world.run(120.0)
    for reader, ages_s in swarm.ages_s.items():
        assert set(ages_s) == {*ordinary, *firewalled}, reader
        assert max(ages_s.values()) < 2 * PERIOD_S, (reader, ages_s)


def test_the_second_newcomer_hears_of_the_first_at_once() -> None:
    swarm = Swarm(seed=3)
    swarm.start(names_of("p", 3), [], period_s=1.0)
    swarm.world.run(2.9)
    assert self_id(swarm, "p1") in known(swarm, "p2")
    assert self_id(swarm, "p2") in known(swarm, "p1")


def self_id(swarm: Swarm, name: str) -> PeerId:
    return swarm.world.identity(name).peer_id


def known(swarm: Swarm, name: str) -> set[PeerId]:
    return {contact.peer_id for contact in swarm.nodes[name].contacts()}
