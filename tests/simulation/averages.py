"""Public averagers in a world with faults: the real DHT, presence, matchmaking and all-reduce, no optimizer."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from manyhands.averaging.averager import Averager, RoundResult
from manyhands.averaging.config import AveragingConfig
from manyhands.base.address import Address
from manyhands.base.identity import PeerId
from manyhands.peer import Presence
from manyhands.testing import Host, World
from manyhands.testing.blocking import SimPeer, run_blocking
from tests.simulation.worlds import join

NUMEL = 3_000
PAUSE_S = 2.0
TIMEOUT_S = 12.0
CONFIG = AveragingConfig(matchmaking_time_s=4.0, averaging_timeout_s=10.0)


@dataclass
class Averages:
    """What the members of a world were given, and what was wrong with it.

    Attributes:
        times: when each peer's last round committed, and with how many members.
        num_rounds: rounds that somebody committed.
    """

    times: dict[str, tuple[float, int]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    _results: dict[str, tuple[tuple[PeerId, ...], dict[PeerId, float]]] = field(default_factory=dict)
    _means: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def num_rounds(self) -> int:
        return len(self._results)

    def check(
        self, peer_id: PeerId, weight: float, before: torch.Tensor, after: torch.Tensor, result: RoundResult
    ) -> None:
        """A step has ended; all values of a vector were equal before it."""
        if not result.committed:
            if not torch.equal(before, after):
                self.wrong.append(f"{peer_id} was told {result.reason!r}, but its tensor was written")
            if not result.reason:
                self.wrong.append(f"{peer_id} was told nothing")
            return
        facts = (result.group, dict(result.contributors))
        if self._results.setdefault(result.round_id, facts) != facts:
            self.wrong.append(f"{peer_id} was told of another group {result.round_id}")
        if not torch.equal(self._means.setdefault(result.round_id, after.clone()), after):
            self.wrong.append(f"{peer_id} holds another mean of {result.round_id}")
        if result.contributors.get(peer_id, 0.0) != weight:
            self.wrong.append(f"{peer_id} gave {weight}, and {result.round_id} says otherwise")


def expected_mean(numbers: dict[PeerId, float], result: RoundResult) -> torch.Tensor:
    """The mean of the numbers of those who contributed; who was lost on the way counts in some parts only."""
    total_N, weight_N = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for peer_id, weight in result.contributors.items():
        for start, stop in result.cut.get(peer_id, [(0, NUMEL)]):
            total_N[start:stop] += numbers[peer_id] * weight
            weight_N[start:stop] += weight
    return total_N / weight_N


def start_averages(world: World, names: list[str], initial_peers: list[Address] | None = None) -> Averages:
    """Start an averager on each host, which steps again and again; what must be true of it is an invariant.

    Each has its own number as value before each step, so the mean must be that of the numbers of who contributed.
    """
    averages = Averages()
    initial_peers = [] if initial_peers is None else initial_peers
    numbers = {world.identity(name).peer_id: float(number + 1) for number, name in enumerate(names)}

    async def peer(host: Host) -> None:
        rng = world.rng(f"averages of {host.name} from {world.loop.time()}")
        presence = Presence(world.transport(host), rng=rng, wall_clock=host.wall_clock)
        try:
            await presence.endpoint.listen([Address.of(host.ip, 0)])
            await join(presence.dht, initial_peers)
            initial_peers.extend(presence.endpoint.addresses[: 3 - len(initial_peers)])
            await run_blocking(lambda: average(SimPeer(presence), host.name, rng))
        finally:
            await presence.stop()

    def average(sim_peer: SimPeer, name: str, rng: random.Random) -> None:
        tensor = torch.zeros(NUMEL)
        averager = Averager([tensor], peer=sim_peer, run_id="simulated", averaging=CONFIG)
        while True:
            sim_peer.sleep(rng.uniform(0.0, PAUSE_S))
            before = tensor.fill_(numbers[sim_peer.peer_id]).clone()
            weight = float(rng.randint(1, 9))
            result = averager.step(weight, TIMEOUT_S)
            averages.check(sim_peer.peer_id, weight, before, tensor, result)
            if result.committed:
                mean_N = expected_mean(numbers, result)
                if not torch.allclose(tensor, mean_N):
                    averages.wrong.append(f"the mean of {result.round_id} is not {mean_N.unique()}")
                averages.times[name] = (world.loop.time(), len(result.group))

    for name in names:
        world.start(name, peer)
    world.invariant("members of one round hold one mean", lambda: not averages.wrong, lambda: averages.wrong)
    return averages
