"""How a connection leads to another peer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyhands.base.identity import PeerId


@dataclass(frozen=True)
class Way:
    """How a connection leads to another peer.

    Attributes:
        kind: *direct* if one end has dialled the other, *punched* if both dialled each other at the same time through
            their firewalls or routers (:mod:`manyhands.rpc.punched_streams`), *relayed* if another peer forwards it
            (:mod:`manyhands.rpc.relayed_streams`).
        relay: the peer that forwards it.
    """

    kind: Literal["direct", "punched", "relayed"]
    relay: PeerId | None = None

    def __str__(self) -> str:
        return self.kind if self.relay is None else f"relayed by {self.relay}"


DIRECT = Way("direct")
PUNCHED = Way("punched")


def relayed_by(relay: PeerId) -> Way:
    """Return the way through a relay."""
    return Way("relayed", relay)
