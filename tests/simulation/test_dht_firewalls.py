"""Peers that declare an address where nobody can dial them, and do not know it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from manyhands.base.address import Address
from manyhands.base.identity import PeerId
from manyhands.dht import DhtConfig, DhtNode
from manyhands.dht.ids import distance, key_id, node_id
from manyhands.dht.messages import FIND, PING, STORE
from manyhands.dht.reachability_check import DOUBTED_AFTER_S
from manyhands.testing import Host, World, at, between
from manyhands.testing.network import SimListener
from tests.intercepted import InterceptedEndpoint
from tests.simulation.worlds import KEY, join

TTL_S = 60.0
PERIOD_S = 5.0
OTHER_KEY = "notice"
PORT = 31337
HOLE = "hole"
"""A host that takes packets and answers none. A peer behind a firewall announces it, and a port that is closed."""


class Swarm:
    """Peers that publish what time it is and read what the others say, every few seconds; or do nothing.

    Attributes:
        named_after_s: who was named by whom, and how long after it had asked it for the first time; just the last time.
        took_s: how long each read took, by reader, and when it began.
        ages_s: of the values that a reader saw last, and quickly, by writer.
    """

    def __init__(self, seed: int, *, is_idle: bool = False) -> None:
        self.is_idle = is_idle
        self.world = World(seed)
        self.world.network.default_link.latency_s = 0.02
        self.named_after_s: dict[tuple[str, str], float] = {}
        self.took_s: dict[str, dict[float, float]] = {}
        self.ages_s: dict[str, dict[str, float]] = {}
        self.nodes: dict[str, DhtNode] = {}
        self._initial_peers: list[Address] = []
        self._names: dict[PeerId, str] = {}
        self._closed: list[SimListener] = []

    def some_and_others(self, num: int, num_others: int) -> tuple[list[str], list[str]]:
        """Names of peers: those who should hold the records before all others, and these."""
        names = [f"p{number}" for number in range(num + num_others)]
        names.sort(key=lambda name: distance(node_id(self.id_of(name)), key_id(KEY)))
        return names[:num], names[num:]

    def id_of(self, name: str) -> PeerId:
        return self.world.identity(name).peer_id

    def known_by(self, name: str) -> set[str]:
        """Who is in the table of a peer."""
        return {self._names[contact.peer_id] for contact in self.nodes[name].contacts()}

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
        endpoint = InterceptedEndpoint(world.transport(host), rng=world.rng(f"endpoint of {host.name}"))
        node = self.nodes[name] = DhtNode(endpoint, DhtConfig(), world.rng(name), host.wall_clock)
        self._listen_in(name, endpoint)
        try:
            here, hole = Address.of(host.ip, PORT), Address.of(world.host(HOLE).ip, PORT)
            await endpoint.listen([here], [here, hole] if is_firewalled else [])
            if is_firewalled:
                self._closed.append(world.network.listeners.pop((host.ip, PORT)))
            await join(node, self._initial_peers)
            if not self._initial_peers:
                self._initial_peers += endpoint.addresses
            while self.is_idle:
                await asyncio.sleep(PERIOD_S)
            while True:
                await node.store(KEY, [name, world.loop.time()], TTL_S, subkey=endpoint.peer_id)
                started = world.loop.time()
                found = await node.get(KEY)
                self.took_s.setdefault(name, {})[started] = world.loop.time() - started
                found |= await node.get(KEY, quickly=True)
                self.ages_s[name] = {writer: started - at for writer, at in (stored.value for stored in found.values())}
                await asyncio.sleep(PERIOD_S)
        finally:
            await node.close()
            await endpoint.close()

    def open_firewalls(self) -> None:
        """From now on all can be dialled."""
        self.world.network.listeners.update({(one.host.ip, PORT): one for one in self._closed})

    def do(self, at_s: float, name: str, what: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have a peer do something."""
        self.world.schedule(at(at_s).call(lambda: self.world.host(name).spawn(what())))

    def _listen_in(self, name: str, endpoint: InterceptedEndpoint) -> None:
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

        for method in (PING, FIND, STORE):
            endpoint.answer_with(method, listening(endpoint.handlers[method.name]))


@pytest.mark.long
def test_peers_behind_a_firewall_are_named_to_nobody_and_slow_nobody_down() -> None:
    swarm = Swarm(seed=1)
    firewalled, ordinary = swarm.some_and_others(4, 12)
    swarm.start(ordinary, firewalled)
    swarm.world.run(300.0)
    assert {named for named, _ in swarm.named_after_s} >= set(ordinary)
    late = {pair: seconds for pair, seconds in swarm.named_after_s.items() if pair[0] in firewalled}
    assert max(late.values(), default=0.0) <= DOUBTED_AFTER_S, late
    for name in [*ordinary, *firewalled]:
        assert swarm.known_by(name) == {*ordinary} - {name}
    reads = [(at_s, seconds, name) for name in ordinary for at_s, seconds in swarm.took_s[name].items()]
    assert max(seconds for _, seconds, _ in reads) < DhtConfig().slow_after_s + 0.1
    assert max(seconds for at_s, seconds, _ in reads if at_s > 8.0 + DOUBTED_AFTER_S) < 0.15, "the last one came at 8 s"


def test_peers_behind_a_firewall_read_and_write() -> None:
    swarm = Swarm(seed=2)
    firewalled, ordinary = swarm.some_and_others(3, 8)
    swarm.start(ordinary, firewalled)
    swarm.world.run(120.0)
    for reader, ages_s in swarm.ages_s.items():
        assert set(ages_s) == {*ordinary, *firewalled}, reader
        assert max(ages_s.values()) < 2 * PERIOD_S, (reader, ages_s)


def test_a_peer_behind_a_firewall_does_not_take_itself_for_a_holder_for_long() -> None:
    """Nobody would bring it what others write, and it asks itself before all others."""
    swarm = Swarm(seed=4)
    [firewalled], ordinary = swarm.some_and_others(1, 7)
    swarm.start(ordinary, [firewalled])
    seen: list[object] = []

    async def write(name: str, value: str) -> None:
        await swarm.nodes[name].store(OTHER_KEY, value, 600.0)

    async def read() -> None:
        found = await swarm.nodes[firewalled].get(OTHER_KEY, quickly=True)
        seen.append(found[""].value)

    for at_s, name, doing in (
        (6.0, firewalled, lambda: write(firewalled, "old")),
        (7.0, firewalled, read),
        (40.0, ordinary[0], lambda: write(ordinary[0], "new")),
        (41.0, firewalled, read),
    ):
        swarm.do(at_s, name, doing)
    swarm.world.run(50.0)
    assert seen == ["old", "new"]


def test_a_peer_behind_a_firewall_warns_its_user_once(caplog: pytest.LogCaptureFixture) -> None:
    swarm = Swarm(seed=5, is_idle=True)
    swarm.start(["p0", "p1", "p2"], ["p3"])
    swarm.world.run(60.0)
    warnings = [record.getMessage() for record in caplog.records if "No other peer could dial" in record.getMessage()]
    assert len(warnings) == 1
    assert f"at /ip4/{swarm.world.host('p3').ip}/tcp/{PORT}" in warnings[0]


def test_a_peer_whose_firewall_opens_is_found_by_the_others() -> None:
    swarm = Swarm(seed=4)
    [late], ordinary = swarm.some_and_others(1, 5)
    swarm.start(ordinary, [late])
    known_by: list[list[str]] = []
    for at_s in (99.0, 300.0):  # each wait is as long as all before
        swarm.world.schedule(at(at_s).call(lambda: known_by.append([n for n in ordinary if late in swarm.known_by(n)])))
    swarm.world.schedule(at(100.0).call(swarm.open_firewalls))
    swarm.world.run(310.0)
    assert known_by == [[], ordinary]


def test_a_peer_that_starts_again_is_reached_again() -> None:
    """Those that have dialled it before need no proof, but it does: it cannot know."""
    swarm = Swarm(seed=5, is_idle=True)
    names = ["p0", "p1", "p2", "p3"]
    swarm.start(names, [])
    swarm.world.schedule(at(100.0).kill("p3"), at(100.5).restart("p3"))
    num_holders: dict[str, int] = {}

    async def write(name: str) -> None:
        num_holders[name] = await swarm.nodes[name].store(OTHER_KEY, name, 600.0)

    for number, name in enumerate(names):
        swarm.do(130.0 + number, name, functools.partial(write, name))
    swarm.world.run(135.0)
    assert num_holders == dict.fromkeys(names, 4), "each counts itself: it knows that it was dialled"


def test_the_second_newcomer_hears_of_the_first_at_once() -> None:
    swarm = Swarm(seed=3)
    swarm.start(["p0", "p1", "p2"], [], period_s=0.2)
    swarm.world.run(0.9)
    assert [swarm.known_by(name) for name in ("p0", "p1", "p2")] == [{"p1", "p2"}, {"p0", "p2"}, {"p0", "p1"}]
