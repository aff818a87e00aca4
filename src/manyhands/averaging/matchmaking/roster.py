"""The interface through which matchmaking sees a run, implemented by the optimizer and the averager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from manyhands.averaging.messages import Position
from manyhands.base.identity import PeerId


class Roster(Protocol):
    """What matchmaking needs to know of the run."""

    def position(self) -> Position:
        """This peer's position in the run."""

    def expected(self) -> Mapping[PeerId, bool]:
        """The other peers at this position that should come to the next round, and whether each is in client mode."""

    def is_known(self, peer_id: PeerId) -> bool:
        """Whether there is a record of a peer that is, or was, at this peer's position."""

    async def refresh(self) -> None:
        """Read the peers' current records."""

    def report_missing(self, peer_id: PeerId) -> None:
        """A peer did not come; it is expected again only after a fresh record."""

    def call_to_round(self) -> None:
        """Another peer has begun a round at this position; the training loop should come as soon as it can."""

    def recent_rounds(self) -> list[bytes]:
        """Fingerprints of this peer's last steps, in a run whose parts are told apart by them."""

    def is_stranger(self, peer_id: PeerId, recent_rounds: Sequence[bytes]) -> bool:
        """Whether a peer with these last steps is of another part of the run."""

    def is_overruled(self) -> bool:
        """Whether another part of the run is known to go on, so that this peer should load its state."""
