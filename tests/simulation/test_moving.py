"""Peers whose address changes while they run, for example behind a tunnel that drops and comes back elsewhere."""

from __future__ import annotations

import asyncio

import pytest

from manyhands.base.address import Address
from manyhands.base.errors import Unavailable
from manyhands.base.identity import PeerId
from manyhands.dht import DhtConfig, DhtNode
from manyhands.rpc import Endpoint
from manyhands.rpc.endpoint import LOOK_PERIOD_S
from manyhands.testing import Host, World, at
from tests.simulation.worlds import KEY, join
from tests.wire import WatchedEndpoint

PORT, NEW_PORT = 31337, 4242
OLD_IP, NEW_IP = "30.0.0.1", "30.0.0.2"
DROPS_AT_S = 100.0
FOUND_WITHIN_S = 60.0


class Swarm:
    """Some peers, of which ``moving`` announces where a tunnel leads to it; one joins in client mode.

    Args:
        down_s: from the drop of the tunnel to the next one.
        listens_at: of ``moving``; by default, the only address of its machine.
    """

    def __init__(self, seed: int, down_s: float, listens_at: str = "") -> None:
        self.world = World(seed)
        self.world.network.default_link.latency_s = 0.02
        self.down_s = down_s
        self._listens_at = listens_at
        self.endpoints: dict[str, WatchedEndpoint] = {}
        self.found_at_s: dict[str, float] = {}
        self._initial_peers: list[Address] = []
        for number, name in enumerate(["first", "second", "moving", "client"]):
            self._start(name, begin_s=float(number))
        self._start("newcomer", begin_s=DROPS_AT_S + down_s + 10.0)

    def drop(self) -> None:
        """Have the tunnel drop, and return at another port."""
        self.world.schedule(at(DROPS_AT_S).call(self._drop), at(DROPS_AT_S + self.down_s).call(self._return))

    def _start(self, name: str, begin_s: float) -> None:
        async def program(host: Host) -> None:
            await asyncio.sleep(begin_s)
            world = self.world
            client_mode, rng = name == "client", world.rng(f"endpoint {name}")
            endpoint = WatchedEndpoint(world.transport(host), client_mode=client_mode, rng=rng)
            node = DhtNode(endpoint, DhtConfig(), world.rng(name), host.wall_clock)
            self.endpoints[name] = endpoint
            try:
                here = self._listens_at if name == "moving" and self._listens_at else host.ip
                await endpoint.listen([] if endpoint.client_mode else [Address.of(here, PORT)])
                await join(node, self._initial_peers)
                self._initial_peers = self._initial_peers or endpoint.addresses
                while True:
                    own = [str(address) for address in endpoint.addresses]
                    await node.store(KEY, own, 30.0, subkey=endpoint.peer_id)  # as the records of a run do
                    for peer_id, stored in (await node.get(KEY)).items():
                        endpoint.learn(PeerId(peer_id), [Address.parse(text) for text in stored.value])
                    await self._look(name, endpoint)
                    await asyncio.sleep(5.0)
            finally:
                await node.close()
                await endpoint.close()

        self.world.start(name, program)

    async def _look(self, name: str, endpoint: Endpoint) -> None:
        """Note when a peer reaches the one that moved, over a new connection."""
        moving = self.endpoints.get("moving")
        if moving is None or moving is endpoint or name in self.found_at_s or self.world.loop.time() < DROPS_AT_S:
            return
        try:
            await endpoint.reach(moving.peer_id, 5.0)
        except Unavailable:
            return
        self.found_at_s[name] = self.world.loop.time()

    def _drop(self) -> None:
        world, host = self.world, self.world.host("moving")
        self._listener = world.network.listeners.pop((host.ip, PORT))
        wire = self.endpoints["moving"].wire
        for stream in sorted(wire.streams - wire.dialled, key=str):
            stream.abort()

    def _return(self) -> None:
        host = self.world.host("moving")
        self.world.network.listeners[host.ip, NEW_PORT] = self._listener

        async def announce() -> None:
            self.endpoints["moving"].announce([Address.of(host.ip, NEW_PORT)])

        host.spawn(announce())


@pytest.mark.parametrize("down_s", [0.5, 5.0, 200.0])
def test_a_peer_that_moves_is_found_by_all_within_a_minute(down_s: float) -> None:
    swarm = Swarm(seed=6, down_s=down_s)
    swarm.drop()
    back_at_s = DROPS_AT_S + down_s
    swarm.world.run(back_at_s + FOUND_WITHIN_S + 15.0)
    took_s = {name: round(at_s - back_at_s, 1) for name, at_s in swarm.found_at_s.items()}
    assert set(took_s) == {"first", "second", "client", "newcomer"}, took_s
    assert all(0 <= seconds < FOUND_WITHIN_S for seconds in took_s.values()), took_s
    assert NEW_PORT in {a.port for a in swarm.endpoints["second"].addresses_to_tell(swarm.endpoints["moving"].peer_id)}


def test_a_machine_that_gets_another_address_is_found_by_all_within_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = Swarm(seed=6, down_s=0.0, listens_at="0.0.0.0")
    world, moving = swarm.world, swarm.world.host("moving")
    world.network.move("moving", OLD_IP)

    def hosts_of_this_machine(protocol: str) -> list[str]:
        return [moving.ip, "127.0.0.1"]

    monkeypatch.setattr("manyhands.rpc.announce.hosts_of_this_machine", hosts_of_this_machine)
    world.schedule(at(DROPS_AT_S).call(lambda: world.network.move("moving", NEW_IP)))
    world.run(DROPS_AT_S + FOUND_WITHIN_S + 15.0)
    took_s = {name: round(at_s - DROPS_AT_S, 1) for name, at_s in swarm.found_at_s.items()}
    assert set(took_s) == {"first", "second", "client", "newcomer"}, took_s
    assert all(0 <= seconds < FOUND_WITHIN_S for seconds in took_s.values()), took_s
    told = swarm.endpoints["second"].addresses_to_tell(swarm.endpoints["moving"].peer_id)
    assert [address.host for address in told] == [NEW_IP]


def test_a_public_address_stays_announced_while_those_of_the_machine_change(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [OLD_IP, "127.0.0.1"]
    monkeypatch.setattr("manyhands.rpc.announce.hosts_of_this_machine", lambda protocol: hosts)
    world, announced = World(seed=6), []

    async def program(host: Host) -> None:
        endpoint = Endpoint(world.transport(host), rng=world.rng("endpoint"))
        await endpoint.listen([Address.of("0.0.0.0", PORT)])
        for addresses, with_local in ([Address.of("8.8.4.4", PORT)], True), ([Address.of("8.8.4.4", PORT)], False):
            endpoint.announce(addresses, with_local=with_local)
            hosts[0] = NEW_IP if hosts[0] == OLD_IP else OLD_IP
            await asyncio.sleep(LOOK_PERIOD_S + 1.0)
            announced.append([address.host for address in endpoint.addresses])
        await endpoint.close()

    world.start("router", program)
    world.run(60.0)
    assert announced == [["8.8.4.4", NEW_IP, "127.0.0.1"], ["8.8.4.4"]]
