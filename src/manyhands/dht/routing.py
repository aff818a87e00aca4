"""The peers that this node knows: many near it, few far away.

Rules:
    * a contact lies in the bucket of its distance's highest bit; a bucket holds ``k`` of them;
    * within a bucket the least recently seen comes first, and whoever is seen moves to the end;
    * a full bucket keeps its old contacts, the likeliest to stay; up to ``k`` newcomers wait as replacements;
    * a contact that failed ``max_failures`` times in a row is dropped, and the newest replacement moves up.

Source: Maymounkov & Mazieres, Kademlia, 2002, sections 2.2, 2.4 and 4.1.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from manyhands.base.identity import PeerId
from manyhands.dht.ids import ID_BITS, distance, node_id

MAX_ADDRESSES = 8
MAX_ADDRESS_LENGTH = 400  # a host name of 253 characters, a port and a peer id fit


class Contact(msgspec.Struct, frozen=True):
    """A peer and where it can be dialled, as it is told to others."""

    peer_id: Annotated[PeerId, msgspec.Meta(max_length=64)]
    addresses: Annotated[
        list[Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_LENGTH)]], msgspec.Meta(max_length=MAX_ADDRESSES)
    ]


@dataclass
class _Bucket:
    live: dict[PeerId, Contact] = field(default_factory=dict)  # least recently seen first
    waiting: dict[PeerId, Contact] = field(default_factory=dict)  # oldest replacement first
    failures: dict[PeerId, int] = field(default_factory=dict)  # in a row, of live contacts; none means 0


class RoutingTable:
    """The known peers of one node; see the rules at the top of this file.

    Args:
        own_id: the node's peer id, never in the table.
        k: contacts in a bucket.
        max_failures: requests in a row that a contact may fail.

    Attributes:
        num_changes: how often a contact came or went.
        num_silences: how often one fell silent, or was heard of again.
    """

    def __init__(self, own_id: PeerId, k: int, max_failures: int) -> None:
        self._own_id = own_id
        self._k = k
        self._max_failures = max_failures
        self._buckets = [_Bucket() for _ in range(ID_BITS)]
        self._points: list[tuple[int, Contact]] | None = None  # of all contacts; None after a change
        self.num_changes = 0
        self.num_silences = 0
        self._silent: set[PeerId] = set()

    def __len__(self) -> int:
        return len(self._all_points())

    def __contains__(self, peer_id: PeerId) -> bool:
        return peer_id != self._own_id and peer_id in self._bucket_of(peer_id).live

    def is_sound(self, peer_id: PeerId) -> bool:
        """Whether a peer is in the table, and has not failed since it was seen."""
        if peer_id == self._own_id:
            return False
        bucket = self._bucket_of(peer_id)
        return peer_id in bucket.live and peer_id not in bucket.failures and peer_id not in self._silent

    def is_waiting(self, peer_id: PeerId) -> bool:
        """Whether a peer is known, but there is no room for it."""
        return peer_id != self._own_id and peer_id in self._bucket_of(peer_id).waiting

    def contact_of(self, peer_id: PeerId) -> Contact | None:
        """A peer that is in the table, or waits to be."""
        if peer_id == self._own_id:
            return None
        bucket = self._bucket_of(peer_id)
        return bucket.live.get(peer_id) or bucket.waiting.get(peer_id)

    def contacts(self) -> list[Contact]:
        """All contacts, the nearest buckets first."""
        return [contact for bucket in self._buckets for contact in bucket.live.values()]

    def seen(self, contact: Contact) -> None:
        """Note that a peer just answered or asked; its addresses replace the old ones."""
        if contact.peer_id == self._own_id:
            return
        self._set_silent(contact.peer_id, False)
        bucket = self._bucket_of(contact.peer_id)
        bucket.failures.pop(contact.peer_id, None)
        if contact.peer_id in bucket.live or len(bucket.live) < self._k:
            bucket.waiting.pop(contact.peer_id, None)
            before = bucket.live.get(contact.peer_id)
            _move_to_end(bucket.live, contact)
            if before != contact:
                self._points = None
                self.num_changes += before is None
            return
        _move_to_end(bucket.waiting, contact)
        if len(bucket.waiting) > self._k:
            del bucket.waiting[next(iter(bucket.waiting))]

    def lost(self, peer_id: PeerId) -> None:
        """Note that the connection to a peer has ended: it may be gone, or have had nothing to say."""
        if peer_id in self:
            self._set_silent(peer_id, True)

    def failed(self, peer_id: PeerId) -> None:
        """Note that a peer did not answer."""
        if peer_id == self._own_id:
            return
        bucket = self._bucket_of(peer_id)
        bucket.waiting.pop(peer_id, None)
        if peer_id not in bucket.live:
            return
        bucket.failures[peer_id] = bucket.failures.get(peer_id, 0) + 1
        if bucket.failures[peer_id] < self._max_failures:
            return
        del bucket.live[peer_id], bucket.failures[peer_id]
        self._silent.discard(peer_id)
        self._points = None
        self.num_changes += 1
        if bucket.waiting:
            _, replacement = bucket.waiting.popitem()
            bucket.live[replacement.peer_id] = replacement

    def num_nearer(self, target: int) -> int:
        """How many contacts are nearer to a point than this node, but for those who fell silent."""
        own_distance = distance(node_id(self._own_id), target)
        nearer = (point for point, contact in self._all_points() if contact.peer_id not in self._silent)
        return sum(distance(point, target) < own_distance for point in nearer)

    def nearest(self, target: int, num: int) -> list[Contact]:
        """The ``num`` contacts nearest to a point, nearest first."""
        nearest = heapq.nsmallest(num, self._all_points(), key=lambda pair: distance(pair[0], target))
        return [contact for _, contact in nearest]

    def least_recently_seen(self) -> list[Contact]:
        """The first contact of each bucket: those whose life is most in doubt."""
        return [next(iter(bucket.live.values())) for bucket in self._buckets if bucket.live]

    def _all_points(self) -> list[tuple[int, Contact]]:
        if self._points is None:
            self._points = [(node_id(contact.peer_id), contact) for contact in self.contacts()]
        return self._points

    def _set_silent(self, peer_id: PeerId, is_silent: bool) -> None:
        if (peer_id in self._silent) != is_silent:
            self._silent ^= {peer_id}
            self.num_silences += 1

    def _bucket_of(self, peer_id: PeerId) -> _Bucket:
        return self._buckets[distance(node_id(peer_id), node_id(self._own_id)).bit_length() - 1]


def _move_to_end(contacts: dict[PeerId, Contact], contact: Contact) -> None:
    contacts.pop(contact.peer_id, None)
    contacts[contact.peer_id] = contact
