"""Where peers and keys lie: points of one 256-bit space, and the XOR distance between them.

Source: Maymounkov & Mazieres, Kademlia, 2002, section 2.1.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable

from manyhands.base.identity import PeerId

ID_BITS = 256
ID_BYTES = ID_BITS // 8
DIGEST_BYTES = 8
MAX_POINTS = 65536  # remembered; about 20 MB


class _Points(dict[PeerId, int]):
    """Remembered points; each access is atomic, so threads may share it.

    ``lru_cache`` would write its list of uses at each hit, which misses the processor's caches when there are many ids.
    """

    def __missing__(self, peer_id: PeerId) -> int:
        if len(self) >= MAX_POINTS:
            self.clear()
        point = self[peer_id] = _point_of(peer_id)
        return point


node_id: Callable[[PeerId], int] = _Points().__getitem__
"""The point of a peer: SHA-256 of its peer id, so that nobody chooses where it lies without searching for a key."""


@functools.lru_cache(maxsize=4096)
def key_id(key: str) -> int:
    """The point of a key: SHA-256 of its text; the peers nearest to it hold its records."""
    return _point_of(key)


def distance(a: int, b: int) -> int:
    """How far two points are from each other; symmetric, and at each distance from ``a`` lies one ``b`` only."""
    return a ^ b


def digest_of_distances(distances: Iterable[int]) -> bytes:
    """Tells whether two peers mean the same set of others around one point, whatever the order; 8 bytes.

    It is their exclusive or, which costs next to nothing. Whoever found other peers with the same one would only keep
    what it knows to itself, and it can do that anyway.
    """
    mixed = 0
    for one in distances:
        mixed ^= one
    return id_to_bytes(mixed)[:DIGEST_BYTES]


def id_to_bytes(point: int) -> bytes:
    """A point as it travels: 32 bytes, big-endian."""
    return point.to_bytes(ID_BYTES, "big")


def id_from_bytes(raw: bytes) -> int:
    """The inverse of :func:`id_to_bytes`."""
    return int.from_bytes(raw, "big")


def _point_of(text: str) -> int:
    return id_from_bytes(hashlib.sha256(text.encode()).digest())
