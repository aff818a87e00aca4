"""The results of the doctor's checks, as values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import msgspec

Kind = Literal[
    "dns", "tcp", "tls", "identity", "protocol", "dht", "clock", "dial_back", "listen", "router", "peers",
    "coordinators", "run", "ways",
]  # fmt: skip

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
    "router": "router",
    "peers": "peers",
    "coordinators": "initial peers",
    "run": "run",
    "ways": "ways",
}
"""The displayed names of the checks, in the order in which they are shown."""

STEPS: Final[tuple[Kind, ...]] = ("dns", "tcp", "tls", "identity", "protocol", "dht")
"""Steps that an address must pass before a peer can join there, in this order."""

NEEDED: Final[tuple[Kind, ...]] = ("listen", "run")
"""Checks of this machine and of the swarm that must not fail if a peer is to join."""

_ORDER = {kind: number for number, kind in enumerate(NAMES)}


class Finding(NamedTuple):
    """The result of one check, in words.

    Attributes:
        ok: None if it was not made, or has no result.
        detail: what was found.
        advice: how to fix it.
    """

    ok: bool | None
    detail: str
    advice: str = ""


class Check(msgspec.Struct, frozen=True):
    """One check, as printed and as in the JSON output.

    Attributes:
        address: the initial peer that it is about; None if it is about this machine or the swarm.
        peer: the id of the peer that answered there, once known.
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
    """The results of all checks.

    Attributes:
        ok: whether no check failed and a peer can join.
        can_join: whether at least one of the initial peers passes all steps and agrees on the time (one is enough), the
            run is there, and the port is free.
        peer_id: the identity that this machine used.
        seconds: how long all checks took.
    """

    ok: bool
    can_join: bool
    peer_id: str
    seconds: float
    checks: list[Check]


def report_of(checks: Sequence[Check], peer_id: str, seconds: float) -> Report:
    """Summarize checks, ordered for reading: address by address, then the rest."""
    addresses = list(dict.fromkeys(check.address for check in checks if check.address is not None))
    in_order = sorted(checks, key=lambda check: _ORDER[check.check])
    ordered = [check for address in [*addresses, None] for check in in_order if check.address == address]
    some_peer_passes = any(_passes([check for check in checks if check.address == address]) for address in addresses)
    is_hindered = any(check.ok is False and check.check in NEEDED for check in checks)
    can_join = some_peer_passes and not is_hindered
    ok = can_join and all(check.ok is not False for check in checks)
    return Report(ok, can_join, peer_id, round(seconds, 3), ordered)


def _passes(checks: Sequence[Check]) -> bool:
    of_kind = {check.check: check.ok for check in checks}
    return of_kind.get("dht") is True and all(of_kind.get(step) is not False for step in (*STEPS, "clock"))
