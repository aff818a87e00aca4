"""All-reduce of hivemind: one `hivemind.DHT`, and a `DecentralizedAverager` with default options for each codec."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence

import hivemind
import torch
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.compression import Float16Compression, NoCompression

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
TIMEOUT_S = 300.0
POLL_S = 0.005
CODECS = {"none": NoCompression, "fp16": Float16Compression}


class System:
    """One peer; see `allreduce.py`."""

    def __init__(self, rank: int, num_peers: int, numel: int, codecs: Sequence[str], folder: str) -> None:
        multiprocessing.set_start_method("fork", force=True)  # as in a separate program; averagers cannot be pickled
        self._num_peers = num_peers
        self._numel = numel
        self._codecs = codecs
        self._averagers: dict[str, hivemind.DecentralizedAverager] = {}
        self._steps: dict[str, StepControl] = {}
        self._dht = hivemind.DHT(host_maddrs=[LOOPBACK], start=True) if rank == 0 else None

    def contact(self) -> list[str]:
        return [str(address) for address in self._dht.get_visible_maddrs()] if self._dht is not None else []

    def join(self, contacts: list[list[str]]) -> None:
        if self._dht is None:
            self._dht = hivemind.DHT(initial_peers=contacts[0], host_maddrs=[LOOPBACK], start=True)
        for codec in self._codecs:
            self._averagers[codec] = hivemind.DecentralizedAverager(
                [torch.zeros(self._numel)],
                self._dht,
                prefix=f"benchmark_{codec}",
                target_group_size=self._num_peers,
                min_group_size=self._num_peers,
                compression=CODECS[codec](),
                start=True,
            )

    def fill(self, codec: str, base_N: torch.Tensor, factor: float) -> None:
        with self._averagers[codec].get_tensors() as (vector_N,):
            torch.mul(base_N, factor, out=vector_N)

    def form(self, codec: str) -> float:
        """Find the group, without averaging."""
        started = time.perf_counter()
        step = self._averagers[codec].step(require_trigger=True, wait=False, timeout=TIMEOUT_S)
        while step.stage != AveragingStage.AWAITING_TRIGGER:
            if step.done() or time.perf_counter() - started > TIMEOUT_S:
                raise RuntimeError(f"no group was found: {step.exception() if step.done() else 'time is over'}")
            time.sleep(POLL_S)
        self._steps[codec] = step
        return time.perf_counter() - started

    def reduce(self, codec: str) -> tuple[float, float]:
        step = self._steps.pop(codec)
        started = time.perf_counter()
        step.allow_allreduce()
        members = step.result(TIMEOUT_S)
        seconds = time.perf_counter() - started
        if members is None or len(members) != self._num_peers:
            raise RuntimeError(f"a group of {members}")
        return seconds, 0.0

    def result(self, codec: str) -> torch.Tensor:
        vector_N: torch.Tensor
        with self._averagers[codec].get_tensors() as (vector_N,):
            return vector_N

    def close(self) -> None:
        for averager in self._averagers.values():
            averager.shutdown()
        if self._dht is not None:
            self._dht.shutdown()
