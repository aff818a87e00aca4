"""``manyhands doctor``: find out why a peer does not join."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from manyhands.base.address import parse_addresses, parse_listen_addresses
from manyhands.base.identity import Identity
from manyhands.base.run_id import checked_run_id
from manyhands.base.ticket import split_tickets
from manyhands.cli.charter_options import run_of
from manyhands.cli.output.live_view import waiting
from manyhands.doctor import Check, Examination
from manyhands.doctor.checks import NAMES
from manyhands.doctor.page import lines_of
from manyhands.peer import ALL_INTERFACES
from manyhands.runtime import LoopThread
from manyhands.state_dir import StateDir

EXIT_ALL_WELL = 0
EXIT_BROKEN = 1

TIMEOUT_S = 20.0
"""Longest wait in seconds for the report. The checks have their own timeouts, and take 15 s at most in all."""


def doctor(
    addresses: Annotated[
        tuple[str, ...],
        Parameter(help="Multiaddrs (or HOST:PORT) of the peers that yours was told to join through, or a ticket."),
    ] = (),
    /,
    *,
    initial_peers: Annotated[tuple[str, ...], Parameter(help="More such addresses.")] = (),
    listen: Annotated[
        tuple[str, ...], Parameter(help="Where your peer accepts connections: the initial peers try to dial it there.")
    ] = ALL_INTERFACES,
    announce: Annotated[
        tuple[str, ...],
        Parameter(help="The --announce of your peer, if it has one: the initial peers try that instead."),
    ] = (),
    client_mode: Annotated[bool, Parameter(help="Your peer only dials out: skip the dial-back check.")] = False,
    run_id: Annotated[
        str | None,
        Parameter(
            help="The run that your peer joins: checks whether it is there, with the settings and the charter that a "
            "ticket or the initial peers name. The run of a ticket is the default."
        ),
    ] = None,
    identity: Annotated[Path | None, Parameter(help="File with the private key to use; else a new identity.")] = None,
    state_dir: Annotated[
        Path | None, Parameter(help="Folder of your peer, to use its identity. Stop your peer first.")
    ] = None,
    json: Annotated[bool, Parameter(help="Print one JSON object, for programs.")] = False,
) -> int:
    """Find out why a peer does not join: check the network step by step, and print what to repair.

    Give the options that your peer was started with. Takes at most 15 s; the exit code is 0 if all is well, else 1.
    """
    places, tickets = split_tickets([*addresses, *initial_peers])
    run_id = run_of(tickets, run_id)
    of_run = next((ticket for ticket in tickets if ticket.run_id == run_id), None)
    examination = Examination(
        initial_peers=places,
        listen=parse_listen_addresses(listen),
        announce=parse_addresses(announce),
        client_mode=client_mode,
        run_id=checked_run_id(run_id) if run_id is not None else None,
        digest=of_run.digest if of_run is not None else b"",
        charter=of_run.charter if of_run is not None else b"",
    )
    own_dir = StateDir(state_dir) if state_dir is not None else None
    if identity is None and own_dir is not None:
        identity = own_dir.identity_path
    examiner = Identity.load_or_create(identity) if identity is not None else Identity.generate()
    runtime = LoopThread("manyhands doctor")
    try:
        with waiting("checking") as status:

            def show(check: Check) -> None:
                status.update(f"checked {NAMES[check.check]}" + (f" of {check.address}" if check.address else ""))

            report = runtime.run(examination.run(examiner, on_check=show), TIMEOUT_S, "examining")
    finally:
        runtime.close()
        if own_dir is not None:
            own_dir.close()
    if json:
        print(msgspec.json.encode(report).decode())  # noqa: T201
    else:
        print("\n".join(lines_of(report)))  # noqa: T201
    sys.stdout.flush()
    return EXIT_ALL_WELL if report.ok else EXIT_BROKEN
