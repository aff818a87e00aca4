"""What matchmaking needs to know of a run, whether an optimizer or an averager keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from manyhands.averaging.messages import Position
from manyhands.base.identity import PeerId


class Roster(Protocol):
    """What matchmaking needs to know of the run."""

    def position(self) -> Position:
        """Where this peer stands."""

    def expected(self) -> Mapping[PeerId, bool]:
        """The other peers at this position that should come to the next round, and whether each is in client mode."""

    def is_known(self, peer_id: PeerId) -> bool:
        """Whether there is a record of a peer that is, or was, where this peer stands."""

    async def refresh(self) -> None:
        """Learn who is there now."""

    def report_missing(self, peer_id: PeerId) -> None:
        """A peer did not come; it is not expected again before a fresh record of it."""

    def call_to_round(self) -> None:
        """Another peer has begun a round at this position; the training loop should come as soon as it can."""

    def recent_rounds(self) -> list[bytes]:
        """What this peer tells others of its last steps, in a run whose parts have to be told apart by them."""

    def is_stranger(self, peer_id: PeerId, recent_rounds: Sequence[bytes]) -> bool:
        """Whether a peer that says this of its last steps is of another part of the run."""

    def is_overruled(self) -> bool:
        """Whether another part of the run goes on, as far as is known, whose state this peer should load."""
