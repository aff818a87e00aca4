"""A fixed roster for the rounds of a benchmark: all other peers, always."""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.averaging.attendees import Attendees
from manyhands.averaging.messages import Position
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint


class Everybody:
    """A roster of peers that are always present.

    Args:
        others: whether each of them is a client.
        may_leave: whether a missing peer is no error, since all leave one by one in the end.

    Attributes:
        at: the position of the next round.
    """

    def __init__(self, endpoint: Endpoint, others: Mapping[PeerId, bool], *, may_leave: bool = False) -> None:
        self.at = Position(0, b"benchmark")
        self._endpoint = endpoint
        self._others = others
        self._may_leave = may_leave

    def position(self) -> Position:
        return self.at

    def attendees(self) -> Attendees:
        return Attendees.of(self._endpoint, self.at, self._others)

    def report_missing(self, peer_id: PeerId) -> None:
        if not self._may_leave:
            raise RuntimeError(f"{peer_id} is missing")

    def call_to_round(self) -> None:
        """Does nothing: all peers come anyway."""
