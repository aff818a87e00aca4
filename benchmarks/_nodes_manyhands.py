"""DHT nodes of manyhands, as in real use: each a peer, with its network thread, sockets and TLS."""

from __future__ import annotations

import contextlib
from typing import Any

from manyhands import Peer
from manyhands.base.errors import ManyhandsError

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
OPERATION_TIMEOUT_S = 30.0


class Nodes:
    """One or several peers in this process.

    Args:
        num: number of peers.
        initial_peers: addresses of others.
    """

    def __init__(self, num: int, initial_peers: list[str]) -> None:
        self._peers: list[Peer] = []
        for _ in range(num):
            self._peers.append(Peer(initial_peers, listen=LISTEN))
            initial_peers = initial_peers or self.addresses()

    def addresses(self) -> list[str]:
        """Addresses of the first of them."""
        return self._peers[0].addresses

    def store(self, index: int, key: str, value: Any, ttl_s: float) -> bool:
        """Store a value; returns whether a peer holds it now."""
        peer = self._peers[index]
        with contextlib.suppress(ManyhandsError):
            return peer.run(peer.dht.store(key, value, ttl_s), OPERATION_TIMEOUT_S, "storing") > 0
        return False

    def get(self, index: int, key: str, is_first: bool) -> Any:
        """The latest value, whatever ``is_first`` says, or None."""
        peer = self._peers[index]
        with contextlib.suppress(ManyhandsError):
            found = peer.run(peer.dht.get(key), OPERATION_TIMEOUT_S, "reading")
            return found[""].value if "" in found else None
        return None

    def close(self) -> None:
        for peer in reversed(self._peers):
            peer.close()
