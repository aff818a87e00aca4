"""Small swarms for tests: averagers in one process, over real sockets or in memory."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from manyhands.averaging.attendees import Attendees
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import Position
from manyhands.averaging.roster import Roster, Standing
from manyhands.averaging.round.limits import MemberLimits
from manyhands.averaging.rounds import RoundRunner
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint, RpcConfig
from tests.network import endpoints, identity_of
from tests.smaller import smaller

__all__ = ["RUN_ID", "FixedMeeting", "averagers", "endpoints", "identity_of"]

RUN_ID = "test-run"


@dataclass
class FixedMeeting:
    """A meeting with given peers, for rounds without a DHT.

    Attributes:
        members: the members of the run's roster; without any, peers share no roster.
        num_calls: to the training loop.
    """

    endpoint: Endpoint
    others: dict[PeerId, bool]
    at: Position = field(default_factory=lambda: Position(0, b"start"))
    missing: list[PeerId] = field(default_factory=list)
    num_calls: int = 0
    members: set[PeerId] = field(default_factory=set)
    of_run: Roster | None = None

    def position(self) -> Position:
        return self.at

    def attendees(self) -> Attendees:
        return Attendees.of(self.endpoint, self.at, self.expected(), self.roster())

    def expected(self) -> dict[PeerId, bool]:
        return {peer_id: is_client for peer_id, is_client in self.others.items() if peer_id not in self.missing}

    def roster(self) -> Roster | None:
        if self.of_run is not None:
            return self.of_run
        standings = {
            peer_id: Standing(3, is_member=True, can_lead=not self.others.get(peer_id, False))
            for peer_id in sorted(self.members)
        }
        return Roster(standings) if standings else None

    def report_missing(self, peer_id: PeerId) -> None:
        self.missing.append(peer_id)

    def call_to_round(self) -> None:
        self.num_calls += 1


@asynccontextmanager
async def averagers(
    num_peers: int,
    *,
    kind: str = "memory",
    clients: Sequence[int] = (),
    config: AveragingConfig | None = None,
    rpc_config: RpcConfig | None = None,
    limits: MemberLimits | None = None,
    config_of: Mapping[PeerId, AveragingConfig] | None = None,
    **sizes: float,
) -> AsyncIterator[list[tuple[RoundRunner, FixedMeeting, Endpoint]]]:
    """``num_peers`` averagers of one run that expect each other.

    Their endpoints are :class:`tests.wire.WatchedEndpoint`.

    Args:
        config_of: of those that have another configuration than ``config``.
        sizes: as for :func:`tests.smaller.smaller`; chunks are small by default.
    """
    with smaller(**{"chunk_numel": 1024} | sizes):
        async with endpoints(num_peers, kind=kind, clients=clients, config=rpc_config) as swarm:
            members: list[tuple[RoundRunner, FixedMeeting, Endpoint]] = []
            for number, endpoint in enumerate(swarm):
                others = {other.peer_id: other.client_mode for other in swarm if other is not endpoint}
                meeting = FixedMeeting(endpoint, others)
                config = config or AveragingConfig(matchmaking_time_s=3.0, averaging_timeout_s=20.0)
                rng = random.Random(number)
                own = (config_of or {}).get(endpoint.peer_id, config)
                runner = RoundRunner(endpoint, RUN_ID, b"same", meeting, own, rng, limits=limits)
                members.append((runner, meeting, endpoint))
            try:
                yield members
            finally:
                for averager, _, _ in members:
                    await averager.close()
