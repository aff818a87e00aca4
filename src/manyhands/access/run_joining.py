"""Joins a run with a charter: by a ticket, or as a peer that serves the charter."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from manyhands.access.authorizer import Authorizer
from manyhands.access.charter import SignedCharter
from manyhands.access.charters import has_charter_records, read_charters
from manyhands.access.config import AccessConfig
from manyhands.access.coordinator import Coordinator
from manyhands.access.kept import KeptLease
from manyhands.access.ledger import Ledger
from manyhands.access.members import Members
from manyhands.base.errors import ConfigError, Unavailable
from manyhands.base.ticket import Ticket
from manyhands.dht import DhtNode
from manyhands.reach.clocks import check_clock
from manyhands.rpc import Endpoint

LOOK_ATTEMPTS = 3
LOOK_PERIOD_S = 1.0


class JoiningPeer(NamedTuple):
    """The parts of a joining peer that its access to the run uses.

    Attributes:
        folder: for its lease and the accounts of a coordinator; None to keep nothing.
        began_at: when this process began, in seconds since 1970; distinguishes it from a copy.
    """

    endpoint: Endpoint
    dht: DhtNode
    rng: random.Random
    wall_clock: Callable[[], float]
    folder: Path | None = None
    config: AccessConfig = AccessConfig()
    began_at: float = 0.0


async def join_by(ticket: Ticket, peer: JoiningPeer, credential: bytes = b"", *, only_looks: bool = False) -> Members:
    """Accept only the charter of a ticket from now on, and get a lease.

    Args:
        credential: replaces the invitation in the ticket.
        only_looks: get no lease, only the list of members.
    Raises:
        ConfigError: the run has another charter, a coordinator refuses a lease, or this machine's clock is wrong.
        Unavailable: no peer has the charter, or no coordinator answers.
    """
    kept = KeptLease(peer.folder, ticket.run_id) if peer.folder is not None else None
    charter = kept.charter(ticket.charter) if kept is not None else None
    members = _members(peer, charter or await _charter_of(ticket, peer), kept=kept)
    await members.watch()
    if not only_looks:
        try:
            await members.enter(credential or ticket.token)
        except BaseException:
            await members.close()
            raise
    return members


async def follow_open(charter: SignedCharter, peer: JoiningPeer) -> Members:
    """Apply the limits and bans of an open run, without a ticket.

    Raises:
        ConfigError: the run is by invitation.
    """
    if not charter.is_open:
        raise ConfigError(
            f"run {charter.run_id!r} is by invitation; ask its owner for a ticket, and give that instead of the address"
        )
    members = _members(peer, charter)
    try:
        await members.watch()
    except BaseException:
        await members.close()
        raise
    return members


async def serve_charter(
    charter: SignedCharter, peer: JoiningPeer, authorizer: Authorizer | None = None
) -> tuple[Coordinator, Members]:
    """Publish a charter, and sign leases if it names this peer as a coordinator.

    Raises:
        ConfigError: the folder belongs to a coordinator of another charter.
    """
    coordinator = Coordinator(
        peer.endpoint,
        peer.dht,
        charter,
        Ledger(peer.folder),
        authorizer=authorizer,
        wall_clock=peer.wall_clock,
        config=peer.config,
        began_at=peer.began_at,
    )
    await coordinator.start()
    members = _members(peer, charter, own_lease=coordinator.own_lease if coordinator.is_delegated else None)
    await members.watch()
    if coordinator.is_delegated:
        await members.enter()
    return coordinator, members


def _members(peer: JoiningPeer, charter: SignedCharter, **own: Any) -> Members:
    return Members(
        peer.endpoint, peer.dht, charter, wall_clock=peer.wall_clock, rng=peer.rng, config=peer.config, **own
    )


async def _charter_of(ticket: Ticket, peer: JoiningPeer) -> SignedCharter:
    for attempt in range(LOOK_ATTEMPTS):
        if attempt:
            await asyncio.sleep(LOOK_PERIOD_S)
        found = await read_charters(peer.dht, ticket.run_id, digest=ticket.charter)
        if found:
            return found[0].charter
    contacts = [contact.peer_id for contact in peer.dht.contacts()]
    await check_clock(peer.endpoint, peer.wall_clock, contacts, peer.config.max_clock_skew_s)
    if await has_charter_records(peer.dht, ticket.run_id):
        raise ConfigError(
            f"run {ticket.run_id!r} has another charter than the one of this ticket; ask for a new ticket"
        )
    raise Unavailable(
        f"none of the peers here has the charter of run {ticket.run_id!r}; start one of its coordinators, or try again "
        "later"
    )
