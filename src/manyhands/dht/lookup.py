"""Decides which contacts a lookup asks: the nearest known ones, a few at a time, until the nearest have all answered.

A contact goes from *known* through *asked* to *answered* or *failed*; on the way it may be *slow*. The shortlist is
the ``num`` nearest contacts that did not fail. The lookup is finished when all contacts on the shortlist have answered.
A lookup of the holders of a key wants few contacts, and few of one network (:mod:`manyhands.dht.networks`); one that
announces this node to its neighbours wants ``k``.

A slow contact is left out until it answers, and others are asked in its place, as long as only a minority of the
nearest is slow. If most are slow, the cause is this peer or its link, and the lookup waits for all of them.

Malicious peers may name peers that do not exist, nearer to the point than all others. So contacts that only *suspects*
named are asked only if there are too few others. A suspect has named at least ``NUM_BAD`` contacts that were slow or
failed, and fewer that answered. Contacts that this peer knew itself do not count as bad. Contacts that others than
suspects named do not count as good: any peer can name contacts that all peers know.

Source: Maymounkov & Mazieres, Kademlia, 2002, section 2.3.
"""

from __future__ import annotations

import bisect
import enum
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable

from manyhands.base.identity import PeerId
from manyhands.dht.ids import node_id
from manyhands.dht.networks import spread
from manyhands.dht.routing import Contact

NUM_BAD = 3
"""Bad contacts from one peer; an honest peer may know one or two dead ones."""


class _State(enum.Enum):
    KNOWN = enum.auto()
    ASKED = enum.auto()
    SLOW = enum.auto()
    ANSWERED = enum.auto()
    FAILED = enum.auto()
    OWN = enum.auto()


class Lookup:
    """State machine of one lookup.

    Args:
        target: the point.
        seeds: contacts to begin with.
        own_id: the peer that looks up; it is not asked.
        k: how many contacts of one answer count.
        alpha: maximum of concurrent requests.
        num: how many of the nearest must have answered; ``k`` by default.
        is_client: the peer that looks up is in no other peer's table.
        network_of: returns the network of a contact as far as known; None if networks do not matter.
    """

    def __init__(
        self,
        target: int,
        seeds: Iterable[Contact],
        *,
        own_id: PeerId,
        k: int,
        alpha: int,
        num: int | None = None,
        is_client: bool = False,
        network_of: Callable[[Contact], str] | None = None,
    ) -> None:
        self._target = target
        self._network_of = network_of
        self._networks: dict[int, str] = {}  # by distance
        self._num_networks = 0
        self._k = k
        self._num = k if num is None else num
        self._alpha = alpha
        self._num_asked = 0  # without slow ones
        self._num_slow = 0
        self._own_distance = None if is_client else node_id(own_id) ^ target
        self._states = {node_id(own_id) ^ target: _State.OWN}  # by distance, which is unique to a peer
        self._contacts: dict[int, Contact] = {}  # likewise
        self._hopeful: list[int] = []  # distances of those that did not fail, nearest first
        self._namers: dict[int, set[int | None]] = {}  # of each contact; all by distance; None for a seed
        if self._own_distance is not None:
            self._locate(Contact(own_id, []))
        self._learn(seeds, None)

    @property
    def is_finished(self) -> bool:
        """Whether all contacts on the shortlist have answered."""
        return all(self._states[distance] is _State.ANSWERED for distance in self._shortlist())

    def take_next(self) -> list[Contact]:
        """Mark the contacts to ask now as asked, and return them, nearest first."""
        room = self._alpha - self._num_asked
        if room <= 0:
            return []
        known = (distance for distance in self._shortlist() if self._states[distance] is _State.KNOWN)
        chosen = list(itertools.islice(known, room))
        for distance in chosen:
            self._states[distance] = _State.ASKED
        self._num_asked += len(chosen)
        return [self._contacts[distance] for distance in chosen]

    def slow(self, peer_id: PeerId) -> None:
        """Mark an asked peer as slow, if it has not answered yet."""
        distance = node_id(peer_id) ^ self._target
        if self._states[distance] is _State.ASKED:
            self._states[distance] = _State.SLOW
            self._num_asked -= 1
            self._num_slow += 1

    def is_slow(self, peer_id: PeerId) -> bool:
        """Whether a peer is marked as slow and has not answered since."""
        return self._states[node_id(peer_id) ^ self._target] is _State.SLOW

    def answered(self, peer_id: PeerId, contacts: Iterable[Contact]) -> None:
        """Process the answer of a peer: the contacts nearest to the target that it knows."""
        distance = self._end(peer_id, _State.ANSWERED)
        self._locate(self._contacts[distance])  # its network is known now that it was reached
        self._learn(contacts, distance)

    def failed(self, peer_id: PeerId) -> None:
        """Mark an asked peer as failed."""
        distance = self._end(peer_id, _State.FAILED)
        del self._hopeful[bisect.bisect_left(self._hopeful, distance)]

    def nearest(self) -> list[Contact]:
        """Return the ``num`` nearest contacts that have answered; others are ignored."""
        answered = [distance for distance in self._hopeful if self._states[distance] is _State.ANSWERED]
        return [self._contacts[distance] for distance in self._first(answered)]

    def _end(self, peer_id: PeerId, state: _State) -> int:
        distance = node_id(peer_id) ^ self._target
        assert self._states[distance] in (_State.ASKED, _State.SLOW)
        if self._states[distance] is _State.ASKED:
            self._num_asked -= 1
        else:
            self._num_slow -= 1
        self._states[distance] = state
        return distance

    def _learn(self, contacts: Iterable[Contact], named_by: int | None) -> None:
        states = self._states
        target = self._target
        named = list(contacts)
        if len(named) > self._k:
            named = heapq.nsmallest(self._k, named, key=lambda contact: node_id(contact.peer_id) ^ target)
        for contact in named:
            distance = node_id(contact.peer_id) ^ target
            if distance not in states:
                states[distance] = _State.KNOWN
                self._namers[distance] = set()
                self._contacts[distance] = contact
                self._locate(contact)
                bisect.insort(self._hopeful, distance)
            if states[distance] not in (_State.OWN, _State.FAILED):  # an honest peer may not know yet
                self._namers[distance].add(named_by)

    def _shortlist(self) -> list[int]:
        """Return the distances of the contacts that must answer."""
        num_bad = self._num_slow + len(self._contacts) - len(self._hopeful)
        hopeful = self._trusted() if num_bad >= NUM_BAD else self._hopeful
        nearest = self._first(hopeful)
        if not self._num_slow:
            return nearest
        num_slow = sum(self._states[distance] is _State.SLOW for distance in nearest)
        if not 0 < 2 * num_slow < len(nearest):
            return nearest
        return self._first([distance for distance in hopeful if self._states[distance] is not _State.SLOW])

    def _first(self, nearest: list[int]) -> list[int]:
        """Return the first ``num`` of these distances, limited per network if that matters."""
        if self._num_networks <= 1:
            return nearest[: self._num]
        return spread(nearest, self._num, self._networks.__getitem__)

    def _locate(self, contact: Contact) -> None:
        if self._network_of is not None:
            network = self._network_of(contact)
            if network not in self._networks.values():
                self._num_networks += 1
            self._networks[node_id(contact.peer_id) ^ self._target] = network

    def _trusted(self) -> list[int]:
        """Return contacts that did not fail, without those named only by suspects if there are enough others."""
        states = self._states
        namers = self._namers
        num_bad = Counter[int | None]()  # by the peer that named them
        num_good = Counter[int | None]()  # likewise
        for one, named_by in namers.items():
            if states[one] in (_State.SLOW, _State.FAILED) and None not in named_by:
                num_bad.update(named_by)
        suspects: set[int | None] = {peer for peer, num in num_bad.items() if num >= NUM_BAD}
        for one, named_by in namers.items():
            if states[one] is _State.ANSWERED and named_by <= suspects | {None}:
                num_good.update(named_by)
        suspects = {peer for peer in suspects if num_bad[peer] > num_good[peer]}
        trusted = [one for one in self._hopeful if states[one] is _State.ANSWERED or not namers[one] <= suspects]
        return trusted if len(trusted) >= self._num else self._hopeful
