"""Where other peers can be dialled, as far as this one knows; the best address first."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Sequence

from manyhands.base.address import Address
from manyhands.base.identity import PeerId

MAX_ADDRESSES_PER_PEER = 8


class Source(enum.IntEnum):
    """How an address was learnt: a better source is dialled first, and never pushed out by a worse one."""

    HEARSAY = 0
    ANNOUNCED = 1
    """By the peer itself, over a connection of its own."""
    WORKED = 2
    """The peer was reached there."""


class AddressBook:
    """Addresses by peer.

    Args:
        max_peers: whose addresses are remembered; the least recently learnt is forgotten first.
    """

    def __init__(self, max_peers: int) -> None:
        self._max_peers = max_peers
        self._known: OrderedDict[PeerId, dict[Address, Source]] = OrderedDict()

    def learn(self, peer_id: PeerId, addresses: Sequence[Address], source: Source) -> bool:
        """Remember addresses, the newest before older ones of the same source; whether any of them is new."""
        if not addresses:
            return False
        before = self._known.get(peer_id, {})
        learnt = {address.with_peer(peer_id): source for address in addresses}
        merged = {address: max(learnt[address], before.get(address, source)) for address in learnt}
        merged |= {address: known for address, known in before.items() if address not in merged}
        best_first = sorted(merged.items(), key=lambda entry: -entry[1])
        self._known[peer_id] = dict(best_first[:MAX_ADDRESSES_PER_PEER])
        self._known.move_to_end(peer_id)
        if len(self._known) > self._max_peers:
            self._known.popitem(last=False)
        return any(address not in before for address in self._known[peer_id])

    def addresses_of(self, peer_id: PeerId) -> list[Address]:
        """The best first; none if the peer is not known."""
        return list(self._known.get(peer_id, {}))
