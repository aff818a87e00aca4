"""Resources of an idle coordinator: ``manyhands first-peer`` with peers that have joined and stay.

    python benchmarks/coordinator.py --peers 100 --seconds 60 [--json FILE]

The coordinator is the command itself, in a separate process. The peers are real, except that they do not train: each
has an identity, a port, TLS connections over loopback and a DHT node. They share a few processes to save resources,
which the coordinator cannot tell. They join one by one. The measurement starts when all have joined and the settling
time is over: only upkeep runs, without reads or writes.

The figures:

  peers, peers_per_process
  seconds          measured, after settling
  cpu_percent      of one core, of the coordinator's process, user and system
  cpu_ms_per_s_of_peer   mean CPU time of one of the other peers in a second, for comparison
  rss_mb           of the coordinator at the end, in 10^6 bytes
  known_peers, connected_peers   as the coordinator sees them at the end
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
from _command_line import Parser, json_path, positive, positive_int, progress_of, run, write_json
from _worker import Worker

from manyhands.base.address import Address, parse_addresses
from manyhands.base.identity import Identity
from manyhands.peer import Presence
from manyhands.runtime import LoopThread
from manyhands.transport import TlsTransport

LISTEN = "/ip4/127.0.0.1/tcp/0"
PATIENCE_S = 30.0
MB = 1e6


class Crowd:
    """Peers in one process, on one event loop."""

    def __init__(self, initial_peers: list[str]) -> None:
        self._initial_peers = parse_addresses(initial_peers)
        self._runtime = LoopThread("manyhands crowd")
        self._presences: list[Presence] = []

    def join(self, num_peers: int) -> None:
        """Let ``num_peers`` more peers join."""
        self._runtime.run(self._join(num_peers), PATIENCE_S + num_peers, "joining")

    async def _join(self, num_peers: int) -> None:
        for _ in range(num_peers):
            presence = Presence(TlsTransport(Identity.generate()), rng=random.Random())
            self._presences.append(presence)
            await presence.start(self._initial_peers, [Address.parse(LISTEN)])

    def cpu_s(self) -> float:
        """CPU seconds of this process so far."""
        return time.process_time()

    def close(self) -> None:
        self._runtime.run(self._stop(), PATIENCE_S, "closing")
        self._runtime.close()

    async def _stop(self) -> None:
        await asyncio.gather(*(presence.stop() for presence in self._presences))


class Coordinator:
    """A running ``manyhands first-peer``."""

    def __init__(self, folder: Path) -> None:
        self._events = folder / "events.jsonl"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "manyhands", "first-peer", "--listen", LISTEN, "--events", str(self._events),
             "--leave-on-eof"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self.process = psutil.Process(self._process.pid)

    def addresses(self) -> list[str]:
        """Its addresses, after waiting until it has printed them."""
        deadline = time.monotonic() + PATIENCE_S
        while not (said := self._said("listening")):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the first peer did not start")
            time.sleep(0.05)
        addresses: list[str] = said[0]["addresses"]
        return addresses

    def last_standing(self) -> dict[str, Any]:
        """The last status that it has reported."""
        return self._said("standing_by")[-1]

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def _said(self, kind: str) -> list[dict[str, Any]]:
        lines = self._events.read_bytes().splitlines() if self._events.exists() else []
        events = [msgspec.json.decode(line) for line in lines]
        return [event for event in events if event["type"] == kind]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(8.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def measure(num_peers: int, num_processes: int, settle_s: float, seconds: float, folder: Path) -> dict[str, Any]:
    """Start everything, wait, and read the coordinator's counters twice."""
    coordinator = Coordinator(folder)
    crowds: list[Worker] = []
    shares = [num_peers // num_processes + (number < num_peers % num_processes) for number in range(num_processes)]
    try:
        addresses = coordinator.addresses()
        with progress_of(3) as steps:
            steps.begin(f"{num_peers} peers join")
            for share in shares:
                crowds.append(Worker(Crowd, addresses))
                crowds[-1].call("join", share, timeout_s=PATIENCE_S + share)
            steps.begin(f"settling for {settle_s:g} s")
            time.sleep(settle_s)
            steps.begin(f"measuring for {seconds:g} s")
            crowd_before = sum(crowd.call("cpu_s") for crowd in crowds)
            before, began = coordinator.cpu_s(), time.monotonic()
            time.sleep(seconds)
            cpu_s, wall_s = coordinator.cpu_s() - before, time.monotonic() - began
            crowd_s = sum(crowd.call("cpu_s") for crowd in crowds) - crowd_before
        standing = coordinator.last_standing()
        return {
            "peers": num_peers,
            "peers_per_process": max(shares),
            "seconds": round(wall_s, 1),
            "cpu_percent": round(100 * cpu_s / wall_s, 2),
            "cpu_ms_per_s_of_peer": round(1e3 * crowd_s / wall_s / num_peers, 2),
            "rss_mb": round(coordinator.process.memory_info().rss / MB, 1),
            "known_peers": standing["num_known_peers"],
            "connected_peers": standing["num_connected_peers"],
        }
    finally:
        for crowd in crowds:
            crowd.close()
        coordinator.close()


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--peers", type=positive_int, default=100)
    parser.add_argument("--processes", type=positive_int, default=4, help="that the peers share")
    parser.add_argument("--settle", type=positive, default=60.0, help="seconds from the last join to the measurement")
    parser.add_argument("--seconds", type=positive, default=60.0)
    parser.add_argument("--json", type=json_path, help="write the figures here as well")
    options = parser.parse_args()
    num_processes = min(options.processes, options.peers)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options.peers, num_processes, options.settle, options.seconds, Path(folder))
    print("  ".join(f"{name} {value}" for name, value in result.items()))
    write_json(options.json, [result])


if __name__ == "__main__":
    run(main)
