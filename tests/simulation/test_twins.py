"""One identity in two processes, as when a state folder is copied to a second machine."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import torch

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError
from manyhands.base.identity import Identity
from manyhands.optim.optimizer import Optimizer
from manyhands.peer import Presence
from manyhands.testing import Host, World, at
from manyhands.testing.blocking import SimPeer, run_blocking
from tests.simulation.swarm_of_trainers import PLAIN
from tests.simulation.worlds import join

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
        optimizer = self.optimizers[name] = Optimizer(inner, peer=peer, run_id="run", **options)
        try:
            while True:
                peer.sleep(BATCH_S)
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        except ConfigError as error:
            self.ended[name] = peer.time(), str(error)
            optimizer.close()


def test_both_are_told_within_30_s_and_the_younger_one_refuses_to_go_on(caplog: pytest.LogCaptureFixture) -> None:
    machines = Machines()
    machines.start("other", 0.0)
    machines.start("older", 1.0, COPIED)
    machines.start("younger", 60.0, COPIED)
    caplog.set_level(logging.ERROR)
    machines.world.run(150.0)
    assert list(machines.ended) == ["younger"]
    ended_at, why = machines.ended["younger"]
    assert ended_at < 60.0 + 30.0
    assert (
        f"another process trains with the identity of this peer, {COPIED.peer_id}: a folder with it was copied" in why
    )
    assert "It began earlier" in why
    told = [record.message for record in caplog.records if "another process" in record.message]
    assert any("It began later" in line and "this one goes on" in line for line in told)
    assert machines.optimizers["older"].global_step > machines.optimizers["younger"].global_step > 0


def test_a_peer_that_was_killed_and_is_back_is_nobodys_twin() -> None:
    machines = Machines()
    machines.start("other", 0.0)
    machines.start("back", 1.0, COPIED)
    machines.world.schedule(*(at(30.0 + 20 * turn).kill("back") for turn in range(3)))
    machines.world.schedule(*(at(31.0 + 20 * turn).restart("back") for turn in range(3)))
    machines.world.run(150.0)
    assert not machines.ended
