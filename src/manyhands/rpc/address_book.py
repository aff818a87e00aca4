"""The known addresses of other peers, the best first."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Sequence

from manyhands.base.address import MAX_ADDRESSES, Address
from manyhands.base.errors import Unavailable
from manyhands.base.identity import PeerId

MAX_WORKED_PER_PEER = 4
"""Addresses that worked, per peer; leaves room for the current addresses of a peer that moves often."""


class AddressSource(enum.IntEnum):
    """How an address was learned: a better source is dialled first and never displaced by a worse one."""

    HEARSAY = 0
    """Another peer named the address."""
    ANNOUNCED = 1
    """The peer itself announced the address, over its own connection."""
    WORKED = 2
    """This peer has reached the other one at the address."""


class AddressBook:
    """Addresses by peer.

    Args:
        max_peers: peers whose addresses are kept. Above that, one known only by hearsay is dropped first, of several
            the least recently learned.
    """

    def __init__(self, max_peers: int) -> None:
        self._max_peers = max_peers
        self._known: dict[PeerId, dict[Address, AddressSource]] = {}
        self._announced: dict[PeerId, list[Address]] = {}
        self._seen_at: dict[PeerId, str] = {}  # the host that a peer announced from
        self._by_best_source: dict[AddressSource, OrderedDict[PeerId, None]] = {
            source: OrderedDict() for source in AddressSource
        }

    def learn(self, peer_id: PeerId, addresses: Sequence[Address], source: AddressSource) -> bool:
        """Add addresses, before older ones of the same source; return whether any of them is new."""
        if not addresses:
            return False
        before = self._known.get(peer_id, {})
        learnt = {address.with_peer(peer_id): source for address in addresses}
        if list(learnt) == list(before) and min(before.values()) >= source:  # usual for hearsay
            self._by_best_source[max(before.values())].move_to_end(peer_id)
            return False
        merged = {address: max(learnt[address], before.get(address, source)) for address in learnt}
        merged |= {address: known for address, known in before.items() if address not in merged}
        worked = [address for address, known in merged.items() if known is AddressSource.WORKED]
        merged |= dict.fromkeys(worked[MAX_WORKED_PER_PEER:], AddressSource.HEARSAY)
        self._enter(peer_id, merged)
        if len(self._known) > self._max_peers:
            self._forget_one()
        return any(address not in before for address in self._known.get(peer_id, {}))

    def announced(self, peer_id: PeerId, addresses: Sequence[Address], host: str = "") -> None:
        """Add the addresses that a peer announced itself; only these are passed on to others.

        Args:
            host: the IP address of the peer's connection; empty if unknown.
        """
        self.learn(peer_id, addresses, AddressSource.ANNOUNCED)
        if peer_id in self._known:
            self._announced[peer_id] = [address.with_peer(peer_id) for address in addresses]
            self._seen_at[peer_id] = host

    def addresses_to_tell(self, peer_id: PeerId) -> list[Address]:
        """Return the addresses to pass on to others: those that the peer announced, else those known by hearsay.

        Loopback addresses are included only if there are no others, which work on the same machine too.
        """
        known = self._known.get(peer_id, {})
        hearsay = [address for address, source in known.items() if source is AddressSource.HEARSAY]
        told = self._announced.get(peer_id) or hearsay
        return [address for address in told if not address.is_loopback] or told

    def failed(self, peer_id: PeerId) -> None:
        """Note that no address of a peer answered: those that worked before now count as hearsay."""
        if peer_id in self._known:
            self._enter(peer_id, dict.fromkeys(self._known[peer_id], AddressSource.HEARSAY))

    def addresses_of(self, peer_id: PeerId) -> list[Address]:
        """Return the addresses of a peer, the best first; empty if it is unknown."""
        return list(self._known.get(peer_id, {}))

    def check_known(self, peer_id: PeerId) -> None:
        """Raise ``Unavailable`` if no address of a peer is known."""
        if not self._known.get(peer_id):
            raise Unavailable(f"no address is known for peer {peer_id}; a peer in client mode cannot be dialled")

    def reached_at(self, peer_id: PeerId) -> list[Address]:
        """Return the addresses at which a peer was reached, the latest first."""
        known = self._known.get(peer_id, {})
        return [address for address, source in known.items() if source is AddressSource.WORKED]

    def heard(self, peer_id: PeerId) -> dict[Address, str]:
        """Return the addresses at which a peer was not reached.

        Each has the host that the peer announced it from; empty if the peer did not announce it.
        """
        announced = self._announced.get(peer_id, [])
        host = self._seen_at.get(peer_id, "")
        known = self._known.get(peer_id, {}).items()
        heard: dict[Address, str] = {}
        for address, source in known:
            if source is not AddressSource.WORKED:
                heard[address] = host if address in announced else ""
        return heard

    def is_reached(self, peer_id: PeerId) -> bool:
        """Whether an address of a peer worked the last time."""
        return peer_id in self._by_best_source[AddressSource.WORKED]

    def _enter(self, peer_id: PeerId, addresses: dict[Address, AddressSource]) -> None:
        best_first = sorted(addresses.items(), key=lambda entry: -entry[1])
        self._known[peer_id] = dict(best_first[:MAX_ADDRESSES])
        for peers in self._by_best_source.values():
            peers.pop(peer_id, None)
        self._by_best_source[best_first[0][1]][peer_id] = None

    def _forget_one(self) -> None:
        for source in sorted(AddressSource):
            if peers := self._by_best_source[source]:
                peer_id, _ = peers.popitem(last=False)
                del self._known[peer_id]
                self._announced.pop(peer_id, None)
                self._seen_at.pop(peer_id, None)
                return
