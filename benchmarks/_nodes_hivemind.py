"""DHT nodes of hivemind, as in real use: ``hivemind.DHT``, with a process and a p2pd daemon for each."""

from __future__ import annotations

import contextlib
from typing import Any

import hivemind
from hivemind.utils import get_dht_time

HOST_MADDRS = ["/ip4/127.0.0.1/tcp/0"]


class Nodes:
    """One or several nodes; see :class:`_nodes_manyhands.Nodes`."""

    def __init__(self, num: int, initial_peers: list[str]) -> None:
        self._nodes: list[hivemind.DHT] = []
        for _ in range(num):
            self._nodes.append(hivemind.DHT(initial_peers=initial_peers, host_maddrs=HOST_MADDRS, start=True))
            initial_peers = initial_peers or self.addresses()

    def addresses(self) -> list[str]:
        return [str(address) for address in self._nodes[0].get_visible_maddrs()]

    def store(self, index: int, key: str, value: Any, ttl_s: float) -> bool:
        return bool(self._nodes[index].store(key, value, get_dht_time() + ttl_s))

    def get(self, index: int, key: str, is_first: bool) -> Any:
        found = self._nodes[index].get(key, latest=not is_first)
        return found.value if found is not None else None

    def close(self) -> None:
        for node in reversed(self._nodes):
            with contextlib.suppress(Exception):
                node.shutdown()
