"""Asks peers for neighbours of this node that it does not know."""

from __future__ import annotations

from collections.abc import Iterable

from manyhands.base.identity import PeerId
from manyhands.dht.ids import ID_BITS, distance, id_to_bytes, node_id
from manyhands.dht.messages import FIND, FindRequest
from manyhands.dht.overlay import Overlay
from manyhands.dht.routing import Contact
from manyhands.runtime.concurrently import gathered


async def unknown_neighbours(overlay: Overlay, own_id: PeerId, k: int, peers: Iterable[PeerId]) -> list[Contact]:
    """Ask peers for the neighbours of this node, and return those that belong to its ``k`` nearest but are unknown.

    One message to each peer replaces a lookup, which takes ``k``: peers of the same part of a swarm know the same
    neighbours, and peers of another part know others.
    """
    own_point = node_id(own_id)
    request = FindRequest(id_to_bytes(own_point))
    answers = await gathered(*(overlay.ask(peer_id, FIND, request) for peer_id in peers))
    nearest = overlay.table.nearest(own_point, k)
    farthest = distance(node_id(nearest[-1].peer_id), own_point) if len(nearest) >= k else 1 << ID_BITS
    named = {contact.peer_id: contact for answer in answers if answer is not None for contact in answer.contacts}
    return [
        contact
        for peer_id, contact in named.items()
        if peer_id != own_id and peer_id not in overlay.table and distance(node_id(peer_id), own_point) < farthest
    ]
