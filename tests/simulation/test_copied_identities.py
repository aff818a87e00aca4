"""One identity in two processes, as when a state folder is copied to a second machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from manyhands.access.messages import LeaseRequest, RunMethods
from manyhands.base.address import Address
from manyhands.base.errors import ConfigError, Refused
from manyhands.base.identity import Identity
from manyhands.optim.optimizer import Optimizer
from manyhands.peer import Presence
from manyhands.testing import Host, World, at
from manyhands.testing.blocking import SimPeer, run_blocking
from tests.simulation.swarm_of_trainers import PLAIN
from tests.simulation.worlds import join
from tests.unit.access.world import CHARTER, COORDINATOR, RUN, token_of

COPIED = Identity.from_seed(b"\x07" * 32)
BATCH_S = 0.5


class Machines:
    """A trainer, and others that may have one identity."""

    def __init__(self) -> None:
        self.world = World(3)
        self.world.network.default_link.latency_s = 0.02
        self.known: list[Address] = []
        self.ended: dict[str, tuple[float, str]] = {}
        self.optimizers: dict[str, Optimizer] = {}

    def start(self, name: str, begins_s: float, identity: Identity | None = None) -> None:
        async def program(host: Host) -> None:
            await asyncio.sleep(begins_s if not self.optimizers.get(name) else 0.0)
            transport = self.world.transport(host)
            if identity is not None:
                transport.identity = identity
            presence = Presence(transport, rng=self.world.rng(name), wall_clock=host.wall_clock)
            try:
                await presence.endpoint.listen([Address.of(host.ip, 0)])
                await join(presence.dht, self.known)
                self.known.extend(presence.endpoint.addresses)
                await run_blocking(lambda: self._train(SimPeer(presence), name))
            finally:
                await presence.stop()

        self.world.start(name, program)

    def _train(self, peer: SimPeer, name: str) -> None:
        model = torch.nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"target_batch_size": 256, "batch_size_per_step": 8, "averaging": PLAIN}
        try:
            optimizer = self.optimizers[name] = Optimizer(inner, peer=peer, run_id="run", **options)
        except ConfigError as error:
            self.ended[name] = peer.time(), str(error)
            return
        try:
            while True:
                peer.sleep(BATCH_S)
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        except ConfigError as error:
            self.ended[name] = peer.time(), str(error)
            optimizer.close()


def assert_only_the_younger_one_ended(ended: Mapping[str, tuple[float, str]], caplog: pytest.LogCaptureFixture) -> None:
    """Within 30 s of its begin at 60 s; both were told."""
    assert list(ended) == ["younger"]
    ended_at, why = ended["younger"]
    assert ended_at < 60.0 + 30.0
    assert "It began earlier" in why
    told = [record.message for record in caplog.records if "another process" in record.message]
    assert any("It began later" in line and "this one goes on" in line for line in told)


def test_of_two_peers_with_one_identity_the_younger_one_ends_within_30_s(caplog: pytest.LogCaptureFixture) -> None:
    machines = Machines()
    machines.start("other", 0.0)
    machines.start("older", 1.0, COPIED)
    machines.start("younger", 60.0, COPIED)
    caplog.set_level(logging.ERROR)
    machines.world.run(110.0)
    assert_only_the_younger_one_ended(machines.ended, caplog)
    assert f"another process has the identity of this peer, {COPIED.peer_id}: a folder" in machines.ended["younger"][1]
    assert machines.optimizers["older"].global_step > machines.optimizers["younger"].global_step > 0


def test_a_peer_that_was_killed_and_restarted_is_not_taken_for_a_second_one() -> None:
    machines = Machines()
    machines.start("other", 0.0)
    machines.start("back", 1.0, COPIED)
    machines.world.schedule(*(at(30.0 + 20 * turn).kill("back") for turn in range(2)))
    machines.world.schedule(*(at(31.0 + 20 * turn).restart("back") for turn in range(2)))
    machines.world.run(110.0)
    assert not machines.ended


class Coordinators:
    """Coordinators of one run that have one identity, and a peer that knows them."""

    def __init__(self) -> None:
        self.world = World(4)
        self.world.network.default_link.latency_s = 0.02
        self.known: list[Address] = []
        self.addresses: dict[str, Address] = {}
        self.start("other", 0.0, None)

    def start(self, name: str, begins_s: float, identity: Identity | None = COORDINATOR) -> None:
        async def program(host: Host) -> None:
            if name not in self.addresses:
                await asyncio.sleep(begins_s)
            presence = await self.presence(host, name, identity)
            await join(presence.dht, self.known[:1])
            self.known.append(self.addresses[name])
            if identity is not None:
                assert await presence.serve_charter(CHARTER)
            await asyncio.sleep(1e6)

        self.world.start(name, program)

    async def presence(self, host: Host, name: str, identity: Identity | None) -> Presence:
        transport = self.world.transport(host)
        if identity is not None:
            transport.identity = identity
        presence = Presence(transport, rng=self.world.rng(name), wall_clock=host.wall_clock)
        await presence.endpoint.listen([Address.of(host.ip, 0)])
        self.addresses[name] = presence.endpoint.addresses[0]
        return presence

    def ask(self, name: str, at_s: float, answers: dict[str, str]) -> None:
        """A peer that knows one address asks for a lease."""

        async def program(host: Host) -> None:
            await asyncio.sleep(at_s)
            presence = await self.presence(host, f"asks {name}", None)
            peer_id = await presence.endpoint.connect(self.addresses[name])
            token = token_of(expires_at=host.wall_clock() + 3600.0, name=f"{name:12}".encode()[:12])
            request = LeaseRequest(CHARTER.digest, host.wall_clock(), token)
            try:
                await presence.endpoint.call(peer_id, RunMethods(RUN).lease, request, 5.0)
                answers[name] = "a lease"
            except Refused as refusal:
                answers[name] = refusal.code
            await presence.stop()

        self.world.start(f"asks {name}", program)


def told_of_copies(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "another process" in record.message]


def test_of_two_coordinators_with_one_identity_the_younger_one_gives_no_leases(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It goes on: else whoever got the key of a coordinator could end its process."""
    run = Coordinators()
    answers: dict[str, str] = {}
    run.start("older", 1.0)
    run.start("younger", 60.0)
    run.ask("older", 90.0, answers)
    run.ask("younger", 90.0, answers)
    caplog.set_level(logging.ERROR)
    run.world.run(200.0)
    assert answers == {"older": "a lease", "younger": "not_here"}
    told = told_of_copies(caplog)
    assert any("It began earlier" in line and "this process gives no leases" in line for line in told)
    assert any("It began later" in line and "this one goes on" in line for line in told)


def test_of_two_coordinators_with_one_identity_that_begin_at_once_the_younger_one_gives_no_leases() -> None:
    run = Coordinators()
    answers: dict[str, str] = {}
    run.start("older", 1.0)
    run.start("younger", 1.3)
    run.ask("older", 1.3 + 30.0, answers)
    run.ask("younger", 1.3 + 30.0, answers)
    run.world.run(40.0)
    assert answers == {"older": "a lease", "younger": "not_here"}


def test_a_coordinator_that_was_killed_and_restarted_is_not_taken_for_a_second_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Coordinators()
    caplog.set_level(logging.ERROR)
    run.start("back", 1.0)
    run.world.schedule(*(at(30.0 + 20 * turn).kill("back") for turn in range(3)))
    run.world.schedule(*(at(31.0 + 20 * turn).restart("back") for turn in range(3)))
    run.world.run(150.0)
    assert not told_of_copies(caplog)
