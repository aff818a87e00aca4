"""Trainers of a run with a charter, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from manyhands.access import SignedCharter
from manyhands.access.coordinator import Coordinator
from manyhands.base.address import Address
from manyhands.base.errors import ConfigError
from manyhands.base.identity import Identity
from manyhands.base.ticket import Ticket
from manyhands.peer import Presence
from manyhands.testing import Host, World
from manyhands.testing.blocking import SimPeer, run_blocking
from tests.inside import OpenOptimizer
from tests.simulation.swarm_of_trainers import PLAIN
from tests.simulation.worlds import join
from tests.unit.access.world import COORDINATOR, RUN, token_of


class ChartedRun:
    """A coordinator and trainers that join with a ticket.

    Attributes:
        ended: why the programs of trainers have ended.
        steps: when each trainer made which step.
    """

    def __init__(self, charter: SignedCharter, batch_s: float = 0.5) -> None:
        self.charter = charter
        self.batch_s = batch_s
        self.world = World(5)
        self.world.network.default_link.latency_s = 0.02
        self.addresses: dict[str, list[Address]] = {}
        self.models: dict[str, torch.nn.Module] = {}
        self.optimizers: dict[str, OpenOptimizer] = {}
        self.presences: dict[str, Presence] = {}
        self.ended: dict[str, str] = {}
        self.steps: dict[str, list[tuple[float, int]]] = {}

    def start_coordinator(self, work: Callable[[Presence, Coordinator], Awaitable[None]]) -> None:
        """Start the first peer, which serves the charter, and then does some work."""

        async def program(host: Host) -> None:
            presence = await self.presence(host, COORDINATOR)
            assert await presence.serve_charter(self.charter)
            await work(presence, presence.coordinators[RUN])
            await asyncio.Event().wait()

        self.world.start("first", program)

    def start(self, name: str, begins_s: float = 2.0, *, by: str = "first") -> None:
        """Start a trainer that was given the address of another peer."""

        async def program(host: Host) -> None:
            await asyncio.sleep(begins_s)
            presence = await self.presence(host, by=by)
            token = b"" if self.charter.is_open else token_of(10, expires_at=host.wall_clock() + 3600.0)
            await presence.join_run(Ticket(RUN, self.addresses[by], b"", self.charter.digest, token))
            await run_blocking(lambda: self._train(SimPeer(presence), host.name))

        self.world.start(name, program)

    async def presence(self, host: Host, identity: Identity | None = None, *, by: str = "first") -> Presence:
        """A peer of the DHT that was given the address of another one, if that is there."""
        transport = self.world.transport(host)
        if identity is not None:
            transport.identity = identity
        presence = Presence(transport, rng=self.world.rng(host.name), wall_clock=host.wall_clock)
        self.presences[host.name] = presence
        await presence.endpoint.listen([Address.of(host.ip, 0)])
        await join(presence.dht, self.addresses.get(by, []))
        self.addresses.setdefault(host.name, presence.endpoint.addresses)
        return presence

    def _train(self, peer: SimPeer, name: str) -> None:
        torch.manual_seed(1)
        model = self.models[name] = torch.nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        options: dict[str, Any] = {"target_batch_size": 32, "batch_size_per_step": 8, "averaging": PLAIN}
        optimizer = self.optimizers[name] = OpenOptimizer(inner, peer=peer, run_id=RUN, **options)
        steps = self.steps[name] = [(peer.time(), 0)]
        try:
            while True:
                peer.sleep(self.batch_s)
                torch.nn.functional.mse_loss(model(torch.ones(1, 2)), torch.ones(1, 1)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                if optimizer.global_step != steps[-1][1]:
                    steps.append((peer.time(), optimizer.global_step))
        except ConfigError as error:
            self.ended[name] = str(error)
            while True:  # it goes on serving and publishing
                peer.sleep(10.0)
