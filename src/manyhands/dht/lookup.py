"""The order in which a lookup asks: always the nearest known peers, a few at once, until the nearest have all answered.

A contact goes from *known* through *asked* to *answered* or *failed*. The shortlist is the ``num`` nearest contacts
that did not fail. The lookup is finished when everybody on the shortlist has answered: nobody nearer is left to hear
of. Who wants the replicas of a key wants few; who wants to be known to its neighbours wants ``k``.

Source: Maymounkov & Mazieres, Kademlia, 2002, section 2.3.
"""

from __future__ import annotations

import bisect
import enum
import heapq
import itertools
from collections.abc import Iterable

from manyhands.base.identity import PeerId
from manyhands.dht.ids import distance, node_id
from manyhands.dht.routing import Contact


class _State(enum.Enum):
    KNOWN = enum.auto()
    ASKED = enum.auto()
    ANSWERED = enum.auto()
    FAILED = enum.auto()


class Lookup:
    """Which contacts to ask on the way to a point.

    Args:
        target: the point.
        seeds: contacts to begin with.
        own_id: the peer that looks up; it is not asked.
        k: how many contacts of one answer count.
        alpha: how many may be asked at once.
        num: how many of the nearest must have answered; ``k`` if not given.
    """

    def __init__(
        self, target: int, seeds: Iterable[Contact], *, own_id: PeerId, k: int, alpha: int, num: int | None = None
    ) -> None:
        self._target = target
        self._own_id = own_id
        self._k = k
        self._num = k if num is None else num
        self._alpha = alpha
        self._states: dict[PeerId, _State] = {}
        self._by_distance: list[tuple[int, Contact]] = []  # nearest first; no two peers have one distance
        self._learn(seeds)

    @property
    def is_finished(self) -> bool:
        """Whether everybody on the shortlist has answered."""
        return all(self._states[contact.peer_id] is _State.ANSWERED for contact in self._shortlist())

    def to_ask(self) -> list[Contact]:
        """The contacts to ask now, nearest first; each is named once, and then counts as asked."""
        num_asked = sum(state is _State.ASKED for state in self._states.values())
        known = [contact for contact in self._shortlist() if self._states[contact.peer_id] is _State.KNOWN]
        chosen = known[: max(0, self._alpha - num_asked)]
        for contact in chosen:
            self._states[contact.peer_id] = _State.ASKED
        return chosen

    def answered(self, peer_id: PeerId, contacts: Iterable[Contact]) -> None:
        """Note the answer of a peer that was asked: the contacts nearest to the target that it knows."""
        assert self._states[peer_id] is _State.ASKED
        self._states[peer_id] = _State.ANSWERED
        self._learn(heapq.nsmallest(self._k, contacts, key=self._distance))

    def failed(self, peer_id: PeerId) -> None:
        """Note that a peer that was asked did not answer."""
        assert self._states[peer_id] is _State.ASKED
        self._states[peer_id] = _State.FAILED

    def nearest(self) -> list[Contact]:
        """The contacts that have answered, nearest first, at most ``num``."""
        return [contact for contact in self._shortlist() if self._states[contact.peer_id] is _State.ANSWERED]

    def _learn(self, contacts: Iterable[Contact]) -> None:
        for contact in contacts:
            if contact.peer_id != self._own_id and contact.peer_id not in self._states:
                self._states[contact.peer_id] = _State.KNOWN
                bisect.insort(self._by_distance, (self._distance(contact), contact))

    def _shortlist(self) -> list[Contact]:
        states = self._states
        hopeful = (contact for _, contact in self._by_distance if states[contact.peer_id] is not _State.FAILED)
        return list(itertools.islice(hopeful, self._num))

    def _distance(self, contact: Contact) -> int:
        return distance(node_id(contact.peer_id), self._target)
