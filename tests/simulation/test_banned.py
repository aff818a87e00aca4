"""A member of a run by invitation is banned while it trains: the others go on without it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import pytest
import torch

from manyhands.access.joining import JoiningPeer, serve_charter
from manyhands.base.address import Address
from manyhands.base.errors import ConfigError
from manyhands.base.identity import Identity
from manyhands.base.ticket import Ticket
from manyhands.optim.optimizer import Optimizer
from manyhands.peer import Presence
from manyhands.testing import Host, World
from manyhands.testing.blocking import SimPeer, run_blocking
from tests.simulation.swarm_of_trainers import PLAIN
from tests.simulation.worlds import join
from tests.unit.access.world import CHARTER, COORDINATOR, RUN, token_of

BATCH_S = 0.5
BANNED_S = 60.0


class InvitedRun:
    """A coordinator and trainers with leases."""

    def __init__(self) -> None:
        self.world = World(5)
        self.world.network.default_link.latency_s = 0.02
        self.known: list[Address] = []
        self.optimizers: dict[str, Optimizer] = {}
        self.presences: dict[str, Presence] = {}
        self.ended: dict[str, str] = {}
        self.steps = [(0.0, 0)]  # when "good" made which step

    def start_coordinator(self) -> None:
        async def program(host: Host) -> None:
            presence = await self._presence(host, "first", COORDINATOR)
            place = JoiningPeer(presence.endpoint, presence.dht, presence.rng, host.wall_clock)
            coordinator, _ = await serve_charter(CHARTER, place)
            await asyncio.sleep(BANNED_S)
            coordinator._ledger.ban(self.presences["bad"].peer_id, host.wall_clock())
            await asyncio.sleep(1e6)

        self.world.start("first", program)

    def start(self, name: str) -> None:
        async def program(host: Host) -> None:
            await asyncio.sleep(2.0)
            presence = await self._presence(host, name, None)
            token = token_of(10, expires_at=host.wall_clock() + 3600.0)
            await presence.join_run(Ticket(RUN, self.known[:1], b"", CHARTER.digest, token))
            await run_blocking(lambda: self._train(SimPeer(presence), name))

        self.world.start(name, program)

    async def _presence(self, host: Host, name: str, identity: Identity | None) -> Presence:
        transport = self.world.transport(host)
        if identity is not None:
            transport.identity = identity
        presence = Presence(transport, rng=self.world.rng(name), wall_clock=host.wall_clock)
        self.presences[name] = presence
        await presence.endpoint.listen([Address.of(host.ip, 0)])
        await join(presence.dht, self.known)
        self.known.extend(presence.endpoint.addresses)
        return presence

    def _train(self, peer: SimPeer, name: str) -> None:
        model = torch.nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"target_batch_size": 32, "batch_size_per_step": 8, "averaging": PLAIN}
        optimizer = self.optimizers[name] = Optimizer(inner, peer=peer, run_id=RUN, **options)
        try:
            while True:
                peer.sleep(BATCH_S)
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if name == "good" and optimizer.global_step != self.steps[-1][1]:
                    self.steps.append((peer.time(), optimizer.global_step))
        except ConfigError as error:
            self.ended[name] = str(error)
            self._stay(peer)

    def _stay(self, peer: SimPeer) -> None:
        """A banned peer of another version goes on serving and publishing."""
        while True:
            peer.sleep(10.0)

    def longest_wait_s(self, since: float, until: float) -> float:
        """Between two steps of "good"."""
        times = [now for now, _ in self.steps if since <= now <= until]
        return max(later - earlier for earlier, later in itertools.pairwise([since, *times, until]))


def test_the_others_go_on_at_once_when_a_member_is_banned(caplog: pytest.LogCaptureFixture) -> None:
    run = InvitedRun()
    run.start_coordinator()
    run.start("good")
    run.start("bad")
    caplog.set_level(logging.INFO)
    run.world.run(150.0)
    assert "this peer was banned from run" in run.ended["bad"]
    assert run.longest_wait_s(20.0, BANNED_S) < 4.0
    assert run.longest_wait_s(BANNED_S, 150.0) < 8.0, "alone it takes 2 s, with the other peer 1 s"
    told = [record.getMessage() for record in caplog.records if "refused (banned)" in record.getMessage()]
    assert len(told) <= 4, told
