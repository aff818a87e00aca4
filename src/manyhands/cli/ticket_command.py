"""``manyhands ticket``"""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from manyhands.base.address import parse_addresses
from manyhands.base.run_id import checked_run_id
from manyhands.cli.invitation import print_ticket
from manyhands.cli.run_look_up import Scout


def ticket(
    addresses: Annotated[
        tuple[str, ...], Parameter(help="Multiaddrs (or HOST:PORT) of peers that others can reach; one is enough.")
    ],
    /,
    *,
    run_id: Annotated[str | None, Parameter(help="Name of the run, if several are there.")] = None,
) -> None:
    """Make a ticket: a run in one word, which others join with "manyhands join TICKET".

    It holds the name of the run, the addresses and a digest of the run's settings. It is no secret.
    """
    if run_id is not None:
        checked_run_id(run_id)
    places = parse_addresses(addresses)
    with Scout(places) as scout:
        run = scout.choose(run_id)
    print_ticket(run.run_id, places, run.manifest.fingerprint() if run.manifest is not None else b"")
