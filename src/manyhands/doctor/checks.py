"""What was checked, what came out, and what to do about it: values only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import msgspec

Kind = Literal[
    "dns", "tcp", "tls", "identity", "protocol", "dht", "clock", "dial_back", "listen", "peers", "coordinators", "run"
]

NAMES: Final[dict[Kind, str]] = {
    "dns": "DNS",
    "tcp": "TCP",
    "tls": "TLS",
    "identity": "identity",
    "protocol": "protocol",
    "dht": "DHT",
    "clock": "clock",
    "dial_back": "dial back",
    "listen": "listening",
    "peers": "peers",
    "coordinators": "initial peers",
    "run": "run",
}
"""What people call the checks, in the order in which they are shown."""

STEPS: Final[tuple[Kind, ...]] = ("dns", "tcp", "tls", "identity", "protocol", "dht")
"""What an address must pass before a peer can join there, in this order."""

_ORDER = {kind: number for number, kind in enumerate(NAMES)}


class Finding(NamedTuple):
    """What came out of one check, in words.

    Attributes:
        ok: None if it was not done, or says nothing.
        detail: what was found.
        advice: what to do about it.
    """

    ok: bool | None
    detail: str
    advice: str = ""


class Check(msgspec.Struct, frozen=True):
    """One check, as it is printed and as it is in the JSON.

    Attributes:
        address: the initial peer that it is about; None if it is about this machine or the swarm.
        peer: the id of the peer that answered there, once it is known.
        seconds: how long it took.
    """

    check: Kind
    ok: bool | None
    detail: str
    advice: str
    address: str | None = None
    peer: str | None = None
    seconds: float = 0.0


class Report(msgspec.Struct, frozen=True):
    """All that was found.

    Attributes:
        ok: whether nothing is broken, and a peer can join.
        can_join: whether at least one of the initial peers passes all steps; one is enough.
        peer_id: as whom this machine went about it.
        seconds: how long all of it took.
    """

    ok: bool
    can_join: bool
    peer_id: str
    seconds: float
    checks: list[Check]


def report_of(checks: Sequence[Check], peer_id: str, seconds: float) -> Report:
    """Sum up; the checks are put in the order in which they are read: address by address, then the rest."""
    addresses = list(dict.fromkeys(check.address for check in checks if check.address is not None))
    in_order = sorted(checks, key=lambda check: _ORDER[check.check])
    ordered = [check for address in [*addresses, None] for check in in_order if check.address == address]
    can_join = any(_passes([check for check in checks if check.address == address]) for address in addresses)
    ok = can_join and all(check.ok is not False for check in checks)
    return Report(ok, can_join, peer_id, round(seconds, 3), ordered)


def _passes(checks: Sequence[Check]) -> bool:
    of_kind = {check.check: check.ok for check in checks}
    return of_kind.get("dht") is True and all(of_kind.get(step) is not False for step in STEPS)
