"""Tests whether one peer of a DHT can find another."""

from __future__ import annotations

from manyhands.base.identity import PeerId
from manyhands.dht.config import DhtConfig
from manyhands.dht.ids import node_id
from manyhands.dht.overlay import Overlay
from manyhands.rpc.endpoint import Endpoint


async def can_find(endpoint: Endpoint, config: DhtConfig, start: PeerId, wanted: PeerId, timeout_s: float) -> bool:
    """Whether a lookup that begins at one peer, and knows no other, finds another one.

    The routing tables cannot tell: in a large swarm two peers need not be in each other's, and an entry may be of a
    peer that has left.

    Args:
        endpoint: in client mode, so that the test itself does not introduce the two peers; connected to both.
    """
    overlay = Overlay(endpoint, config)
    try:
        overlay.seen(start)
        nearest = await overlay.lookup(node_id(wanted), timeout_s, config.replicas)
    finally:
        await overlay.close()
    return any(contact.peer_id == wanted for contact in nearest)
