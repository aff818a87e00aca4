"""Networks: addresses of one cost their owner little, so few of a key's holders may be in the same one.

Rules:
    * a network is a /24 of IPv4 or a /48 of IPv6;
    * at most ``MAX_PER_NETWORK`` holders of a key are in one network, the nearest of it;
    * if there are not enough networks, the nearest of the rest fill the places: in a swarm in one network the holders
      are simply the nearest.
"""

from __future__ import annotations

import functools
import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

MAX_PER_NETWORK = 2
"""Of five holders; so the holders in one network are never a majority."""


@functools.lru_cache(maxsize=16384)
def network_of(host: str) -> str:
    """The network of an IP address; of a host name, the name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(ipaddress.ip_network((address, 24 if address.version == 4 else 48), strict=False))


def spread(nearest_first: Iterable[T], num: int, network: Callable[[T], str]) -> list[T]:
    """Choose ``num``, nearest first: at most ``MAX_PER_NETWORK`` of one network, as long as there are others.

    Args:
        network: the network of one of them.
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
