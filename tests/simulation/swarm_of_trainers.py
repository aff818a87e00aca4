"""Peers that compute given batches of a model in virtual time, and one process that computes them all."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands.averaging import AveragingConfig
from manyhands.base.address import Address
from manyhands.peer import Presence
from manyhands.rpc import RpcConfig
from manyhands.testing import Host, World
from manyhands.testing.blocking import SimPeer, run_blocking
from manyhands.testing.numbered import current_life
from tests.inside import OpenOptimizer
from tests.simulation.worlds import join

PLAIN = AveragingConfig(codec="none", matchmaking_time_s=10.0, averaging_timeout_s=40.0)
BATCH_S = 0.5
WAIT_S = 0.2
PORT, RELAY_MBIT_S = 31337, 100.0
"""Of a coordinator."""

Batch = tuple[torch.Tensor, ...]
Train = Callable[["Member"], None]


@dataclass
class Member:
    """One peer with its model; what its program does is up to the test."""

    peer: SimPeer
    name: str
    model: torch.nn.Module
    optimizer: OpenOptimizer

    def step(self, loss: torch.Tensor, batch_s: float = BATCH_S, **options: Any) -> None:
        """One micro-batch, which takes some virtual seconds."""
        self.peer.sleep(batch_s)
        loss.backward()
        self.optimizer.step(**options)
        self.optimizer.zero_grad()

    def check_samples(self) -> None:
        """No sample is lost, and none counts twice."""
        counts = self.optimizer.statistics
        accounted = counts.samples_used + counts.samples_dropped + self.optimizer.samples_accumulated
        assert accounted == counts.samples_computed, counts

    def wait_for(self, global_step: int) -> None:
        """Take part in rounds, without more samples, until the run has reached a step."""
        for _ in range(2000):
            if self.optimizer.global_step >= global_step:
                return
            self.peer.sleep(WAIT_S)
            self.optimizer.step(batch_size=0)
        raise AssertionError(f"{self.name} did not reach step {global_step}: {self.optimizer.statistics}")


@dataclass
class Swarm:
    """Peers of one run in a world of their own.

    Attributes:
        done: the names of the peers whose programs have ended.
        started: the names of the peers whose programs have to end.
        initial_peers: the addresses at which peers that begin later join.
    """

    seed: int = 0
    executor_cost_s: Callable[[Callable[..., Any]], float] = lambda job: 0.001
    members: dict[str, Member] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.world = World(self.seed, executor_cost_s=self.executor_cost_s)
        self.world.network.default_link.latency_s = 0.02
        self.initial_peers: list[Address] = []
        self.started: set[str] = set()

    def start(
        self,
        name: str,
        make_model: Callable[[], torch.nn.Module],
        make_optimizer: Callable[[torch.nn.Module], Any],
        train: Train,
        *,
        client_mode: bool = False,
        begins_s: float = 0.0,
        initial_peers: list[Address] | None = None,
        **options: Any,
    ) -> None:
        """Start a peer, in client mode one that nobody can dial; ``options`` are those of the optimizer.

        Args:
            initial_peers: of a DHT of its own; peers that come later in it are added.
        """
        known = self.initial_peers if initial_peers is None else initial_peers

        async def program(host: Host) -> None:
            await asyncio.sleep(begins_s)
            presence = Presence(
                self.world.transport(host),
                client_mode=client_mode,
                rng=self.world.rng(name),
                wall_clock=host.wall_clock,
            )
            try:
                if not client_mode:
                    await presence.endpoint.listen([Address.of(host.ip, 0)])
                await join(presence.dht, known)
                known.extend(presence.endpoint.addresses)
                await run_blocking(lambda: live(SimPeer(presence)))
            finally:
                await presence.stop()

        def live(peer: SimPeer) -> None:
            model = make_model()
            optimizer = OpenOptimizer(
                make_optimizer(model), peer=peer, **{"run_id": "swarm", "averaging": PLAIN, **options}
            )
            member = self.members[name] = Member(peer, name, model, optimizer)
            train(member)
            self.done.add(name)
            while self.done != self.started:  # others may need the state
                peer.sleep(1.0)

        self.started.add(name)
        self.world.start(name, program)

    def start_behind(
        self, router: str, name: str, width: int, train: Train, *, mbit_s: float = math.inf, **options: Any
    ) -> None:
        """Start a peer with a linear layer behind a router, in client mode; one behind ``none`` can be dialled.

        Args:
            mbit_s: of its line, in each direction.
        """
        self.start(
            name,
            lambda: torch.nn.Linear(width, width),
            lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
            train,
            client_mode=router != "none",
            **options,
        )
        self.world.host(name).router = router  # type: ignore[assignment]
        if mbit_s < math.inf:
            self.world.network.set_bandwidth(name, up_mbit_s=mbit_s, down_mbit_s=mbit_s)

    def start_coordinator(self, name: str = "coordinator") -> Address:
        """Start a peer that only welcomes the others, and relays for them; returns its address."""

        async def program(host: Host) -> None:
            presence = Presence(
                self.world.transport(host), rng=self.world.rng(host.name), wall_clock=host.wall_clock,
                rpc_config=RpcConfig(relay_mbit_s=RELAY_MBIT_S),
            )  # fmt: skip
            try:
                await presence.start(self.initial_peers, [Address.of(host.ip, PORT)], must_join=False)
                self.initial_peers.extend(presence.endpoint.addresses)
                await asyncio.Event().wait()
            finally:
                await presence.stop()

        host = self.world.start(name, program)
        return Address.of(host.ip, PORT, self.world.identity(host.name).peer_id)

    def is_running(self, name: str) -> bool:
        """Whether the code that runs now is a peer's."""
        return current_life.get() is self.world.host(name).life

    def run(self, until_s: float = 600.0) -> None:
        """Let virtual time pass until all programs are done; once."""
        self.world.run(until_s)
        assert self.done == self.started, f"only {sorted(self.done)} of {sorted(self.started)} are done"


def together(num_peers: int, member: Member) -> None:
    """Wait until so many peers are seen."""
    for _ in range(200):
        member.peer.sleep(WAIT_S)
        member.optimizer.step(batch_size=0)
        if member.optimizer.num_peers >= num_peers:
            return
    raise AssertionError(f"{member.name} sees {member.optimizer.num_peers} peers")


def assert_equal_parameters(ours: torch.nn.Module, plain: torch.nn.Module, tolerance: float = 1e-5) -> None:
    """All parameters are those of the other model."""
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):

        def named(text: str, name: str = name) -> str:
            return f"{name}: {text}"

        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=named)


def cut(data: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Consecutive parts of a batch."""
    return list(zip(*(torch.split(tensor, list(sizes)) for tensor in data), strict=True))
