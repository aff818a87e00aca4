"""A peer that trains a small model, and notes when its samples counted, with whom (benchmarks/reach.py)."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import torch
from _relay import RelayTunnel
from _star import enter
from _worker import Worker

import manyhands
from manyhands.rpc import RpcConfig
from manyhands.tunnels import TunnelKeeper

ADVISERS = ("manyhands.reach", "manyhands.tunnels", "manyhands.peer", "manyhands.rpc")
RELAY_MBIT_S = 10_000.0
BATCH_S, SAMPLES = 0.1, 4
TARGET = 60
WIDTH = 256
JOIN_S = 90.0


class Trainer:
    """A peer that trains, in its own process and namespace."""

    def __init__(self, namespace: str) -> None:
        enter(namespace)
        torch.set_num_threads(1)
        self._advice: list[str] = []
        logging.getLogger("manyhands").addHandler(_Notes(self._advice))
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._peer: manyhands.Peer | None = None
        self._seen: dict[str, Any] = {
            "num_peers": 0, "step": None, "first_s": None, "last_at": None, "aborted": 0, "error": "",
            "first_with": {},
        }  # fmt: skip
        self._began_at = 0.0
        self._tunnel: RelayTunnel | None = None

    def ready(self) -> None:
        """Return once everything is imported."""

    def start(
        self, initial_peers: list[str], port: int, relay: str | None, relays: bool = False, is_first: bool = False
    ) -> list[str]:
        """Join and begin to train, with ``is_first`` a new run; returns its addresses."""
        began = self._began_at = time.perf_counter()
        self._tunnel = RelayTunnel(relay) if relay is not None else None
        before_joining = TunnelKeeper(self._tunnel).start if self._tunnel is not None else None
        self._peer = manyhands.Peer(
            initial_peers, listen=[str(port)], before_joining=before_joining,
            rpc_config=RpcConfig(relay_mbit_s=RELAY_MBIT_S if relays else None),
        )  # fmt: skip
        self._seen["peer_s"] = time.perf_counter() - began
        self._thread = threading.Thread(
            target=self._train, args=(self._peer, is_first or not initial_peers), daemon=True
        )
        self._thread.start()
        return self._peer.addresses

    def _train(self, peer: manyhands.Peer, is_first: bool) -> None:
        try:
            self._train_on(peer, is_first)
        except Exception as error:  # noqa: BLE001 (it is in the report)
            self._seen["error"] = f"{type(error).__name__}: {error}"

    def _train_on(self, peer: manyhands.Peer, is_first: bool) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
        began, seen = time.perf_counter(), self._seen
        optimizer = manyhands.Optimizer(
            torch.optim.AdamW(model.parameters(), lr=1e-3), peer=peer, run_id="reach", target_batch_size=TARGET,
            batch_size_per_step=SAMPLES, start_new=is_first,
        )  # fmt: skip
        step = seen["step"] = optimizer.global_step
        while not self._is_over.is_set():
            time.sleep(BATCH_S)
            model(torch.randn(SAMPLES, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            now, counts = time.perf_counter(), optimizer.statistics
            seen["num_peers"] = max(seen["num_peers"], optimizer.num_peers)
            seen["aborted"], seen["step"] = counts.rounds_aborted, optimizer.global_step
            if optimizer.global_step != step and optimizer.last_round is not None and optimizer.last_contribution:
                seen["last_at"] = now
                if seen["first_s"] is None:
                    seen["first_s"] = now - began
                for other in optimizer.last_round.contributors():
                    seen["first_with"].setdefault(str(other), now - self._began_at)
            step = optimizer.global_step

    def report(self) -> dict[str, Any]:
        """What it has seen; ``first_with`` is when its samples first counted in a round with each peer."""
        assert self._peer is not None
        last_at = self._seen["last_at"]
        return {
            **self._seen,
            "peer_id": str(self._peer.peer_id),
            "since_last_s": time.perf_counter() - last_at if last_at is not None else None,
            "mode": "client" if self._peer.endpoint.client_mode else "ordinary",
            "advice": list(dict.fromkeys(self._advice)),
            "drops": self._tunnel.num_dropped if self._tunnel is not None else 0,
        }

    def close(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(2.0)
        if self._peer is not None:
            self._peer.close()


class _Notes(logging.Handler):
    """Keeps the warnings about how a peer is connected."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(ADVISERS):
            self._lines.append(record.getMessage())


def wait_for(workers: list[Worker], name: str) -> None:
    """Wait until each has this in its report."""
    deadline = time.monotonic() + JOIN_S
    while True:
        reports = [worker.call("report") for worker in workers]
        if all(report[name] is not None for report in reports):
            return
        if time.monotonic() > deadline or any(report["error"] for report in reports):
            raise RuntimeError(f"the ordinary peers do not train: {reports}")
        time.sleep(0.2)
