"""Averaging rounds under faults, without a DHT and an optimizer: most of the time a round is under way."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import torch

from manyhands.averaging.averager_presence import next_position
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import Position, SpanResult
from manyhands.averaging.rounds import CommittedRound, RoundRunner
from manyhands.base.address import Address
from manyhands.base.errors import RoundAborted
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint
from manyhands.testing import Host, World
from tests.swarm import FixedMeeting

NUMEL = 30_000
CONFIG = AveragingConfig(matchmaking_time_s=2.0, averaging_timeout_s=10.0)
PAUSE_S = 0.5


@dataclass
class Commits:
    """What the members of a world committed, and what was wrong with it.

    Attributes:
        latest: the position of the branch that has come furthest; who is behind loads it.
        times: when each peer committed last, and with how many members.
    """

    latest: Position = field(default_factory=lambda: Position(0, b"start"))
    times: dict[PeerId, tuple[float, int]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    _fingerprints: dict[bytes, bytes] = field(default_factory=dict)
    means: dict[bytes, torch.Tensor] = field(default_factory=dict)

    @property
    def num_rounds(self) -> int:
        """Rounds that somebody committed."""
        return len(self._fingerprints)

    def add(self, peer_id: PeerId, weight: float, result: CommittedRound, values: dict[PeerId, float]) -> None:
        """A member has committed a round; each member's vector has one value, which tells what the mean must be."""
        manifest, averaged_N = result.manifest, result.averaged_N
        group_id = manifest.group_id
        if self._fingerprints.setdefault(group_id, manifest.fingerprint()) != manifest.fingerprint():
            self.wrong.append(f"{peer_id} committed another result of {group_id.hex()}")
        weights = dict(zip(manifest.members, manifest.weights, strict=True))
        if weights[peer_id] not in (weight, 0.0):
            self.wrong.append(f"{peer_id} gave {weight} samples to {group_id.hex()}, which counts {weights[peer_id]}")
        if averaged_N is not None:
            if not torch.equal(self.means.setdefault(group_id, averaged_N), averaged_N):
                self.wrong.append(f"{peer_id} holds another mean of {group_id.hex()}")
            for part in manifest.parts or [SpanResult(0, NUMEL, 0, [])]:
                here = {
                    member: float(weight)
                    for rank, (member, weight) in enumerate(weights.items())
                    if rank not in part.absent
                }
                mean = sum(values[member] * weight for member, weight in here.items()) / sum(here.values())
                if not torch.allclose(averaged_N[part.start : part.stop], torch.tensor(mean)):
                    self.wrong.append(f"the mean of {group_id.hex()} from {part.start} is not {mean}")
        position = next_position(manifest.position, manifest)
        if (position.step, position.lineage) > (self.latest.step, self.latest.lineage):
            self.latest = position


def start_rounds(world: World, names: list[str]) -> Commits:
    """Start a peer on each host that goes from round to round; that nobody disagrees is an invariant."""
    commits = Commits()
    addresses: dict[PeerId, list[Address]] = {}
    ids = {name: world.identity(name).peer_id for name in names}
    values = {peer_id: float(number + 1) for number, peer_id in enumerate(ids.values())}

    async def peer(host: Host) -> None:
        rng = world.rng(f"rounds of {host.name} from {world.loop.time()}")
        endpoint = Endpoint(world.transport(host), rng=world.rng(f"endpoint of {host.name}"))
        roster = FixedMeeting(endpoint, {peer_id: False for peer_id in ids.values() if peer_id != endpoint.peer_id})
        averager = RoundRunner(endpoint, "simulated", b"", roster, CONFIG, rng)
        try:
            await endpoint.listen([Address.of(host.ip, 0)])
            addresses[endpoint.peer_id] = endpoint.addresses
            vector_N = torch.full((NUMEL,), values[endpoint.peer_id])
            while True:
                await asyncio.sleep(rng.uniform(0.0, PAUSE_S))
                for other, where in addresses.items():
                    endpoint.learn(other, where)
                await take_part(endpoint, roster, averager, vector_N, rng)
        finally:
            await averager.close()
            await endpoint.close()

    async def take_part(
        endpoint: Endpoint, roster: FixedMeeting, averager: RoundRunner, vector_N: torch.Tensor, rng: random.Random
    ) -> None:
        roster.at = max(roster.at, commits.latest, key=lambda at: (at.step, at.lineage))
        roster.missing.clear()
        weight = float(rng.randint(0, 9))
        try:
            given_N, refill = (vector_N.clone(), vector_N.clone) if rng.random() < 0.5 else (vector_N, None)
            result = await averager.average(given_N, weight, refill=refill)
        except RoundAborted:
            return
        commits.add(endpoint.peer_id, weight, result, values)
        commits.times[endpoint.peer_id] = (world.loop.time(), len(result.manifest.members))
        roster.at = next_position(result.manifest.position, result.manifest)

    for name in names:
        world.start(name, peer)
    world.invariant("no two members committed different results", lambda: not commits.wrong, lambda: commits.wrong)
    return commits
