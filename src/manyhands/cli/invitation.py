"""What a command that can be joined prints for others: one word, and the same as a QR code in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

import segno

from manyhands.base.address import Address, parse_addresses
from manyhands.base.ticket import Ticket


def print_ticket(run_id: str, addresses: Sequence[str | Address], fingerprint: bytes = b"") -> None:
    """Print how others join a run, or the run that is there if it has no name; once somebody trains in it.

    Args:
        fingerprint: of the run manifest, if it is known.
    """
    ticket = str(Ticket(run_id, parse_addresses(addresses), fingerprint))
    print(f"\n    manyhands join {ticket}\n", flush=True)  # noqa: T201
    if not sys.stdout.isatty():
        return
    with suppress(UnicodeError):  # a terminal without block characters
        segno.make(ticket, error="l", micro=False).terminal(compact=True, border=1)
