"""Hundreds of DHT nodes over real TLS sockets on this machine, before and after many of them are killed at once.

    python benchmarks/dht_sockets.py --nodes 256 [--kill 0.25] [--per-process 16] [--keys 200] [--json FILE]

All nodes join through the first nodes of up to three processes. Then each key is stored by a random node and read by
others, one operation at a time. After a rest, processes that hold the given share of the nodes are killed at once
(SIGKILL), and living nodes read all keys again and again for 60 s.

The figures, one row for each phase: *before*, then by the time since the kill:

  gets, p50_ms, p99_ms, max_ms   one get at a time, timed in the caller
  lost                           gets of keys of which no living node holds a record: all holders were killed
  missed                         other gets that did not return the stored value

And of the whole run: start_s, until all nodes had joined; joins_failed, which were repeated; store_p50_ms,
store_p99_ms, stores_failed; rest_cpu_ms_per_node_and_s, CPU time of a node without reads, writes, joins or departures,
including heartbeats and its first lookups; rss_mb_per_node; nodes_per_process.

The seed determines the identities of the nodes and which processes are killed, so the same seed has the same holders
and loses the same keys. With five holders of each key, killing a quarter of the nodes loses one key in a thousand.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import random
import resource
import statistics
import time
from typing import Any

import psutil
from _command_line import Parser, json_path, positive, positive_int, progress_of, run, write_json
from _worker import Worker
from rich.console import Console
from rich.table import Table

from manyhands.base.address import Address, parse_addresses
from manyhands.base.errors import JoinFailed
from manyhands.base.identity import Identity
from manyhands.peer import Presence
from manyhands.runtime import LoopThread
from manyhands.transport import TlsTransport

Row = dict[str, Any]

LISTEN = (Address.parse("/ip4/127.0.0.1/tcp/0"),)
JOIN_TIMEOUT_S = 120.0
OPERATION_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 600.0
TTL_S = 3600.0
MAX_INITIAL_PEERS = 3
WATCHED_S = 60.0
WINDOWS_S = (0.0, 10.0, 20.0, 30.0, WATCHED_S)


class Nodes:
    """Some of the nodes: one process, one network thread."""

    def __init__(self) -> None:
        self._thread = LoopThread("nodes")
        self._presences: list[Presence] = []
        self._num_joins_failed = 0
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def start(self, seeds: list[bytes], initial_peers: list[str]) -> None:
        """Join, one after the other."""
        for seed in seeds:
            self._thread.run(self._start(seed, initial_peers), JOIN_TIMEOUT_S, "starting a node")
            initial_peers = initial_peers or self.addresses()

    async def _start(self, seed: bytes, initial_peers: list[str]) -> None:
        presence = Presence(TlsTransport(Identity.from_seed(seed)))
        self._presences.append(presence)
        await presence.endpoint.listen(LISTEN)
        while True:
            try:
                await presence.dht.join(parse_addresses(initial_peers))
            except JoinFailed:  # so many nodes may overload this machine for a while
                self._num_joins_failed += 1
            else:
                return

    def num_joins_failed(self) -> int:
        return self._num_joins_failed

    def addresses(self) -> list[str]:
        """Addresses of the first node."""
        return [str(address) for address in self._presences[0].endpoint.addresses]

    def store(self, index: int, key: str, value: int) -> tuple[float, int]:
        """Store a value; returns the seconds and the number of nodes that took it."""
        started = time.perf_counter()
        store = self._presences[index].dht.store(key, value, TTL_S)
        num_holders = self._thread.run(store, OPERATION_TIMEOUT_S, "storing")
        return time.perf_counter() - started, num_holders

    def get(self, index: int, key: str) -> tuple[float, int | None]:
        """Get a value; returns the seconds and the value."""
        started = time.perf_counter()
        found = self._thread.run(self._presences[index].dht.get(key), OPERATION_TIMEOUT_S, "reading")
        return time.perf_counter() - started, found[""].value if "" in found else None

    def held_keys(self) -> set[str]:
        """Keys of which at least one of these nodes holds a record."""

        async def keys() -> set[str]:
            now = asyncio.get_running_loop().time()
            return {key for presence in self._presences for key in presence.dht._storage.keys(now)}  # noqa: SLF001

        held: set[str] = self._thread.run(keys(), OPERATION_TIMEOUT_S, "looking at the storage")
        return held

    def close(self) -> None:
        self._thread.close()


class Swarm:
    """All processes, and their measurements."""

    def __init__(self, stack: contextlib.ExitStack, num_nodes: int, per_process: int, seed: int) -> None:
        self._stack = stack
        self._rng = random.Random(seed)
        self._seeds = [self._rng.randbytes(32) for _ in range(num_nodes)]
        self._per_process = per_process
        self._workers: list[tuple[Worker, int]] = []  # with the number of nodes in each
        self._values: dict[str, int] = {}
        self.num_joins_failed = 0

    @property
    def num_workers(self) -> int:
        return math.ceil(len(self._seeds) / self._per_process)

    def start_some(self) -> None:
        """Start one more process."""
        begin = sum(num for _, num in self._workers)
        seeds = self._seeds[begin : begin + self._per_process]
        first = [worker for worker, _ in self._workers[:MAX_INITIAL_PEERS]]
        initial_peers = [address for worker in first for address in worker.call("addresses", timeout_s=CALL_TIMEOUT_S)]
        worker = self._stack.enter_context(Worker(Nodes))
        worker.call("start", seeds, initial_peers, timeout_s=CALL_TIMEOUT_S)
        self._workers.append((worker, len(seeds)))
        self.num_joins_failed += worker.call("num_joins_failed", timeout_s=CALL_TIMEOUT_S)

    def store_all(self, num_keys: int) -> Row:
        seconds, num_failed = [], 0
        for number in range(num_keys):
            worker, index = self._any_node()
            took_s, num_holders = worker.call("store", index, f"key {number}", number, timeout_s=CALL_TIMEOUT_S)
            self._values[f"key {number}"] = number
            seconds.append(took_s)
            num_failed += not num_holders
        times = _times(seconds)
        return {"store_p50_ms": times["p50_ms"], "store_p99_ms": times["p99_ms"], "stores_failed": num_failed}

    def get_all(self) -> list[tuple[str, float, bool]]:
        """Key, seconds, and whether it was found, for each get."""
        results = []
        for key, value in self._values.items():
            worker, index = self._any_node()
            seconds, found = worker.call("get", index, key, timeout_s=CALL_TIMEOUT_S)
            results.append((key, seconds, found == value))
        return results

    def rest(self, seconds: float) -> Row:
        before, num_nodes = self._cpu_s(), sum(num for _, num in self._workers)
        time.sleep(seconds)
        rss = sum(psutil.Process(worker.pid).memory_info().rss for worker, _ in self._workers)
        return {
            "rest_cpu_ms_per_node_and_s": round(1e3 * (self._cpu_s() - before) / num_nodes / seconds, 2),
            "rss_mb_per_node": round(rss / 1e6 / num_nodes, 2),
        }

    def kill(self, share: float) -> int:
        """Kill processes that hold this share of all nodes; returns the number of nodes killed."""
        num = round(share * len(self._workers))
        killed = self._rng.sample(self._workers, num)
        for worker, _ in killed:
            psutil.Process(worker.pid).kill()
        self._workers = [one for one in self._workers if one not in killed]
        return sum(num for _, num in killed)

    def held_keys(self) -> set[str]:
        return set().union(*(worker.call("held_keys", timeout_s=CALL_TIMEOUT_S) for worker, _ in self._workers))

    def _any_node(self) -> tuple[Worker, int]:
        worker, num = self._rng.choices(self._workers, weights=[num for _, num in self._workers])[0]
        return worker, self._rng.randrange(num)

    def _cpu_s(self) -> float:
        times = [psutil.Process(worker.pid).cpu_times() for worker, _ in self._workers]
        return sum(one.user + one.system for one in times)


def _times(seconds: list[float]) -> Row:
    ordered = sorted(1e3 * one for one in seconds)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return {
        "p50_ms": round(statistics.median(ordered), 1),
        "p99_ms": round(p99, 1),
        "max_ms": round(ordered[-1], 1),
    }


def _row(phase: str, gets: list[tuple[str, float, bool]], held: set[str]) -> Row:
    num_lost = sum(key not in held for key, _, _ in gets)
    num_missed = sum(key in held and not is_found for key, _, is_found in gets)
    head = {"phase": phase, "gets": len(gets), "lost": num_lost, "missed": num_missed}
    return head | _times([seconds for _, seconds, _ in gets])


def measure(options: argparse.Namespace) -> tuple[list[Row], Row]:
    """A row for each phase, and the figures of the whole run."""
    with contextlib.ExitStack() as stack:
        swarm = Swarm(stack, options.nodes, options.per_process, options.seed)
        with progress_of(swarm.num_workers + 5) as steps:
            started = time.perf_counter()
            for number in range(swarm.num_workers):
                steps.begin(f"starting process {number + 1} of {swarm.num_workers}")
                swarm.start_some()
            whole: Row = {"nodes": options.nodes, "nodes_per_process": options.per_process}
            whole["start_s"] = round(time.perf_counter() - started, 1)
            whole["joins_failed"] = swarm.num_joins_failed
            steps.begin("storing")
            whole |= swarm.store_all(options.keys)
            steps.begin("reading")
            rows = [_row("before", swarm.get_all(), swarm.held_keys())]
            steps.begin(f"at rest, {options.rest_s:g} s")
            whole |= swarm.rest(options.rest_s)
            if options.kill:
                steps.begin("killing, and reading")
                whole["killed"] = swarm.kill(options.kill)
                rows += after_the_kill(swarm, options.watch_s)
    return rows, whole


def after_the_kill(swarm: Swarm, watched_s: float) -> list[Row]:
    """Read for a while; returns one row for each time window."""
    killed_at = time.perf_counter()
    held: set[str] | None = None
    rounds: list[tuple[float, list[tuple[str, float, bool]]]] = []
    while (began_s := time.perf_counter() - killed_at) < watched_s:
        rounds.append((began_s, swarm.get_all()))
        held = held if held is not None else swarm.held_keys()
    rows = []
    for begin_s, end_s in itertools.pairwise(WINDOWS_S):
        gets = [get for began_s, of_round in rounds if begin_s <= began_s < end_s for get in of_round]
        if gets:
            rows.append(_row(f"{begin_s:g} to {end_s:g} s after", gets, held or set()))
    return rows


def show(rows: list[Row], whole: Row) -> None:
    """Print the figures as tables."""
    table = Table(title=f"{whole['nodes']} nodes over TLS sockets, {whole.get('killed', 0)} killed at once")
    for name in rows[0]:
        table.add_column(name, justify="right" if name != "phase" else "left")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    Console().print("  ".join(f"{name} {value}" for name, value in whole.items()))


def share(text: str) -> float:
    """A number from 0 to below 1."""
    value = 0.0 if text in ("0", "0.0") else positive(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share below 1, such as 0.25")
    return value


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--nodes", type=positive_int, default=256, help="default: 256")
    parser.add_argument("--per-process", type=positive_int, default=16, help="nodes in one process (default: 16)")
    parser.add_argument("--kill", type=share, default=0.25, help="share of the processes (default: 0.25)")
    parser.add_argument("--keys", type=positive_int, default=200, help="default: 200")
    parser.add_argument("--rest-s", type=positive, default=20.0, help="seconds at rest (default: 20)")
    parser.add_argument("--watch-s", type=positive, default=WATCHED_S, help="seconds after the kill (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the figures there, too")
    rows, whole = measure(options := parser.parse_args())
    show(rows, whole)
    for row in [*rows, whole]:
        print(json.dumps(row))
    write_json(options.json, [*rows, whole])


if __name__ == "__main__":
    run(main)
