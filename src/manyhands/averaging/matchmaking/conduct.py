"""What a peer remembers of the others' behaviour, and the consequences. Pure; times are loop times.

=============================================================  ======================================================
what another peer did                                          what follows here
=============================================================  ======================================================
it was to blame in two committed rounds in a row               it is not expected for 2 s, then 4 s, ... 60 s
it, or the group it led, did not come within the longest       it is not waited for, and its calls are ignored, for
wait: the second time in a row                                 30 s, then 60 s, ... 10 min
its values were too large in three rounds                      it gets no place for 10 min, then 20 min, ...
=============================================================  ======================================================

A peer that is not waited for still gets a place if it comes by itself. A round without blame ends the first two
penalties. Ten such rounds cancel one round with values that were too large.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeVar

from manyhands.base.identity import PeerId

OFFENCE_S = 2.0
MAX_OFFENCE_S = 60.0
IN_VAIN_S = 30.0
MAX_IN_VAIN_S = 600.0
REFUSED_S = 600.0
MAX_REFUSED_S = 86400.0
STRIKES = 3
GOOD_ROUNDS = 10
"""Rounds that cancel one strike."""
MAX_KNOWN = 4096

T = TypeVar("T")


class Conduct:
    """How the other peers behaved towards this one."""

    def __init__(self) -> None:
        self._offences: dict[PeerId, tuple[int, float]] = {}  # count in a row; not expected until
        self._in_vain: dict[PeerId, tuple[int, float]] = {}  # likewise
        self._strikes: dict[PeerId, float] = {}
        self._refused: dict[PeerId, tuple[int, float]] = {}  # count; refused until

    def note_round(self, members: Iterable[PeerId], blamed: Collection[PeerId], now: float) -> None:
        """Record a committed round."""
        for peer_id in members:
            is_to_blame = peer_id in blamed
            self._in_vain.pop(peer_id, None)
            num_before, _ = self._offences.pop(peer_id, (0, 0.0))
            if is_to_blame:
                longer_s = min(OFFENCE_S * 2 ** (num_before - 1), MAX_OFFENCE_S) if num_before else 0.0
                _set(self._offences, peer_id, (num_before + 1, now + longer_s))
            elif peer_id in self._strikes:
                self._strikes[peer_id] -= 1 / GOOD_ROUNDS
                if self._strikes[peer_id] <= 0:
                    del self._strikes[peer_id]

    def note_in_vain(self, peer_id: PeerId, now: float) -> None:
        """A peer, or its group, did not come within the longest wait."""
        num_before, _ = self._in_vain.pop(peer_id, (-1, 0.0))
        longer_s = min(IN_VAIN_S * 2**num_before, MAX_IN_VAIN_S) if num_before >= 0 else 0.0
        _set(self._in_vain, peer_id, (num_before + 1, now + longer_s))

    def strike(self, peer_id: PeerId, now: float) -> float:
        """Count a round in which a peer's values were too large; returns how many seconds it is now refused."""
        strikes = self._strikes.pop(peer_id, 0.0) + 1.0
        if strikes <= STRIKES - 1:
            _set(self._strikes, peer_id, strikes)
            return 0.0
        return self._refuse(peer_id, REFUSED_S, now)

    def _refuse(self, peer_id: PeerId, first_s: float, now: float) -> float:
        num_before, _ = self._refused.pop(peer_id, (0, 0.0))
        longer_s = min(first_s * 2.0**num_before, MAX_REFUSED_S)
        _set(self._refused, peer_id, (num_before + 1, now + longer_s))
        return longer_s

    def is_refused(self, peer_id: PeerId, now: float) -> bool:
        """Whether a peer gets no place."""
        return self._refused.get(peer_id, (0, now))[1] > now

    def is_heeded(self, peer_id: PeerId, now: float) -> bool:
        """Whether this peer follows a call of another one."""
        is_in_vain = self._in_vain.get(peer_id, (0, now))[1] > now
        return not (is_in_vain or self.is_refused(peer_id, now))

    def awaited(self, peers: Collection[PeerId], now: float) -> Collection[PeerId]:
        """The given peers, without those that are not waited for."""
        if not (self._offences or self._in_vain or self._refused):
            return peers
        return [
            peer_id
            for peer_id in peers
            if self.is_heeded(peer_id, now) and self._offences.get(peer_id, (0, now))[1] <= now
        ]


def _set(known: dict[PeerId, T], peer_id: PeerId, value: T) -> None:
    """Set as the latest entry; drop the oldest ones beyond ``MAX_KNOWN``."""
    known.pop(peer_id, None)
    known[peer_id] = value
    while len(known) > MAX_KNOWN:
        del known[next(iter(known))]
