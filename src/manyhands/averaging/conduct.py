"""What a peer remembers of how the others behaved, and what follows. Pure; times are those of the loop.

=============================================================  ======================================================
what another peer did                                          what follows here
=============================================================  ======================================================
it was to blame in two committed rounds in a row               it is not expected for 2 s, then 4 s, ... 60 s
it was waited for in vain, or its group was, for as long as    it is not waited for, and its calls are not heeded, for
anybody may be: the second time in a row, or the first time    30 s, then 60 s, ... 10 min; for 2 min, nobody is waited
of a peer that has been in no round with this one              for that has been in no round with this one
it was to blame in two rounds and gave nothing to them, and    it gets no place for 30 s, then 60 s, ...; and for 2
has been in no other one with this one                         min as above
its values were too large in three rounds                      it gets no place for 10 min, then 20 min, ...
=============================================================  ======================================================

A peer that is not waited for has a place all the same if it comes by itself. A round without blame ends the first two,
and ten of them make up for one in which the values were too large.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import TypeVar

from manyhands.base.identity import PeerId

OFFENCE_S = 2.0
MAX_OFFENCE_S = 60.0
IN_VAIN_S = 30.0
MAX_IN_VAIN_S = 600.0
WARY_S = 120.0
REFUSED_S = 600.0
MAX_REFUSED_S = 86400.0
STRIKES = 3
GOOD_ROUNDS = 10
"""They make up for one strike."""
MAX_KNOWN = 4096

T = TypeVar("T")


class Conduct:
    """The record of the other peers, as this one has seen them."""

    def __init__(self) -> None:
        self._met: dict[PeerId, None] = {}  # in committed rounds
        self._offences: dict[PeerId, tuple[int, float]] = {}  # how often in a row; until when it is not expected
        self._in_vain: dict[PeerId, tuple[int, float]] = {}  # likewise
        self._silent: dict[PeerId, None] = {}  # strangers that gave nothing to a round
        self._strikes: dict[PeerId, float] = {}
        self._refused: dict[PeerId, tuple[int, float]] = {}  # how often; until when
        self._wary_until = -math.inf

    def note_round(
        self, members: Iterable[PeerId], blamed: Collection[PeerId], now: float, silent: Collection[PeerId] = ()
    ) -> None:
        """A round has committed.

        Args:
            silent: members that gave nothing to it.
        """
        for peer_id in members:
            is_to_blame = peer_id in blamed
            if is_to_blame and peer_id in silent and peer_id not in self._met:
                if peer_id in self._silent:
                    self._refuse(peer_id, IN_VAIN_S, now)
                    self._wary_until = now + WARY_S
                _set(self._silent, peer_id, None)
                continue
            self._silent.pop(peer_id, None)
            _set(self._met, peer_id, None)
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
        """A peer, or its group, was waited for as long as anybody may be, and did not come."""
        is_stranger = peer_id not in self._met
        num_before, _ = self._in_vain.pop(peer_id, (0 if is_stranger else -1, 0.0))
        longer_s = min(IN_VAIN_S * 2**num_before, MAX_IN_VAIN_S) if num_before >= 0 else 0.0
        _set(self._in_vain, peer_id, (num_before + 1, now + longer_s))
        if is_stranger:
            self._wary_until = now + WARY_S

    def strike(self, peer_id: PeerId, now: float) -> float:
        """The values of a peer were too large; returns for how long it gets no place any more, which may be 0 s."""
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
        """Whether this peer goes where another one calls it."""
        is_in_vain = self._in_vain.get(peer_id, (0, now))[1] > now
        is_doubtful = now < self._wary_until and bool(self._met) and peer_id not in self._met
        return not (is_in_vain or is_doubtful or self.is_refused(peer_id, now))

    def awaited(self, peers: Collection[PeerId], now: float) -> Collection[PeerId]:
        """Of some peers, those who are waited for."""
        if not (self._offences or self._in_vain or self._refused or now < self._wary_until):
            return peers
        return [
            peer_id
            for peer_id in peers
            if self.is_heeded(peer_id, now) and self._offences.get(peer_id, (0, now))[1] <= now
        ]


def _set(known: dict[PeerId, T], peer_id: PeerId, value: T) -> None:
    """As the latest; the oldest is forgotten when there are too many."""
    known.pop(peer_id, None)
    known[peer_id] = value
    while len(known) > MAX_KNOWN:
        del known[next(iter(known))]
