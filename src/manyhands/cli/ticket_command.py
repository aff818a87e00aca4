"""``manyhands ticket``, and the ticket that other commands print when they start."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import segno
from cyclopts import Parameter

from manyhands.base.address import Address, parse_addresses
from manyhands.base.errors import ConfigError
from manyhands.base.run_id import checked_run_id
from manyhands.base.ticket import Ticket
from manyhands.cli.run_look_up import Scout
from manyhands.peer import Peer

logger = logging.getLogger(__name__)


def ticket(
    addresses: Annotated[
        tuple[str, ...], Parameter(help="Multiaddrs (or HOST:PORT) of peers that others can reach; one is enough.")
    ],
    /,
    *,
    run_id: Annotated[str | None, Parameter(help="Name of the run, if several are there.")] = None,
) -> None:
    """Make a ticket: one word with which others join a run ("manyhands join TICKET").

    It holds the name of the run, the addresses and a digest of the run's settings. It is not secret.
    """
    if run_id is not None:
        checked_run_id(run_id)
    if any(map(Ticket.is_one, addresses)):
        raise ConfigError(
            "this is a ticket already: others join with manyhands join TICKET. To make another one, name the address "
            "of a peer: manyhands ticket HOST:PORT"
        )
    places = parse_addresses(addresses)
    with Scout(places) as scout:
        run = scout.choose(run_id)
        charter = scout.find_charter(run.run_id)
    fingerprint = run.manifest.fingerprint() if run.manifest is not None else b""
    print_ticket(run.run_id, places, fingerprint, charter=charter)


def print_tickets(peer: Peer, run_id: str, fingerprint: bytes = b"", *, charter: bytes = b"") -> None:
    """As :func:`print_ticket`, with the addresses of a peer. Logs a new ticket when they change."""
    print_ticket(run_id, peer.addresses, fingerprint, charter=charter)

    def tell() -> None:
        if addresses := [address for address in peer.endpoint.addresses if not address.is_loopback]:
            ticket = Ticket(run_id, addresses, fingerprint, charter)
            logger.info("The addresses of this peer have changed; others can now join with: manyhands join %s", ticket)

    peer.endpoint.on_announced.append(tell)


def print_ticket(
    run_id: str,
    addresses: Sequence[str | Address],
    fingerprint: bytes = b"",
    *,
    charter: bytes = b"",
    token: bytes = b"",
) -> None:
    """Print the command that joins a run. With an empty ``run_id``, it joins the only run that has trainers.

    Args:
        fingerprint: of the run manifest, if it is known.
        charter: digest of the charter of the run, if it has one.
        token: an invitation.
    """
    places = parse_addresses(addresses)
    ticket = str(Ticket(run_id, places, fingerprint, charter, token))
    print(f"\n    manyhands join {ticket}\n", flush=True)  # noqa: T201
    if places and all(place.is_loopback for place in places):
        print(f"    On this machine only: no other one can dial {places[0].host_port}.\n", flush=True)  # noqa: T201
        return
    if not sys.stdout.isatty():
        return
    with suppress(UnicodeError):  # the terminal has no block characters
        segno.make(ticket, error="l", micro=False).terminal(compact=True, border=1)
