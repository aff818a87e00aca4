"""The peers that could form a group with this one: the roster, corrected by what this peer learnt since.

=============================================================  ======================================================
what another peer did                                          what follows here
=============================================================  ======================================================
it was to blame in a committed round, or did not come within   the second time in a row: it is not waited for, and its
the longest wait                                               calls are ignored, for the longest wait, then four
                                                               times that, ... 10 min
its group did not close within the longest wait, or it called  likewise, counted on its own
this peer to its group and then refused it
it was to blame in two committed rounds in a row               likewise; meanwhile it gets no place for the longest
                                                               wait after each such round, and less time in a round
its values were too large in three rounds                      it gets no place for 10 min, then 20 min, ... a day
=============================================================  ======================================================

A peer that is only not waited for still gets a place if it comes by itself. A round without blame ends the first
penalty, and one that the peer led ends the second: else a peer could come to one round and then hold up two, again and
again. Ten rounds without blame cancel one round with values that were too large.

A leader does not wait for a peer that refuses its call because it avoids the leader, nor for one that follows a leader
which this one avoids. It blames such a peer only if the answer comes late. So honest peers do not avoid each other in
turn.

These two begin with the time that the peer has cost here, because it may be innocent: a broken link between
two honest peers looks the same at both ends. So after a short fault both go on together after a short time. While a
penalty lasts, no further one is added. If a peer then behaves for as long as its next penalty would last, they
begin again with the shortest. A peer that loses all its connections was cut off itself, and forgives everybody.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from manyhands.averaging.messages import SHORT_ID_BYTES, Group, Position, short_id
from manyhands.averaging.timing import ANSWER_S, DAY_S, MOMENT_S, SHUN_S
from manyhands.base.errors import Refused
from manyhands.base.identity import PeerId

logger = logging.getLogger(__name__)

MAX_AVOIDED_S = SHUN_S
REFUSED_S = SHUN_S
MAX_REFUSED_S = DAY_S
STRIKES = 3
GOOD_ROUNDS = 10
"""Rounds that cancel one strike."""
BELIEVE_BEHIND_S = ANSWER_S + MOMENT_S
"""How long a claim that the run went on is believed without a record that shows it: records take a moment."""
MAX_KNOWN = 4096
MAX_SHOWN_REFUSALS = 3

T = TypeVar("T")


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

    def contributors(self) -> Container[PeerId]:
        """The peers whose values are in the state at this position: one of them leads, if any can."""

    def report_missing(self, peer_id: PeerId) -> None:
        """A peer did not come; it is expected again only after a fresh record."""

    def call_to_round(self) -> None:
        """Another peer has begun a round at this position; the training loop should come as soon as it can."""


class Candidates:
    """The peers that should come to the next round, as this peer knows them.

    Attributes:
        longest_wait_s: how long this peer waits for a peer that does not come.
        refusals: peers that refused to average with this one in the current search, and why.
    """

    def __init__(self, roster: Roster, longest_wait_s: float) -> None:
        self.roster = roster
        self.longest_wait_s = longest_wait_s
        self.refusals: dict[PeerId, str] = {}
        self._avoided = _Penalties(longest_wait_s, MAX_AVOIDED_S, factor=4.0, lapses=True)
        self._not_followed = _Penalties(longest_wait_s, MAX_AVOIDED_S, factor=4.0, lapses=True)
        self._doubted = _Penalties(longest_wait_s, MAX_AVOIDED_S, factor=4.0, lapses=True)
        self._refused = _Penalties(REFUSED_S, MAX_REFUSED_S, factor=2.0, lapses=False)
        self._penalties = self._avoided, self._not_followed, self._refused
        self._to_blame_until = -math.inf  # loop time; this peer itself
        self._blamed_at: dict[PeerId, float] = {}  # in the last committed round with it (loop time)
        self._strikes: dict[PeerId, float] = {}
        self._ahead: dict[PeerId, tuple[Position, float]] = {}  # where it said that, and when (loop time)
        self._met: set[bytes] = set()

    def expected(self) -> Mapping[PeerId, bool]:
        """The roster's peers, without those that are avoided, or claim in vain that the run went on."""
        expected, position, now = self.roster.expected(), self.roster.position(), asyncio.get_running_loop().time()
        disbelieved = {
            peer_id
            for peer_id, (there, since) in self._ahead.items()
            if there == position and since + BELIEVE_BEHIND_S <= now
        }
        if not (disbelieved or any(penalty.known for penalty in self._penalties)):  # as nearly always
            return expected
        return {
            peer_id: is_client
            for peer_id, is_client in expected.items()
            if peer_id not in disbelieved and self.is_heeded(peer_id)
        }

    def rank(self, peer_id: PeerId) -> tuple[bool, PeerId]:
        """Of several leaders the one with the lowest rank leads; all peers at one position agree on that."""
        return peer_id not in self.roster.contributors(), peer_id

    def is_refused(self, peer_id: PeerId) -> bool:
        """Whether a peer gets no place because its values were too large."""
        return self._refused.is_on(peer_id)

    def is_paused(self, peer_id: PeerId) -> bool:
        """Whether a peer gets no place because it was to blame a moment ago, in rounds twice in a row."""
        until = self._blamed_at.get(peer_id, -math.inf) + self.longest_wait_s
        return self._doubted.is_on(peer_id) and asyncio.get_running_loop().time() < until

    def is_to_blame(self) -> bool:
        """Whether this peer itself was to blame a moment ago, so that another one may refuse it a place."""
        return asyncio.get_running_loop().time() < self._to_blame_until

    def is_heeded(self, peer_id: PeerId) -> bool:
        """Whether this peer waits for another one, and follows its calls."""
        return not any(penalty.is_on(peer_id) for penalty in self._penalties)

    def doubted(self, group: Group) -> set[int]:
        """The ranks of members that were to blame in rounds twice in a row, if the others are more than half.

        All members of those rounds know that, and doubt a member for the same time. If only some did, it would be to
        blame again and again for the little time that these give it.
        """
        doubted = {rank for rank, member in enumerate(group.members) if self._doubted.is_on(member.peer_id)}
        return doubted if 2 * len(doubted) < len(group.members) else set()

    def report_missing(self, peer_id: PeerId) -> None:
        """A peer does not come; others may still expect it."""
        self._met.add(short_id(peer_id))
        self.roster.report_missing(peer_id)

    def note_round(
        self,
        members: Collection[PeerId],
        blamed: Collection[PeerId],
        struck: Collection[PeerId] = (),
        *,
        leader: PeerId | None = None,
        is_committed: bool,
    ) -> None:
        """Record a round: a peer to blame is expected again only after a fresh record, and later each time.

        In a round that did not commit, others may depend on a peer that seems to blame here.

        Args:
            members: the others.
            blamed: members of the round, perhaps this peer too.
            struck: those to blame whose values were too large.
        """
        now = asyncio.get_running_loop().time()
        if is_committed:
            self._to_blame_until = -math.inf if set(blamed) <= set(members) else now + self.longest_wait_s
        for peer_id in members:
            if peer_id in blamed:
                self.report_missing(peer_id)
            if peer_id in struck:
                self.strike(peer_id)
            if not is_committed:
                continue
            if peer_id in blamed:
                self._avoided.add(peer_id, num_free=1)
                self._doubted.add(peer_id, num_free=1)
                _set(self._blamed_at, peer_id, now)
                continue
            self._avoided.known.pop(peer_id, None)
            self._doubted.known.pop(peer_id, None)
            if peer_id == leader:
                self._not_followed.known.pop(peer_id, None)
            if peer_id in self._strikes:
                self._strikes[peer_id] -= 1 / GOOD_ROUNDS
                if self._strikes[peer_id] <= 0:
                    del self._strikes[peer_id]

    def note_in_vain(self, peer_ids: Iterable[PeerId]) -> None:
        """These peers did not come within the longest wait."""
        for peer_id in peer_ids:
            logger.info("peer %s did not come to the round in time", peer_id)
            self._avoided.add(peer_id, num_free=1)

    def note_unclosed(self, leader: PeerId) -> None:
        """A leader's group did not close within the longest wait, or the leader called this peer and refused it."""
        logger.info("peer %s did not lead this peer to a round", leader)
        self._not_followed.add(leader, num_free=1)

    def forgive(self) -> None:
        """This peer itself was cut off: the others did not keep it waiting."""
        self._avoided.known.clear()
        self._doubted.known.clear()
        self._not_followed.known.clear()

    def strike(self, peer_id: PeerId) -> float:
        """At least two other members found a peer's values too large; returns how many seconds it is now refused."""
        strikes = self._strikes.pop(peer_id, 0.0) + 1.0
        if strikes <= STRIKES - 1:
            _set(self._strikes, peer_id, strikes)
            return 0.0
        refused_s = self._refused.add(peer_id)
        logger.warning("The values of peer %s were too large in %d rounds: it gets no place here for %.0f min",
                       peer_id, STRIKES, refused_s / 60)  # fmt: skip
        return refused_s

    def note_refusal(self, peer_id: PeerId, refusal: Refused) -> None:
        """Do not ask a peer of another model or with other settings again before its next record."""
        self.refusals[peer_id] = str(refusal)
        self.report_missing(peer_id)

    def with_refusals(self, reason: str) -> str:
        """Why there is no group, with the refusals of other peers."""
        return "; ".join([reason, *list(dict.fromkeys(self.refusals.values()))[:MAX_SHOWN_REFUSALS]])

    def note_ahead(self, peer_id: PeerId) -> None:
        """A peer says that the run went on. Its first claim counts until this peer moves."""
        position = self.roster.position()
        self._ahead = {other: claim for other, claim in self._ahead.items() if claim[0] == position}
        self._ahead.setdefault(peer_id, (position, asyncio.get_running_loop().time()))

    def unheard_of(self, expects: bytes, own_id: PeerId) -> set[bytes]:
        """The peers in another peer's list that this one has never heard of; each is returned once.

        Peers already known are skipped: some may have left.
        """
        if len(self._met) > MAX_KNOWN:
            self._met.clear()
        self._met.add(short_id(own_id))
        self._met.update(map(short_id, self.expected()))
        strangers = split_ids(expects) - self._met
        self._met |= strangers
        return strangers


@dataclass(eq=False)
class _Penalties:
    """Times during which peers are avoided: each in a row is ``factor`` times as long as the one before.

    Attributes:
        known: the number in a row, and until when the last one lasts (loop time).
    """

    first_s: float
    max_s: float
    factor: float
    lapses: bool  # after as long as the next one would be
    known: dict[PeerId, tuple[int, float]] = field(default_factory=dict)

    def add(self, peer_id: PeerId, num_free: int = 0) -> float:
        """Begin the next one, without effect for the first ``num_free``; returns for how many seconds one is on."""
        num_before, until = self.known.get(peer_id, (0, 0.0))
        now = asyncio.get_running_loop().time()
        if until > now:
            return until - now
        if self.lapses and now - until > self._length_s(num_before - num_free):
            num_before = min(num_before, num_free)
        length_s = self._length_s(num_before - num_free)
        _set(self.known, peer_id, (num_before + 1, now + length_s))
        return length_s

    def _length_s(self, number: int) -> float:
        """Of a penalty, counted from 0; those below 0 have no effect."""
        return min(self.first_s * self.factor**number, self.max_s) if number >= 0 else 0.0

    def is_on(self, peer_id: PeerId) -> bool:
        return peer_id in self.known and self.known[peer_id][1] > asyncio.get_running_loop().time()


def _set(known: dict[PeerId, T], peer_id: PeerId, value: T) -> None:
    """Set as the latest entry; drop the oldest ones beyond ``MAX_KNOWN``."""
    known.pop(peer_id, None)
    known[peer_id] = value
    while len(known) > MAX_KNOWN:
        del known[next(iter(known))]
