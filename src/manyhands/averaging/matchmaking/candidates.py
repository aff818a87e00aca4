"""What one peer goes by when it looks for a group: the roster, and what it has learnt since from the others."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
from collections.abc import Collection, Iterable, Mapping

from manyhands.averaging.matchmaking.conduct import STRIKES, Conduct
from manyhands.averaging.matchmaking.roster import Roster
from manyhands.averaging.messages import SHORT_ID_BYTES, Position
from manyhands.base.errors import Refused
from manyhands.base.identity import PeerId

logger = logging.getLogger(__name__)

BELIEVE_BEHIND_S = 3.0
"""For so long a peer that says that the run went on is believed although no record shows it: records take a moment."""
MAX_MET = 4096
MAX_SHOWN_REFUSALS = 3


@functools.lru_cache(maxsize=MAX_MET)
def short_id(peer_id: PeerId) -> bytes:
    """Names a peer in few bytes, for those who may know it."""
    return hashlib.sha256(peer_id.encode()).digest()[:SHORT_ID_BYTES]


def short_ids(peer_ids: Iterable[PeerId]) -> bytes:
    """End to end."""
    return b"".join(short_id(peer_id) for peer_id in peer_ids)


def split_ids(ids: bytes) -> set[bytes]:
    """What :func:`short_ids` has put together."""
    return {ids[start : start + SHORT_ID_BYTES] for start in range(0, len(ids) - SHORT_ID_BYTES + 1, SHORT_ID_BYTES)}


class Candidates:
    """Who should come to the next round, as this peer sees it.

    Attributes:
        refusals: who will not average with this peer, and why, in words; of one search for a group.
        conduct: how the others behaved so far.
    """

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self.conduct = Conduct()
        self._ahead: dict[PeerId, tuple[Position, float]] = {}
        self._met: set[bytes] = set()
        self.refusals: dict[PeerId, str] = {}

    def expected(self) -> Mapping[PeerId, bool]:
        """As the roster says; without those who say that the run has gone on, where nobody knows of it.

        Nor those who have spoilt rounds, or were waited for in vain (:mod:`manyhands.averaging.matchmaking.conduct`).
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
        """A peer does not come; others may expect it still."""
        self._met.add(short_id(peer_id))
        self.roster.report_missing(peer_id)

    def note_round(
        self,
        members: Iterable[PeerId],
        blamed: Collection[PeerId],
        *,
        is_committed: bool,
    ) -> None:
        """A round is over: who is to blame in it is not expected before a fresh record; the next time, longer.

        But if the others cannot do without it, they shall find each other as soon as they can.
        """
        members = list(members)
        for peer_id in members:
            if peer_id in blamed:
                self.report_missing(peer_id)
        if is_committed:
            self.conduct.note_round(members, blamed, asyncio.get_running_loop().time())

    def note_in_vain(self, peer_ids: Iterable[PeerId]) -> None:
        """These peers, or the groups that they led, were waited for as long as anybody may be."""
        for peer_id in peer_ids:
            logger.info("peer %s was waited for in vain", peer_id)
            self.conduct.note_in_vain(peer_id, asyncio.get_running_loop().time())

    def strike(self, peer_id: PeerId) -> None:
        """The values of a peer were too large, as more than one other found."""
        refused_s = self.conduct.strike(peer_id, asyncio.get_running_loop().time())
        if refused_s:
            logger.warning("The values of peer %s were too large in %d rounds: it gets no place here for %.0f min",
                           peer_id, STRIKES, refused_s / 60)  # fmt: skip

    def is_heeded(self, peer_id: PeerId) -> bool:
        """Whether this peer goes where another one calls it."""
        return self.conduct.is_heeded(peer_id, asyncio.get_running_loop().time())

    def note_refusal(self, peer_id: PeerId, refusal: Refused) -> None:
        """A peer of another model or other settings is not asked again before a fresh record of it."""
        self.refusals[peer_id] = str(refusal)
        self.report_missing(peer_id)

    def with_refusals(self, reason: str) -> str:
        """Why there is no group, and who has said no."""
        return "; ".join([reason, *list(self.refusals.values())[:MAX_SHOWN_REFUSALS]])

    def note_ahead(self, peer_id: PeerId) -> None:
        """A peer says that the run has gone on. The first time counts, as long as this peer stays where it is."""
        position, now = self.roster.position(), asyncio.get_running_loop().time()
        self._ahead = {other: said for other, said in self._ahead.items() if said[0] == position}
        self._ahead.setdefault(peer_id, (position, now))

    def unheard_of(self, expects: bytes, own_id: PeerId) -> set[bytes]:
        """Of those whom another peer expects, the ones that this peer has never heard of; each is told once.

        About the others it has an opinion of its own: it may know that one is gone.
        """
        if len(self._met) > MAX_MET:
            self._met.clear()
        self._met.add(short_id(own_id))
        self._met.update(map(short_id, self.expected()))
        strangers = split_ids(expects) - self._met
        self._met |= strangers
        return strangers
