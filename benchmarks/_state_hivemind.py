"""Handing out a state with hivemind: a `DecentralizedAverager` with default options on each side."""

from __future__ import annotations

import multiprocessing

import hivemind
import torch

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
TIMEOUT_S = 300.0


class _Side:
    def __init__(self, tensors: list[torch.Tensor], contacts: list[str], *, shares: bool) -> None:
        multiprocessing.set_start_method("fork", force=True)  # as in a separate program; averagers cannot be pickled
        self._dht = hivemind.DHT(initial_peers=contacts, host_maddrs=[LOOPBACK], start=True)
        self._averager = hivemind.DecentralizedAverager(
            tensors, self._dht, prefix="state", target_group_size=2, allow_state_sharing=shares, start=True
        )

    def close(self) -> None:
        self._averager.shutdown()
        self._dht.shutdown()


class Donor(_Side):
    """A peer that shares its state."""

    def __init__(self, tensors: list[torch.Tensor], contacts: list[str]) -> None:
        super().__init__(tensors, contacts, shares=True)

    def contacts(self) -> list[str]:
        return [str(address) for address in self._dht.get_visible_maddrs()]


class Newcomer(_Side):
    """A peer that downloads the state again and again."""

    def __init__(self, tensors: list[torch.Tensor], contacts: list[str]) -> None:
        super().__init__(tensors, contacts, shares=False)

    def load(self) -> list[torch.Tensor]:
        loaded = self._averager.load_state_from_peers(timeout=TIMEOUT_S)
        if loaded is None:
            raise RuntimeError("no state was downloaded")
        return list(loaded[1])
