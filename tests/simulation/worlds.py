"""Worlds that several tests use."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from manyhands.averaging.messages import RoundManifest
from manyhands.base.address import Address
from manyhands.base.errors import JoinFailed
from manyhands.base.identity import PeerId
from manyhands.dht import DhtConfig, DhtNode
from manyhands.optim.optimizer import Optimizer
from manyhands.peer import Presence
from manyhands.rpc import Endpoint
from manyhands.testing import Host, World, at, between
from manyhands.testing.blocking import SimPeer, run_blocking

T = TypeVar("T")

KEY = "who is there"
RECORD_TTL_S = 20.0
PERIOD_S = 5.0
RETRY_S = 5.0


def dht_world(seed: int, num_peers: int = 6) -> tuple[World, dict[str, int]]:
    """Peers of one DHT over a jittery network; each publishes itself and counts whom it sees, every 5 s.

    Returns the world, and how many peers each host saw last. Some faults are scheduled already: a kill, a restart, and
    a partition of 20 s that cuts the first peer and its neighbour off from the rest.
    """
    world = World(seed)
    world.network.default_link.latency_s = 0.02
    world.network.default_link.jitter_s = 0.01
    names = [f"p{number}" for number in range(num_peers)]
    seen = start_dht(world, names)
    world.schedule(
        at(12.5).kill("p2"),
        at(25).restart("p2"),
        between(30, 50).partition(set(names[:2]), set(names[2:])),
    )
    return world, seen


def start_dht(world: World, names: list[str]) -> dict[str, int]:
    """Start a DHT peer on each host; returns how many peers each saw last.

    What they read must have been written by its owner, which is an invariant.
    """
    initial_peers: list[Address] = []
    seen: dict[str, int] = {}
    forged: list[str] = []
    name_of: dict[str, str] = {world.identity(name).peer_id: name for name in names}

    async def peer(host: Host) -> None:
        endpoint = Endpoint(world.transport(host), rng=world.rng(f"endpoint of {host.name}"))
        node = DhtNode(endpoint, DhtConfig(), rng=world.rng(f"dht of {host.name}"), wall_clock=host.wall_clock)
        try:
            await endpoint.listen([Address.of(host.ip, 0)])
            await join(node, initial_peers)
            if not initial_peers:
                initial_peers.extend(endpoint.addresses)
            while True:
                await node.store(KEY, host.name, RECORD_TTL_S, subkey=endpoint.peer_id)
                values = await node.get(KEY)
                seen[host.name] = len(values)
                forged.extend(subkey for subkey, value in values.items() if name_of.get(subkey) != value.value)
                await asyncio.sleep(PERIOD_S)
        finally:
            await node.close()
            await endpoint.close()

    for name in names:
        world.start(name, peer)
    world.invariant("what is read was written by its owner", lambda: not forged, lambda: forged)
    return seen


async def join(node: DhtNode, initial_peers: list[Address]) -> None:
    """Join as a user does who starts again when nobody answers."""
    while True:
        try:
            await node.join(initial_peers)
        except JoinFailed:
            await asyncio.sleep(RETRY_S)
        else:
            return


@dataclass
class Trainer:
    """What a simulated trainer shows of itself."""

    optimizer: Optimizer
    parameter: torch.nn.Parameter


def says(manifest: RoundManifest, peer_id: str, contribution: int) -> bool:
    """Whether a manifest has a member's samples as its weight; of more than the median, it may have less (ADR 45)."""
    weight = manifest.weights[manifest.members.index(PeerId(peer_id))]
    return weight == contribution or statistics.median(filter(None, manifest.weights)) <= weight < contribution


@dataclass
class Ledger:
    """Who committed what, in all rounds of a world."""

    manifests: dict[bytes, bytes] = field(default_factory=dict)
    parameters: dict[bytes, bytes] = field(default_factory=dict)
    members: dict[str, set[bytes]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def count(self, peer_id: str, optimizer: Optimizer) -> None:
        """Each sample of a trainer was used once, was dropped, or waits."""
        done = optimizer.statistics
        accounted = done.samples_used + done.samples_dropped + optimizer.samples_accumulated
        if accounted != done.samples_computed:
            self.faults.append(f"{peer_id} accounts for {accounted} samples: {done}")

    def commit(self, peer_id: PeerId, manifest: RoundManifest, contribution: int, parameter: torch.Tensor) -> None:
        """A member has applied the result of a round."""
        group_id, fingerprint = manifest.group_id, manifest.fingerprint()
        if self.manifests.setdefault(group_id, fingerprint) != fingerprint:
            self.faults.append(f"{peer_id} committed another result of {group_id.hex()}")
        values = parameter.detach().numpy().tobytes()
        if self.parameters.setdefault(fingerprint, values) != values:
            self.faults.append(f"{peer_id} has other parameters after {group_id.hex()}")
        mine = self.members.setdefault(peer_id, set())
        if group_id in mine:
            self.faults.append(f"{peer_id} applied {group_id.hex()} twice")
        mine.add(group_id)
        if not says(manifest, peer_id, contribution):
            self.faults.append(f"{peer_id} gave {contribution} samples, and {group_id.hex()} says otherwise")

    def is_clean(self) -> bool:
        """Whether nothing was wrong so far."""
        return not self.faults

    def what(self) -> str:
        """What was wrong."""
        return "; ".join(self.faults)

    @property
    def num_rounds(self) -> int:
        """Rounds that somebody committed."""
        return len(self.manifests)


class CountedPeer(SimPeer):
    """Has the samples of its trainer counted whenever the training code waits: they change at no other time."""

    def __init__(self, presence: Presence, ledger: Ledger) -> None:
        super().__init__(presence)
        self.ledger = ledger
        self.optimizer: Optimizer | None = None

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float, phase: str) -> T:
        self._count()
        return super().run(coro, timeout_s, phase)

    def sleep(self, seconds: float) -> None:
        self._count()
        super().sleep(seconds)

    def _count(self) -> None:
        if self.optimizer is not None:
            self.ledger.count(self.peer_id, self.optimizer)


def training_world(
    seed: int, num_peers: int, *, batch_s: float = 5.0, batch_size: int = 4, target_batch_size: int = 192
) -> tuple[World, dict[str, Trainer]]:
    """Trainers of one run over a jittery network, and nothing scheduled yet; see :func:`start_training`."""
    world = World(seed)
    world.network.default_link.latency_s = 0.02
    world.network.default_link.jitter_s = 0.005
    names = [f"p{number}" for number in range(num_peers)]
    trainers, _ = start_training(world, names, batch_s, batch_size, target_batch_size)
    return world, trainers


def start_training(
    world: World,
    names: list[str],
    batch_s: float,
    batch_size: int,
    target_batch_size: int,
    start_period_s: float = 0.0,
) -> tuple[dict[str, Trainer], Ledger]:
    """Start a trainer on each host: the real DHT, matchmaking, averaging and optimizer, and a vector of 8 parameters.

    Each has a loss of its own, a pull towards its number; the mean over all is what the run should find. After every
    event, members of a round must hold one result, and every sample must be accounted for once. They start one after
    the other, ``start_period_s`` apart.
    """
    trainers: dict[str, Trainer] = {}
    ledger = Ledger()

    def train(sim_peer: CountedPeer, name: str, rng: random.Random) -> None:
        parameter = torch.nn.Parameter(torch.zeros(8))
        optimizer = Optimizer(
            torch.optim.SGD([parameter], lr=0.1),
            peer=sim_peer,
            run_id="simulated",
            target_batch_size=target_batch_size,
            batch_size_per_step=batch_size,
        )
        trainers[name] = Trainer(optimizer, parameter)
        sim_peer.optimizer = optimizer
        goal = float(name.removeprefix("p"))
        while True:
            sim_peer.sleep(batch_s * rng.uniform(0.8, 1.2))
            parameter.grad = (parameter - goal).detach()
            before = optimizer.last_round
            optimizer.step()
            if optimizer.last_round is not None and optimizer.last_round is not before:
                ledger.commit(sim_peer.peer_id, optimizer.last_round, optimizer.last_contribution, parameter)

    start_peers(world, {name: number * start_period_s for number, name in enumerate(names)}, ledger, train)
    return trainers, ledger


def start_peers(
    world: World,
    begins_s: dict[str, float],
    ledger: Ledger,
    train: Callable[[CountedPeer, str, random.Random], None],
) -> None:
    """Start a peer on each host, at its time, and have it train; the ledger must stay clean after every event."""
    initial_peers: list[Address] = []

    async def peer(host: Host) -> None:
        await asyncio.sleep(max(0.0, begins_s[host.name] - world.loop.time()))
        rng = world.rng(f"peer {host.name} from {world.loop.time()}")
        presence = Presence(world.transport(host), rng=rng, wall_clock=host.wall_clock)
        try:
            await presence.endpoint.listen([Address.of(host.ip, 0)])
            await join(presence.dht, initial_peers)
            initial_peers.extend(presence.endpoint.addresses[: 3 - len(initial_peers)])
            await run_blocking(lambda: train(CountedPeer(presence, ledger), host.name, rng))
        finally:
            await presence.stop()

    for name in begins_s:
        world.start(name, peer)
    world.invariant(
        "members of one round hold one result, and no sample is lost or counted twice", ledger.is_clean, ledger.what
    )
