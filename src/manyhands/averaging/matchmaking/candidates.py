"""The peers that could form a group with this one: the roster, corrected by what this peer learnt since."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from manyhands.averaging.matchmaking.conduct import STRIKES, Conduct
from manyhands.averaging.messages import SHORT_ID_BYTES, Position, short_id
from manyhands.base.errors import Refused
from manyhands.base.identity import PeerId

logger = logging.getLogger(__name__)

BELIEVE_BEHIND_S = 3.0
"""How long a claim that the run went on is believed without a record that shows it: records take a moment."""
MAX_MET = 4096
MAX_SHOWN_REFUSALS = 3


def short_ids(peer_ids: Iterable[PeerId]) -> bytes:
    """The short ids of some peers, concatenated."""
    return b"".join(short_id(peer_id) for peer_id in peer_ids)


def split_ids(ids: bytes) -> set[bytes]:
    """The inverse of :func:`short_ids`."""
    return {ids[start : start + SHORT_ID_BYTES] for start in range(0, len(ids) - SHORT_ID_BYTES + 1, SHORT_ID_BYTES)}


class Roster(Protocol):
    """What matchmaking needs to know of the run; the optimizer and the averager implement it."""

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


class Candidates:
    """The peers that should come to the next round, as this peer knows them.

    Attributes:
        refusals: peers that refused to average with this one in the current search, and why.
        conduct: how the others behaved so far.
    """

    def __init__(self, roster: Roster, longest_wait_s: float) -> None:
        self.roster = roster
        self.conduct = Conduct(longest_wait_s)
        self._ahead: dict[PeerId, tuple[Position, float]] = {}
        self._met: set[bytes] = set()
        self.refusals: dict[PeerId, str] = {}

    def expected(self) -> Mapping[PeerId, bool]:
        """The roster's peers, without those that claim that the run went on while no record shows it.

        Peers excluded by :mod:`manyhands.averaging.matchmaking.conduct` are left out, too.
        """
        expected = self.roster.expected()
        awaited = self.conduct.awaited(expected, asyncio.get_running_loop().time())
        if awaited is not expected:
            expected = {peer_id: expected[peer_id] for peer_id in awaited}
        if not self._ahead:
            return expected
        position, believed_since = self.roster.position(), asyncio.get_running_loop().time() - BELIEVE_BEHIND_S
        return {
            peer_id: is_client
            for peer_id, is_client in expected.items()
            if peer_id not in self._ahead
            or self._ahead[peer_id][0] != position
            or self._ahead[peer_id][1] > believed_since
        }

    def report_missing(self, peer_id: PeerId) -> None:
        """A peer does not come; others may still expect it."""
        self._met.add(short_id(peer_id))
        self.roster.report_missing(peer_id)

    def note_round(
        self,
        members: Iterable[PeerId],
        blamed: Collection[PeerId],
        *,
        is_committed: bool,
    ) -> None:
        """Record a round: a peer to blame is expected again only after a fresh record, and later each time.

        If the others depend on it, they find each other as soon as they can.
        """
        members = list(members)
        for peer_id in members:
            if peer_id in blamed:
                self.report_missing(peer_id)
        if is_committed:
            self.conduct.note_round(members, blamed, asyncio.get_running_loop().time())

    def note_in_vain(self, peer_ids: Iterable[PeerId]) -> None:
        """These peers, or the groups they led, did not come within the longest wait."""
        for peer_id in peer_ids:
            logger.info("peer %s was waited for in vain", peer_id)
            self.conduct.note_in_vain(peer_id, asyncio.get_running_loop().time())

    def strike(self, peer_id: PeerId) -> None:
        """At least two other members found a peer's values too large."""
        refused_s = self.conduct.strike(peer_id, asyncio.get_running_loop().time())
        if refused_s:
            logger.warning("The values of peer %s were too large in %d rounds: it gets no place here for %.0f min",
                           peer_id, STRIKES, refused_s / 60)  # fmt: skip

    def is_heeded(self, peer_id: PeerId) -> bool:
        """Whether this peer follows a call of another one."""
        return self.conduct.is_heeded(peer_id, asyncio.get_running_loop().time())

    def note_refusal(self, peer_id: PeerId, refusal: Refused) -> None:
        """Do not ask a peer of another model or with other settings again before its next record."""
        self.refusals[peer_id] = str(refusal)
        self.report_missing(peer_id)

    def with_refusals(self, reason: str) -> str:
        """Why there is no group, with the refusals of other peers."""
        return "; ".join([reason, *list(self.refusals.values())[:MAX_SHOWN_REFUSALS]])

    def note_ahead(self, peer_id: PeerId) -> None:
        """A peer says that the run went on. Its first claim counts until this peer moves."""
        position, now = self.roster.position(), asyncio.get_running_loop().time()
        self._ahead = {other: said for other, said in self._ahead.items() if said[0] == position}
        self._ahead.setdefault(peer_id, (position, now))

    def unheard_of(self, expects: bytes, own_id: PeerId) -> set[bytes]:
        """The peers in another peer's list that this one has never heard of; each is returned once.

        Peers already known are skipped: some may have left.
        """
        if len(self._met) > MAX_MET:
            self._met.clear()
        self._met.add(short_id(own_id))
        self._met.update(map(short_id, self.expected()))
        strangers = split_ids(expects) - self._met
        self._met |= strangers
        return strangers
