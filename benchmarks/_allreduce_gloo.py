"""All-reduce of gloo through torch.distributed: not encrypted, and a lost member ends it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import distributed

TIMEOUT = timedelta(seconds=300)


class System:
    """One peer; see `allreduce.py`."""

    def __init__(self, rank: int, num_peers: int, numel: int, codecs: Sequence[str], folder: str) -> None:
        assert list(codecs) == ["none"]
        self._rank = rank
        self._num_peers = num_peers
        self._folder = folder
        self._vector_N = torch.zeros(numel)
        if "lo" in (name for _, name in socket.if_nameindex()):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    def contact(self) -> list[str]:
        return []

    def join(self, contacts: list[list[str]]) -> None:
        where = f"file://{self._folder}/gloo"
        distributed.init_process_group("gloo", where, TIMEOUT, self._num_peers, self._rank)

    def fill(self, codec: str, base_N: torch.Tensor, factor: float) -> None:
        torch.mul(base_N, factor, out=self._vector_N)

    def form(self, codec: str) -> float:
        distributed.barrier()
        return 0.0  # gloo has no formation

    def reduce(self, codec: str) -> tuple[float, float]:
        started = time.perf_counter()
        distributed.all_reduce(self._vector_N)
        self._vector_N.div_(self._num_peers)
        return time.perf_counter() - started, 0.0

    def result(self, codec: str) -> torch.Tensor:
        return self._vector_N

    def close(self) -> None:
        if distributed.is_initialized():
            distributed.destroy_process_group()
