"""Whether this peer still waits with a step for others that load its state. Pure; times are those of the loop."""

from __future__ import annotations

import math
from collections.abc import Collection

from manyhands.base.identity import PeerId

PAUSE_S = 60.0
MAX_PAUSE_S = 600.0


class Courtesy:
    """Limits how often this peer waits for others that then miss the round.

    Each wait in vain is followed by a pause in which it waits for nobody: one minute at first, twice as long each
    further time, up to ten minutes. So a peer that downloads the state again and again holds nobody up for long,
    whatever identities it takes.
    """

    def __init__(self) -> None:
        self._followers: set[PeerId] = set()  # those whom this step has waited for
        self._in_vain = 0
        self._pause_until = -math.inf

    def is_due(self, followers: Collection[PeerId], now: float) -> bool:
        """Whether to wait for these peers, which load the state."""
        if not followers or now < self._pause_until:
            return False
        self._followers |= set(followers)
        return True

    def note_step(self, members: Collection[PeerId], now: float) -> None:
        """These peers have made the step."""
        if self._followers and self._followers.isdisjoint(members):
            self._in_vain += 1
            self._pause_until = now + min(PAUSE_S * 2.0 ** (self._in_vain - 1), MAX_PAUSE_S)
        elif self._followers:
            self._in_vain = 0
        self._followers = set()
