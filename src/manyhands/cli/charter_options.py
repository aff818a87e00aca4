"""Charter options of the commands that start coordinators or join runs."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from manyhands.access import SignedCharter
from manyhands.access.ledger import Ledger
from manyhands.base.errors import ConfigError
from manyhands.base.ticket import Ticket, split_tickets
from manyhands.cli.options import PeerOptions
from manyhands.cli.ticket_command import print_tickets
from manyhands.peer import JOIN_RUN_TIMEOUT_S, Peer

logger = logging.getLogger(__name__)

LOOK_PERIOD_S = 1.0
Options = TypeVar("Options", bound=PeerOptions)


def checked_charter(path: Path | None, network: PeerOptions) -> SignedCharter | None:
    """Load the charter that was given to a command, before anything is started.

    By default it is the one that the coordinator with this state dir served last, so that it still signs leases after
    a restart without ``--charter``.

    Raises:
        ConfigError: the file is not a charter, or the command has no state dir.
    """
    if path is None:
        return Ledger(network.state_dir).load_charter()
    charter = SignedCharter.load(path)
    if network.state_dir is None:
        raise ConfigError("a coordinator keeps used invitations and bans in its state dir; name one: --state-dir DIR")
    return charter


def coordinate(peer: Peer, charter: SignedCharter, network: PeerOptions) -> None:
    """Serve a charter, and log how others can join the run."""
    serving = peer.presence.serve_charter(charter)
    is_coordinator = peer.run(serving, JOIN_RUN_TIMEOUT_S, "publishing the charter")
    run = f"run {charter.run_id} (access {charter.charter.access})"
    if not is_coordinator:
        logger.warning(
            "This peer publishes the charter of %s, and is not a coordinator of it: the charter does not name peer %s. "
            "To make it one, sign a charter that does: manyhands run create --coordinator %s",
            run, peer.peer_id, peer.peer_id,
        )  # fmt: skip
        return
    logger.info("Coordinating %s", run)
    if charter.is_open:
        logger.info("Others can join it with one word:")
        print_tickets(peer, charter.run_id, charter=charter.digest)
    else:
        logger.info("Make tickets for it on this machine, in another terminal:")
        power = f"--state-dir {network.state_dir}" + (f" --key {network.identity}" if network.identity else "")
        print(f"\n    manyhands invite {power} --uses 5 --expires 7d\n", flush=True)  # noqa: T201


def wait(peer: Peer, charter: SignedCharter | None, seconds: float) -> None:
    """Wait, in short parts: longer ones cannot be interrupted on every platform.

    Raises:
        ConfigError: this peer is a copy of an earlier coordinator of the charter's run.
    """
    until = peer.time() + seconds
    while (left_s := until - peer.time()) > 0:
        if charter is not None:
            peer.presence.check_own(charter.run_id)
        threading.Event().wait(min(left_s, LOOK_PERIOD_S))


def run_id_of(network: PeerOptions, given: str | None) -> str | None:
    """The id of the run: the given one, else that of a ticket among the initial peers.

    Raises:
        ConfigError: the two differ.
    """
    return run_of(split_tickets(network.initial_peers or ())[1], given)


def run_of(tickets: Iterable[Ticket], given: str | None) -> str | None:
    """As :func:`run_id_of`, for tickets that are parsed already."""
    named = list(dict.fromkeys(ticket.run_id for ticket in tickets if ticket.run_id))
    if given is not None and named and given not in named:
        raise ConfigError(f"the ticket is for run {named[0]!r}, and --run-id is {given!r}; leave --run-id out")
    if given is not None:
        return given
    return named[0] if named else None


def with_charter(network: Options, run_id: str, charter: bytes) -> Options:
    """The options, with a ticket that names the run's charter added to the initial peers if there is a charter."""
    addresses, _ = split_tickets(network.initial_peers or ())
    if not charter:
        return network
    ticket = str(Ticket(run_id, addresses, b"", charter))
    return dataclasses.replace(network, initial_peers=(ticket, *(network.initial_peers or ())))
