"""Charters, leases and whole peers with clocks of their own, for the tests of :mod:`manyhands.access`."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from manyhands.access import AccessConfig, Charter, Invitation, Lease, SignedCharter
from manyhands.access.invitation import SignedInvitation
from manyhands.access.lease import SignedLease
from manyhands.base.ticket import Ticket
from manyhands.peer import Presence
from manyhands.state_dir import StateDir
from tests.memory_transport import MemoryNetwork, MemoryTransport
from tests.network import LOOPBACK, identity_of

RUN = "ours"
OWNER, COORDINATOR, SECOND, STRANGER, PEER = map(identity_of, range(1, 6))
HOUR_S = 3600.0
START_S = 1_700_000_000.0
LOOKS_OFTEN = AccessConfig(look_period_s=0.05, retry_s=0.2)


def charter_of(access: Any = "invite", run_id: str = RUN, created_at: float = 1.0) -> SignedCharter:
    coordinators = [COORDINATOR.peer_id, SECOND.peer_id]
    return SignedCharter.sign(OWNER, Charter(run_id, OWNER.peer_id, access, coordinators, created_at=created_at))


CHARTER = charter_of()


def lease_of(
    peer_id: str = PEER.peer_id, *, signer: Any = COORDINATOR, charter: SignedCharter = CHARTER, role: Any = "trainer",
    issued_at: float = START_S, lasts_s: float = 12 * HOUR_S,
) -> SignedLease:  # fmt: skip
    return SignedLease.sign(signer, Lease(charter.digest, peer_id, role, issued_at, issued_at + lasts_s))


def token_of(
    uses: int = 1, *, signer: Any = COORDINATOR, charter: SignedCharter = CHARTER, expires_at: float = START_S + HOUR_S,
    peer_id: str = "", name: bytes = b"an id of 12.", coordinator: str = COORDINATOR.peer_id,
) -> bytes:  # fmt: skip
    invitation = Invitation(charter.digest, name, uses, expires_at, coordinator, "trainer", peer_id)
    return SignedInvitation.sign(signer, invitation).signed.encoded()


class Clock:
    """A wall clock that a test sets."""

    def __init__(self, now: float = START_S) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class World:
    """Peers over a simulated network, on one loop."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.peers: list[Presence] = []
        self.folders: list[StateDir] = []
        self.clock = Clock()

    async def peer(
        self, number: int, *, clock: Clock | None = None, folder: Path | None = None, config: AccessConfig | None = None
    ) -> Presence:
        if folder is not None:
            self.folders.append(StateDir(folder))
        presence = Presence(
            MemoryTransport(identity_of(number), self.network),
            rng=random.Random(number),
            wall_clock=clock or self.clock,
            access_config=config,
            state_dir=self.folders[-1] if folder is not None else None,
        )
        await presence.start(self.peers[0].endpoint.addresses if self.peers else [], [LOOPBACK])
        self.peers.append(presence)
        return presence

    def ticket(self, token: bytes = b"", charter: SignedCharter = CHARTER) -> Ticket:
        return Ticket(charter.run_id, self.peers[0].endpoint.addresses, b"", charter.digest, token)


async def members(world: World, *numbers: int, config: AccessConfig | None = None) -> list[Presence]:
    """Peers that join the run; the first call begins it, with peer 2 as its coordinator."""
    if not world.peers:
        await (await world.peer(2)).serve_charter(CHARTER)
    ticket, joined = world.ticket(token_of(100)), []
    for number in numbers:
        joined.append(await world.peer(number, config=config))
        await joined[-1].join_run(ticket)
    return joined


@asynccontextmanager
async def new_world() -> AsyncIterator[World]:
    world = World()
    try:
        yield world
    finally:
        for presence in world.peers:
            await presence.stop()
        for folder in world.folders:
            folder.close()
