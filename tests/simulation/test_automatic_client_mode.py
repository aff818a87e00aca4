"""Peers that find out whether others can dial them, and train as clients if not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
import torch

from manyhands.averaging import AveragingConfig
from manyhands.base.address import Address
from manyhands.peer import Presence
from manyhands.reach.own_mode import ASK_AGAIN_S, ASK_TIMEOUT_S
from manyhands.testing import Host, World, at
from manyhands.testing.blocking import SimPeer, run_blocking
from manyhands.testing.network import SimListener
from tests.inside import OpenOptimizer

PORT = 31337
BATCH_S, BATCH = 0.5, 4
AVERAGING = AveragingConfig(codec="none", matchmaking_time_s=10.0, averaging_timeout_s=40.0)


@dataclass
class Swarm:
    """Peers that train, of which one is behind a firewall that may open later."""

    num_others: int
    steps_by: float
    world: World = field(default_factory=lambda: World(3))
    presences: dict[str, Presence] = field(default_factory=dict)
    optimizers: dict[str, OpenOptimizer] = field(default_factory=dict)
    client_at_s: float | None = None
    joined_at_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world.network.default_link.latency_s = 0.02
        self._initial_peers: list[Address] = []
        self._closed: SimListener | None = None
        for number in range(self.num_others):
            self._start(f"open{number}", begins_s=0.1 * number)
        self._start("closed", begins_s=5.0)

    def _start(self, name: str, begins_s: float) -> None:
        async def program(host: Host) -> None:
            await asyncio.sleep(begins_s)
            presence = Presence(self.world.transport(host), rng=self.world.rng(name), wall_clock=host.wall_clock)
            self.presences[name] = presence
            try:
                listen = [Address.of(host.ip, PORT)]
                if name == "closed":
                    await presence.endpoint.listen(listen)  # so that there is something to close
                    self._closed = self.world.network.listeners.pop((host.ip, PORT))
                    listen = []
                await presence.start(self._initial_peers, listen, finds_mode=bool(self._initial_peers))
                self._initial_peers = self._initial_peers or presence.endpoint.addresses
                await run_blocking(lambda: self._train(name, SimPeer(presence)))
            finally:
                await presence.stop()

        self.world.start(name, program)

    def open_port(self) -> None:
        assert self._closed is not None
        self.world.network.listeners[self.world.host("closed").ip, PORT] = self._closed

    def _train(self, name: str, peer: SimPeer) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        optimizer = self.optimizers[name] = OpenOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.01), peer=peer, run_id="swarm", averaging=AVERAGING,
            target_batch_size=12 * (self.num_others + 1), batch_size_per_step=BATCH,
        )  # fmt: skip
        self.joined_at_s[name] = peer.time()
        while peer.time() < self.steps_by:
            peer.sleep(BATCH_S)
            model(torch.randn(BATCH, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("num_others", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_peer_that_nobody_can_dial_trains_as_a_client(num_others: int, caplog: pytest.LogCaptureFixture) -> None:
    swarm = Swarm(num_others, steps_by=60.0)
    swarm.world.run(70.0)
    assert swarm.presences["closed"].endpoint.client_mode
    assert not any(presence.endpoint.client_mode for name, presence in swarm.presences.items() if name != "closed")
    assert swarm.joined_at_s["closed"] < 5.0 + ASK_TIMEOUT_S + 2.0, "also where one peer alone can be asked"
    assert swarm.optimizers["closed"].statistics.rounds_committed >= 5
    assert swarm.optimizers["closed"].statistics.samples_dropped == 0
    assert caplog.text.count("takes part as a client") == 1


@pytest.mark.long
def test_a_client_whose_port_is_opened_listens_from_its_next_step_on() -> None:
    opened_s = 40.0
    swarm = Swarm(2, steps_by=opened_s + 2 * ASK_AGAIN_S)
    modes: list[tuple[bool, bool]] = []

    def look() -> None:
        """Note its mode, and what another peer has read of it."""
        closed = swarm.presences["closed"]
        record = swarm.optimizers["open0"].collaboration.tracker.observed()[closed.peer_id].record
        modes.append((closed.endpoint.client_mode, record.is_client))

    swarm.world.schedule(at(opened_s).call(swarm.open_port))
    swarm.world.schedule(*(at(time_s).call(look) for time_s in (opened_s - 1.0, opened_s + ASK_AGAIN_S + 20.0)))
    swarm.world.run(swarm.steps_by + 10.0)
    assert modes == [(True, True), (False, False)]
    closed = swarm.optimizers["closed"]
    assert closed.statistics.rounds_committed >= 10
    assert closed.statistics.samples_dropped == 0


def start_open_peers(world: World, number: int, first: list[Address], lives_s: float) -> None:
    """Start peers that others can dial; their addresses are added to ``first``."""

    async def program(host: Host) -> None:
        presence = Presence(world.transport(host), rng=world.rng(host.name), wall_clock=host.wall_clock)
        try:
            await presence.start(first, [Address.of(host.ip, PORT)])
            first.extend(presence.endpoint.addresses)
            await asyncio.sleep(lives_s)
        finally:
            await presence.stop()

    for name in [f"open{one}" for one in range(number)]:
        world.start(name, program)


@pytest.mark.parametrize("mapped_after_s", [2.0, 10.0])
def test_a_peer_whose_router_maps_its_port_a_moment_later_is_no_client_for_long(mapped_after_s: float) -> None:
    """The router needs some seconds for it. Meanwhile the dials of the others are lost."""
    world = World(3)
    world.network.default_link.latency_s = 0.02
    first: list[Address] = []
    modes: list[bool] = []

    async def mapped_peer(host: Host) -> None:
        host.router = "port-preserving"
        await asyncio.sleep(2.0)
        presence = Presence(world.transport(host), rng=world.rng(host.name), wall_clock=host.wall_clock)
        try:
            await presence.start(first, [Address.of(host.ip, PORT)], finds_mode=True)
            await asyncio.sleep(mapped_after_s)
            modes.append(presence.endpoint.client_mode)
            host.router = "none"
            presence.own_mode.ask_now()
            await presence.own_mode.decided()
            await asyncio.sleep(5.0)
            presence.own_mode.change_if_due()
            modes.append(presence.endpoint.client_mode)
        finally:
            await presence.stop()

    start_open_peers(world, 3, first, 40.0)
    world.start("mapped", mapped_peer)
    world.run(60.0)
    assert modes == [mapped_after_s > 5.0, False]


@pytest.mark.parametrize("num_others", [1, 3])
def test_a_peer_that_moves_behind_a_router_is_a_client_until_it_is_back(
    num_others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a laptop that is carried away from a router that maps its port."""
    world = World(3)
    world.network.default_link.latency_s = 0.02
    moving = world.host("moving")
    monkeypatch.setattr("manyhands.rpc.announce.hosts_of_this_machine", lambda protocol: [moving.ip, "127.0.0.1"])
    first: list[Address] = []
    modes: list[bool] = []

    async def moving_peer(host: Host) -> None:
        await asyncio.sleep(2.0)
        presence = Presence(world.transport(host), rng=world.rng(host.name), wall_clock=host.wall_clock)
        try:
            await presence.start(first, [Address.of("0.0.0.0", PORT)], finds_mode=True)
            for router, ip in (("none", host.ip), ("symmetric", "30.0.0.2"), ("none", "30.0.0.3")):
                host.router = router  # type: ignore[assignment]
                if ip != host.ip:
                    world.network.move(host.name, ip)
                for _ in range(9):
                    await asyncio.sleep(10.0)
                    presence.own_mode.change_if_due()  # as after a global step
                modes.append(presence.endpoint.client_mode)
        finally:
            await presence.stop()

    start_open_peers(world, num_others, first, 300.0)
    world.start("moving", moving_peer)
    world.run(310.0)
    assert modes == [False, True, False]


def test_a_peer_that_finds_nobody_does_not_wait_for_somebody_to_dial_it(caplog: pytest.LogCaptureFixture) -> None:
    """The last peer of a run that is started again knows addresses, of peers that are gone."""
    world, waited_s = World(3), list[float]()

    async def program(host: Host) -> None:
        presence = Presence(world.transport(host), rng=world.rng("alone"), wall_clock=host.wall_clock)
        try:
            gone = Address.of("10.9.9.9", PORT)
            await presence.start([gone], [Address.of(host.ip, PORT)], must_join=False, finds_mode=True)
            begun = asyncio.get_running_loop().time()
            await presence.own_mode.decided()
            waited_s.append(asyncio.get_running_loop().time() - begun)
        finally:
            await presence.stop()

    world.start("alone", program)
    world.run(60.0)
    assert waited_s == [0.0]
    assert "others can dial this peer" not in caplog.text
