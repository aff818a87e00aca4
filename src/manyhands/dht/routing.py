"""The routing table: the peers that this node knows, many near it and few far away.

Rules:
    * the bucket of a contact is the highest bit of its distance; a bucket holds ``k`` contacts;
    * a bucket is ordered by when its contacts were last seen, the least recent first;
    * a full bucket keeps its old contacts, the likeliest to stay; up to ``k`` newcomers wait as replacements;
    * a contact that failed is named to no peer until it is seen again, and gives its place to a newcomer;
    * a contact whose connection ended is *silent* until it is seen again: it may be gone, or the connection was idle;
    * a contact that failed ``max_failures`` times in a row is dropped, and the newest replacement moves up.

Source: Maymounkov & Mazieres, Kademlia, 2002, sections 2.2, 2.4 and 4.1.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec

from manyhands.base.address import AddressTexts
from manyhands.base.identity import PeerId
from manyhands.dht.ids import distance, node_id
from manyhands.dht.networks import spread


class Contact(msgspec.Struct, frozen=True, gc=False):
    """A peer and its addresses, as sent to other peers."""

    peer_id: Annotated[PeerId, msgspec.Meta(max_length=64)]
    addresses: AddressTexts


class _Entry(msgspec.Struct, eq=False, gc=False):
    contact: Contact
    heard_at: float
    network: str
    num_failures: int = 0  # in a row
    is_silent: bool = False


_heard_at = operator.attrgetter("heard_at")
_network = operator.attrgetter("network")


class _Bucket(msgspec.Struct, eq=False):
    """Entries by point; compact, as a node has thousands of them."""

    live: dict[int, _Entry]  # least recently seen first
    waiting: dict[int, _Entry]  # oldest replacement first


class RoutingTable:
    """The known peers of one node; see the rules at the top of this file.

    Args:
        own_id: the node's peer id, never in the table.
        k: contacts in a bucket.
        max_failures: failed requests in a row after which a contact is dropped.

    Attributes:
        num_changes: how often a contact was added or removed.
        num_silences: how often a contact fell silent, or was heard of again.
    """

    def __init__(self, own_id: PeerId, k: int, max_failures: int) -> None:
        self._own_id = own_id
        self._own_point = node_id(own_id)
        self._k = k
        self._max_failures = max_failures
        self._buckets: dict[int, _Bucket] = {}  # by the highest bit of the distance; most nodes have about 20 of 256
        self._indexes: list[int] = []  # sorted keys of the buckets
        self._num_live = 0
        self._num_in_network: Counter[str] = Counter()
        self.num_changes = 0
        self.num_silences = 0

    def __len__(self) -> int:
        return self._num_live

    def __contains__(self, peer_id: PeerId) -> bool:
        return self._live_entry(peer_id) is not None

    def is_sound(self, peer_id: PeerId) -> bool:
        """Whether a peer is in the table and has not failed since it was seen."""
        entry = self._live_entry(peer_id)
        return entry is not None and not entry.num_failures and not entry.is_silent

    def num_sound(self) -> int:
        """Return the number of contacts that have not failed or fallen silent since they were seen."""
        live = (bucket.live.values() for bucket in self._buckets.values())
        return sum(not entry.num_failures and not entry.is_silent for entries in live for entry in entries)

    def is_heard_again(self, peer_id: PeerId, just_now: float, since: float, now: float, network: str = "") -> bool:
        """Update a contact that was heard of again; return False if the caller has to call :meth:`seen` instead.

        Args:
            just_now: a contact heard of at or after this time is left as it is.
            since: a contact last heard of before this time may have other addresses, so the result is False.
            network: if it has changed, the result is False.
        Returns:
            Also False if the contact is unknown, has failed or is silent.
        """
        point = node_id(peer_id)
        bucket = self._buckets.get((point ^ self._own_point).bit_length())
        if bucket is None:
            return False
        live = bucket.live
        entry = live.get(point)
        if entry is None:
            waiting = bucket.waiting.get(point)
            return (
                waiting is not None and waiting.heard_at >= just_now and not (waiting.num_failures or waiting.is_silent)
            )
        if entry.heard_at < since or entry.num_failures or entry.is_silent or entry.network != network:
            return False
        if entry.heard_at < just_now:
            entry.heard_at = now
            del live[point]
            live[point] = entry
        return True

    def heard_at(self, peer_id: PeerId) -> float:
        """Return when a peer in the table or waiting as a replacement was last seen; else minus infinity."""
        entry = self._entry(peer_id)
        return entry.heard_at if entry is not None else -math.inf

    def is_waiting(self, peer_id: PeerId) -> bool:
        """Whether a peer waits as a replacement."""
        return self._entry(peer_id) is not None and peer_id not in self

    def has_room(self, peer_id: PeerId) -> bool:
        """Whether a peer is in the table, or would be added now."""
        point = node_id(peer_id)
        bucket = self._buckets.get((point ^ self._own_point).bit_length())
        if bucket is None or len(bucket.live) < self._k or point in bucket.live:
            return True
        return any(entry.num_failures for entry in bucket.live.values())

    def latest(self, num: int) -> list[Contact]:
        """Return the ``num`` contacts that were seen last, the latest first."""
        entries = (entry for bucket in self._buckets.values() for entry in bucket.live.values())
        return [entry.contact for entry in sorted(entries, key=_heard_at, reverse=True)[:num]]

    def num_in_bucket(self, index: int) -> int:
        """Return the number of contacts whose highest bit that differs from this node is ``index``, from 1."""
        bucket = self._buckets.get(index)
        return len(bucket.live) if bucket is not None else 0

    def contacts(self) -> list[Contact]:
        """Return all contacts, the nearest buckets first."""
        return [entry.contact for index in self._indexes for entry in self._buckets[index].live.values()]

    def seen(self, contact: Contact, now: float = 0.0, network: str = "") -> None:
        """Note that a peer just answered or called; its addresses and network replace the old ones."""
        point = node_id(contact.peer_id)
        index = (point ^ self._own_point).bit_length()
        if not index:
            return
        bucket = self._buckets.get(index)
        if bucket is None:
            bucket = self._buckets[index] = _Bucket({}, {})
            bisect.insort(self._indexes, index)
        entry = bucket.live.pop(point, None)
        if entry is not None:
            self._set_silent(entry, False)
            if entry.contact != contact:
                entry.contact = contact
            if entry.network != network:
                self._count(entry, -1)
                entry.network = network
                self._count(entry, 1)
                self.num_changes += 1  # the holders of a key may change
            entry.heard_at = now
            entry.num_failures = 0
            bucket.live[point] = entry
            return
        bucket.waiting.pop(point, None)
        if len(bucket.live) >= self._k:
            self._drop_one_that_failed(bucket)
        if len(bucket.live) < self._k:
            self._enter(bucket, point, _Entry(contact, now, network))
            return
        bucket.waiting[point] = _Entry(contact, now, network)
        if len(bucket.waiting) > self._k:
            del bucket.waiting[next(iter(bucket.waiting))]

    def lost(self, peer_id: PeerId) -> None:
        """Note that the connection to a peer has ended; the peer may be gone, or the connection was idle."""
        entry = self._live_entry(peer_id)
        if entry is not None:
            self._set_silent(entry, True)

    def failed(self, peer_id: PeerId) -> None:
        """Note that a peer did not answer."""
        point = node_id(peer_id)
        bucket = self._buckets.get((point ^ self._own_point).bit_length())
        if bucket is None:
            return
        bucket.waiting.pop(point, None)
        entry = bucket.live.get(point)
        if entry is None:
            return
        entry.num_failures += 1
        if entry.num_failures >= self._max_failures:
            self.drop(peer_id)

    def drop(self, peer_id: PeerId) -> None:
        """Remove a peer; the newest replacement moves up."""
        point = node_id(peer_id)
        bucket = self._buckets.get((point ^ self._own_point).bit_length())
        if bucket is not None and point in bucket.live:
            self._drop(bucket, point)
            if bucket.waiting:
                self._enter(bucket, *bucket.waiting.popitem())

    def holders(
        self,
        target: int,
        num: int,
        own_network: str | None,
        *,
        with_silent: bool = True,
    ) -> list[PeerId]:
        """Return the peers that should hold the records of a key, as far as this node knows, nearest first.

        Args:
            target: the point of the key.
            own_network: the network of this node; None if it is a client and holds nothing.
            with_silent: include silent contacts.
        """
        own = [] if own_network is None else [_Entry(Contact(self._own_id, []), math.inf, own_network)]
        entries = (entry for entry in self._nearest_first(target, own) if with_silent or not entry.is_silent)
        num_networks = len(self._num_in_network)
        if own_network is not None and own_network not in self._num_in_network:
            num_networks += 1
        nearest = spread(entries, num, _network) if num_networks > 1 else itertools.islice(entries, num)
        return [entry.contact.peer_id for entry in nearest]

    def nearest_spread(self, target: int, num: int) -> list[Contact]:
        """Return the nearest contacts that have not failed, limited per network as long as there are others.

        The order is arbitrary, except that the last of ``num`` is the farthest.
        """
        if len(self._num_in_network) <= 1:
            return self.nearest(target, num, in_order=False)
        entries = (entry for entry in self._nearest_first(target, []) if not entry.num_failures)
        return [entry.contact for entry in spread(entries, num, _network)]

    def nearest(self, target: int, num: int, *, with_failed: bool = False, in_order: bool = True) -> list[Contact]:
        """Return the ``num`` contacts nearest to a point, nearest first.

        Args:
            with_failed: include contacts that failed since they were seen.
            in_order: False allows any order, except that the last of ``num`` is the farthest.
        """
        own_distance = distance(self._own_point, target)
        nearest: list[Contact] = []
        for index in self._from_nearest_on(own_distance):
            live = self._buckets[index].live
            if in_order or len(nearest) + len(live) >= num:
                entries: Iterable[_Entry] = [live[point] for point in sorted(live, key=target.__xor__)]
            else:
                entries = live.values()
            nearest += [entry.contact for entry in entries if with_failed or not entry.num_failures]
            if len(nearest) >= num:
                break
        return nearest[:num]

    def _from_nearest_on(self, own_distance: int) -> Iterator[int]:
        """Yield the buckets in the order of their contacts' distance to a point.

        Contacts of a bucket differ from this node in its bit, and in no higher one. If the point differs in that bit
        too, they are nearer to it than this node, the nearer the higher the bit; if not, they are farther, the farther
        the higher the bit.
        """
        for index in reversed(self._indexes):
            if own_distance >> (index - 1) & 1:
                yield index
        for index in self._indexes:
            if not own_distance >> (index - 1) & 1:
                yield index

    def _nearest_first(self, target: int, own: Sequence[_Entry]) -> Iterator[_Entry]:
        """Yield all contacts, and this node's own entry if given, in the order of their distance to a point."""
        own_distance = distance(self._own_point, target)
        has_own = not own
        for index in self._from_nearest_on(own_distance):
            if not has_own and not own_distance >> (index - 1) & 1:  # the rest is farther than this node
                has_own = True
                yield from own
            live = self._buckets[index].live
            for point in sorted(live, key=target.__xor__):
                yield live[point]
        if not has_own:
            yield from own

    def least_recently_seen(self) -> list[Contact]:
        """Return the first contact of each bucket, the likeliest to be gone."""
        live = (self._buckets[index].live for index in self._indexes)
        return [next(iter(entries.values())).contact for entries in live if entries]

    def _entry(self, peer_id: PeerId) -> _Entry | None:
        point = node_id(peer_id)
        bucket = self._buckets.get((point ^ self._own_point).bit_length())
        return (bucket.live.get(point) or bucket.waiting.get(point)) if bucket is not None else None

    def _live_entry(self, peer_id: PeerId) -> _Entry | None:
        point = node_id(peer_id)
        bucket = self._buckets.get((point ^ self._own_point).bit_length())
        return bucket.live.get(point) if bucket is not None else None

    def _enter(self, bucket: _Bucket, point: int, entry: _Entry) -> None:
        bucket.live[point] = entry
        self._count(entry, 1)
        self._num_live += 1
        self.num_changes += 1

    def _drop(self, bucket: _Bucket, point: int) -> None:
        self._count(bucket.live.pop(point), -1)
        self._num_live -= 1
        self.num_changes += 1

    def _count(self, entry: _Entry, sign: int) -> None:
        self._num_in_network[entry.network] += sign
        if not self._num_in_network[entry.network]:
            del self._num_in_network[entry.network]

    def _drop_one_that_failed(self, bucket: _Bucket) -> None:
        """Drop the failed contact that was not seen for longest, if there is one."""
        for point, entry in bucket.live.items():
            if entry.num_failures:
                self._drop(bucket, point)
                return

    def _set_silent(self, entry: _Entry, is_silent: bool) -> None:
        if entry.is_silent != is_silent:
            entry.is_silent = is_silent
            self.num_silences += 1
