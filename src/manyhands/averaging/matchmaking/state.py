"""The state of one peer's matchmaking: the leader it follows, its invitation, and whether it is in a round."""

from __future__ import annotations

import asyncio
import math

from manyhands.averaging.matchmaking.candidates import Candidates
from manyhands.averaging.messages import Position
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.identity import PeerId


class MatchmakingState:
    """What the search for a group and the handlers share.

    Attributes:
        following: the leader that this peer has asked for a place and waits for.
        busy_at: the position of its current round, or of a committed one until this peer moves.
        sought_at: when it last looked for a group (loop time); infinite during a search.
    """

    def __init__(self, endpoint: RunEndpoint, view: Candidates) -> None:
        self._endpoint = endpoint
        self._view = view
        self.following: PeerId | None = None
        self.busy_at: Position | None = None
        self.sought_at = -math.inf
        self._inviter: tuple[PeerId, Position] | None = None
        self._better: asyncio.Future[PeerId] | None = None

    def follow(self, leader: PeerId) -> asyncio.Future[PeerId]:
        """Wait for a leader from now on; the future resolves to a better one when that calls."""
        self.following = leader
        self._better = asyncio.get_running_loop().create_future()
        return self._better

    def unfollow(self) -> None:
        """Stop waiting: the leader has answered, or is not asked any more."""
        self.following = self._better = None

    def seeks_with(self, leader: PeerId) -> bool:
        """Whether this peer waits for a leader's group."""
        return self.sought_at == math.inf and self.following == leader

    def note_call(self, leader: PeerId, position: Position) -> None:
        """Remember a leader's invitation, for this peer's next search there."""
        self._inviter = (leader, position)

    def turn_to(self, leader: PeerId, position: Position) -> None:
        """Leave the current leader for a better one that has called."""
        if self._better is not None and not self._better.done():
            self.note_call(leader, position)
            self._better.set_result(leader)

    def invitation(self) -> PeerId | None:
        """The leader whose invitation this peer should follow, if any; each invitation counts once."""
        inviter, self._inviter = self._inviter, None
        if inviter is None or inviter[1] != self._view.roster.position() or not self.is_led_by(inviter[0]):
            return None
        return inviter[0]

    def is_led_by(self, inviter: PeerId) -> bool:
        """Whether this peer should follow its inviter rather than lead."""
        own_id = self._endpoint.peer_id
        return self._endpoint.client_mode or inviter < own_id or inviter not in self._view.expected()
