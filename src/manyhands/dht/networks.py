"""Limits how many holders of a key are in one network, as addresses of one network cost their owner little.

Rules:
    * a network is a /24 of IPv4 or a /48 of IPv6;
    * at most ``MAX_PER_NETWORK`` holders of a key are in one network, namely its nearest peers;
    * if there are too few networks, the nearest of the rest fill the places: in a swarm within one network the holders
      are simply the nearest.
"""

from __future__ import annotations

import functools
import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from manyhands.base.address import ip_of

T = TypeVar("T")

MAX_PER_NETWORK = 2
"""The most holders of a key in one network, if there are enough networks. A key has five holders, so no
network has a majority of them."""


@functools.lru_cache(maxsize=16384)
def network_of(host: str) -> str:
    """Return the network of an IP address, or a host name unchanged."""
    try:
        address = ip_of(host)
    except ValueError:
        return host
    return str(ipaddress.ip_network((address, 24 if address.version == 4 else 48), strict=False))


def spread(nearest_first: Iterable[T], num: int, network: Callable[[T], str]) -> list[T]:
    """Choose the ``num`` nearest, at most ``MAX_PER_NETWORK`` of one network unless there are too few others.

    Args:
        network: returns the network of an item.
    """
    num_in_network: Counter[str] = Counter()
    chosen: list[tuple[int, T]] = []
    crowded: list[tuple[int, T]] = []
    for rank, one in enumerate(nearest_first):
        where = network(one)
        num_in_network[where] += 1
        if num_in_network[where] <= MAX_PER_NETWORK:
            chosen.append((rank, one))
            if len(chosen) == num:
                break
        elif len(crowded) < num:
            crowded.append((rank, one))
    chosen += crowded[: num - len(chosen)]
    return [one for _, one in sorted(chosen, key=lambda ranked: ranked[0])]
