"""What a peer remembers of the others' behaviour, and the consequences. Pure; times are loop times.

=============================================================  ======================================================
what another peer did                                          what follows here
=============================================================  ======================================================
it was to blame in a committed round; or it, or the group      the second time in a row: it is not waited for, and its
that it led, did not come within the longest wait              calls are ignored, for the longest wait, then four
                                                               times that, ... 10 min
its values were too large in three rounds                      it gets no place for 10 min, then 20 min, ... a day
=============================================================  ======================================================

A peer that is not waited for still gets a place if it comes by itself. A round without blame ends the first penalty.
Ten such rounds cancel one round with values that were too large.

The first penalty begins with the time that the peer has cost here, because it may be innocent: a broken link between
two honest peers looks the same at both ends. So after a short fault both go on together after a short time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from manyhands.base.identity import PeerId

MAX_AVOIDED_S = 600.0
REFUSED_S = 600.0
MAX_REFUSED_S = 86400.0
STRIKES = 3
GOOD_ROUNDS = 10
"""Rounds that cancel one strike."""
MAX_KNOWN = 4096


class Conduct:
    """How the other peers behaved towards this one.

    Args:
        longest_wait_s: how long this peer waits for a peer that does not come.
    """

    def __init__(self, longest_wait_s: float) -> None:
        self._avoided = _Penalties(longest_wait_s, MAX_AVOIDED_S, factor=4.0)
        self._refused = _Penalties(REFUSED_S, MAX_REFUSED_S, factor=2.0)
        self._strikes: dict[PeerId, float] = {}

    def note_round(self, members: Iterable[PeerId], blamed: Collection[PeerId], now: float) -> None:
        """Record a committed round."""
        for peer_id in members:
            if peer_id in blamed:
                self.note_in_vain(peer_id, now)
                continue
            self._avoided.end(peer_id)
            if peer_id in self._strikes:
                self._strikes[peer_id] -= 1 / GOOD_ROUNDS
                if self._strikes[peer_id] <= 0:
                    del self._strikes[peer_id]

    def note_in_vain(self, peer_id: PeerId, now: float) -> None:
        """A peer was to blame, or it or its group did not come within the longest wait."""
        self._avoided.add(peer_id, now, num_free=1)

    def strike(self, peer_id: PeerId, now: float) -> float:
        """Count a round in which a peer's values were too large; returns how many seconds it is now refused."""
        strikes = self._strikes.pop(peer_id, 0.0) + 1.0
        if strikes <= STRIKES - 1:
            _set(self._strikes, peer_id, strikes)
            return 0.0
        return self._refused.add(peer_id, now)

    def is_refused(self, peer_id: PeerId, now: float) -> bool:
        """Whether a peer gets no place."""
        return self._refused.is_on(peer_id, now)

    def is_heeded(self, peer_id: PeerId, now: float) -> bool:
        """Whether this peer follows a call of another one."""
        return not (self._avoided.is_on(peer_id, now) or self.is_refused(peer_id, now))

    def awaited(self, peers: Collection[PeerId], now: float) -> Collection[PeerId]:
        """The given peers, without those that are not waited for."""
        if not (self._avoided or self._refused):
            return peers
        return [peer_id for peer_id in peers if self.is_heeded(peer_id, now)]


class _Penalties:
    """Times during which peers are avoided: each in a row is ``factor`` times as long as the one before."""

    def __init__(self, first_s: float, max_s: float, factor: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._factor = factor
        self._known: dict[PeerId, tuple[int, float]] = {}  # count in a row; until when

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, peer_id: PeerId, now: float, num_free: int = 0) -> float:
        """Begin the next one, without effect for the first ``num_free``; returns its length in seconds."""
        num_before, _ = self._known.get(peer_id, (0, 0.0))
        length_s = (
            min(self._first_s * self._factor ** (num_before - num_free), self._max_s) if num_before >= num_free else 0.0
        )
        _set(self._known, peer_id, (num_before + 1, now + length_s))
        return length_s

    def end(self, peer_id: PeerId) -> None:
        self._known.pop(peer_id, None)

    def is_on(self, peer_id: PeerId, now: float) -> bool:
        return self._known.get(peer_id, (0, now))[1] > now


def _set(known: dict[PeerId, Any], peer_id: PeerId, value: object) -> None:
    """Set as the latest entry; drop the oldest ones beyond ``MAX_KNOWN``."""
    known.pop(peer_id, None)
    known[peer_id] = value
    while len(known) > MAX_KNOWN:
        del known[next(iter(known))]
