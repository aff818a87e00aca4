"""Peers that look for their group in virtual time, with meetings that a test gives: no DHT, no values."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.matchmaking.matchmaker import Matchmaker
from manyhands.averaging.messages import ASK_IN_ROUND, Group, InRound, Position
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.address import Address
from manyhands.base.errors import RoundAborted
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint
from manyhands.testing import Host, World
from tests.swarm import FixedMeeting

START = Position(0, b"start")
CONFIG = AveragingConfig(matchmaking_time_s=15.0, averaging_timeout_s=60.0)
AT_ONCE_S = 1.0
"""A group that waits for one of the bounds takes longer."""
FOREVER_S = 1000.0
ROUND_S = 0.5
"""What a round takes once its group has formed; then its members are at the next position."""


@dataclass
class Seeker:
    """A peer that looks for a group once.

    Args:
        name: of its host. Of two peers, that with the lower name has the lower id.
        knows: whom it expects.
        begins_s: when it begins to look; None if it never does.
        guest_of: to whom it is connected before.
        failures: so many of its rounds fail, and it looks again ``pause_s`` later.
        gather_s: how long it waits for those whom it expects; ``matchmaking_time_s`` if that is None.
        run_members: the members of the run, as it knows.
        finding: a further search that a test has begun.
    """

    name: str
    knows: Iterable[str]
    begins_s: float | None = 1.0
    is_client: bool = False
    position: Position = START
    fingerprint: bytes = b"same"
    attempts: int = 1
    guest_of: str = ""
    group: Group | None = None
    reasons: list[str] = field(default_factory=list)
    took_s: float = -1.0
    meeting: FixedMeeting = field(init=False)
    matchmaker: Matchmaker | None = None
    failures: int = 0
    pause_s: float = 0.0
    gather_s: float | None = None
    run_members: Iterable[str] = ()
    finding: asyncio.Task[None] | None = None


@dataclass
class Search:
    """A world of seekers.

    Attributes:
        world: schedule faults in it, then :meth:`run` it.
    """

    seekers: dict[str, Seeker]
    world: World
    ids: dict[str, PeerId]

    def __getitem__(self, name: str) -> Seeker:
        return self.seekers[name]

    def run(self, duration_s: float = 120.0) -> None:
        """Let all of them look."""
        self.world.run(duration_s)

    def members(self, name: str) -> set[str]:
        """Who is in the group that a peer has found; empty if it has none."""
        group = self[name].group
        names = {peer_id: other for other, peer_id in self.ids.items()}
        return set() if group is None else {names[member.peer_id] for member in group.members}

    def check_that_groups_agree(self) -> None:
        """Those who are in one group hold the same one, and nobody is in two."""
        for name, seeker in self.seekers.items():
            for other in self.members(name):
                if (its := self[other].group) is not None and seeker.group is not None:
                    assert its == seeker.group, f"{name} and {other} hold different groups"


def search(seekers: Iterable[Seeker], seed: int = 1, config: AveragingConfig = CONFIG) -> Search:
    """A world in which they look for each other over links of 20 ms."""
    by_name = {seeker.name: seeker for seeker in seekers}
    world = World(seed)
    world.network.default_link.latency_s = 0.02
    world.network.default_link.jitter_s = 0.005
    identities = sorted((world.identity(name) for name in by_name), key=lambda identity: identity.peer_id)
    of_name = dict(zip(sorted(by_name), identities, strict=True))
    world.identity = of_name.__getitem__  # type: ignore[method-assign,assignment]
    ids = {name: identity.peer_id for name, identity in of_name.items()}
    addresses: dict[str, list[Address]] = {}

    async def run(host: Host) -> None:
        seeker = by_name[host.name]
        endpoint = Endpoint(
            world.transport(host), client_mode=seeker.is_client, rng=world.rng(f"endpoint of {host.name}")
        )
        if not seeker.is_client:
            await endpoint.listen([Address.of(host.ip, 0)])
            addresses[host.name] = endpoint.addresses
        seeker.meeting = FixedMeeting(
            endpoint,
            {ids[name]: by_name[name].is_client for name in seeker.knows},
            seeker.position,
            members={ids[name] for name in seeker.run_members},
        )
        rng = world.rng(f"groups of {host.name}")
        run_endpoint = RunEndpoint(endpoint, "run")
        run_endpoint.handle(ASK_IN_ROUND, lambda remote, query: InRound(False))  # as each peer of a run does
        seeker.matchmaker = Matchmaker(run_endpoint, seeker.fingerprint, seeker.meeting, config, rng)
        try:
            await asyncio.sleep(0.5)
            for name in seeker.knows:
                endpoint.learn(ids[name], addresses.get(name, []))
            if seeker.guest_of:
                await endpoint.connect(addresses[seeker.guest_of][0])
            if seeker.begins_s is not None:
                await asyncio.sleep(seeker.begins_s - world.loop.time())
                await seek(seeker, seeker.matchmaker)
            await asyncio.sleep(FOREVER_S)
        finally:
            await seeker.matchmaker.close()
            await endpoint.close()

    async def seek(seeker: Seeker, matchmaker: Matchmaker) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(seeker.attempts):
            began = loop.time()
            try:
                seeker.group = await matchmaker.find_group(1.0, 0, seeker.gather_s)
            except RoundAborted as error:
                seeker.reasons.append(error.reason)
                seeker.took_s = loop.time() - began
                await asyncio.sleep(0.2)
                continue
            seeker.took_s = loop.time() - began
            if len(seeker.reasons) < seeker.failures:
                await asyncio.sleep(ROUND_S)
                seeker.reasons.append("the round failed")
                matchmaker.round_over(seeker.group, (), is_committed=False)
                await asyncio.sleep(seeker.pause_s)
                continue
            await asyncio.sleep(ROUND_S)
            matchmaker.round_over(seeker.group, (), is_committed=True)
            seeker.meeting.at = Position(seeker.position.step + 1, b"after the round")
            return

    for name in by_name:
        world.start(name, run)
    return Search(by_name, world, ids)


def everybody(names: str, **changes: Mapping[str, object]) -> list[Seeker]:
    """One peer for each letter, who know each other; ``changes`` are fields of some of them."""
    return [
        Seeker(name, **({"knows": [other for other in names if other != name]} | dict(changes.get(name, {}))))  # type: ignore[arg-type]
        for name in names
    ]
