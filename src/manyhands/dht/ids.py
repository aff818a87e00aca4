"""Peers and keys as points of a 256-bit space with the XOR metric.

Source: Maymounkov & Mazieres, Kademlia, 2002, section 2.1.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

from manyhands.base.identity import PeerId

ID_BITS = 256
ID_BYTES = ID_BITS // 8
MAX_POINTS = 65536  # in the cache; about 20 MB


class _Points(dict[PeerId, int]):
    """A cache of points; each access is atomic, so threads may share it.

    ``lru_cache`` writes its list of uses on each hit, which causes cache misses in the processor with many ids.
    """

    def __missing__(self, peer_id: PeerId) -> int:
        if len(self) >= MAX_POINTS:
            self.clear()
        point = self[peer_id] = _point_of(peer_id)
        return point


node_id: Callable[[PeerId], int] = _Points().__getitem__
"""The point of a peer: SHA-256 of its peer id, so that a peer can choose its point only by trying many keys."""


@functools.lru_cache(maxsize=4096)
def key_id(key: str) -> int:
    """Return the point of a key: SHA-256 of its text. The peers nearest to it hold its records."""
    return _point_of(key)


def distance(a: int, b: int) -> int:
    """Return the distance of two points; symmetric, and exactly one ``b`` has a given distance from ``a``."""
    return a ^ b


def id_to_bytes(point: int) -> bytes:
    """Encode a point for the wire: 32 bytes, big-endian."""
    return point.to_bytes(ID_BYTES, "big")


def id_from_bytes(raw: bytes) -> int:
    """The inverse of :func:`id_to_bytes`."""
    return int.from_bytes(raw, "big")


def _point_of(text: str) -> int:
    return id_from_bytes(hashlib.sha256(text.encode()).digest())
