"""Latency of small records in a DHT of real processes and sockets on this machine.

    python benchmarks/dht.py --peers 32 --ops 200 --systems manyhands,hivemind [--json FILE]

The nodes of all systems are up at the same time and take turns, 10 operations each, so that other load on the machine
affects them alike. Every operation has its own key and is timed in its caller: a store by a random node, then a get of
that key by another one. One operation at a time. The first turns are a warm-up and are not counted, as nodes that have
not talked for long, or never, have no connection.

  manyhands  one `manyhands.Peer` in each process: the caller's thread and the network thread; TCP with mutual TLS 1.3.
             A get asks all peers that should hold the key, and returns the latest value that they have
  hivemind   one `hivemind.DHT`: each forks a process, and starts a p2pd beside it; the callers share the process from
             which all are forked. A get asks for the latest value too, as hivemind's optimizer does; with --first it
             takes the first that it finds, the default of `DHT.get`. Skipped if hivemind is not installed (pip install
             -r benchmarks/requirements.txt)

The figures:

  store_p50_ms, store_p99_ms, get_p50_ms, get_p99_ms
  failures           stores that no node took, and gets that returned no value or a wrong one
  cpu_ms_per_op      user and system time of all processes of the system in its turns, stores and gets together,
                     including the upkeep of the nodes
  rss_mb_per_node    resident memory of all processes of the system over the nodes; shared memory counts in each
                     process. pss_mb_per_node: it counts once (Linux only)
  nodes_per_process  of the processes that hold nodes; processes_per_node: all that a node needs
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import random
import statistics
import sys
import time
from typing import Any

import psutil
from _command_line import Parser, json_path, positive_int, progress_of, run, write_json
from _worker import Worker
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]

SYSTEMS = ("manyhands", "hivemind")
TURN = 10  # operations
TTL_S = 3600.0
START_TIMEOUT_S = 600.0
OPERATION_TIMEOUT_S = 60.0
SETTLE_S = 3.0


# runs in the processes of a system


class Side:
    """Nodes of one system, in a separate process.

    Args:
        num: number of nodes.
        initial_peers: addresses of others.
    """

    def __init__(self, system: str, num: int, initial_peers: list[str]) -> None:
        self._nodes = importlib.import_module(f"_nodes_{system}").Nodes(num, initial_peers)

    def addresses(self) -> list[str]:
        return list(self._nodes.addresses())

    def store(self, index: int, key: str, value: Any) -> tuple[float, bool]:
        """Store a value; returns the seconds and whether it succeeded."""
        started = time.perf_counter()
        is_stored = self._nodes.store(index, key, value, TTL_S)
        return time.perf_counter() - started, is_stored

    def get(self, index: int, key: str, value: Any, is_first: bool) -> tuple[float, bool]:
        """Get a value, or with ``is_first`` the first one found; returns the seconds and whether it was right."""
        started = time.perf_counter()
        found = self._nodes.get(index, key, is_first)
        return time.perf_counter() - started, found == value

    def close(self) -> None:
        self._nodes.close()


# runs in the main process


class Swarm:
    """The nodes of one system, and their measurements."""

    def __init__(self, stack: contextlib.ExitStack, system: str, num_peers: int) -> None:
        self.system = system
        self.num_peers = num_peers
        self._stack = stack
        self._workers: list[Worker] = []
        self._places: list[tuple[Worker, int]] = []  # of the nodes
        self._samples: dict[str, list[float]] = {"store": [], "get": []}
        self._num_failures = 0
        self._cpu_s = 0.0

    def start(self) -> None:
        has_children = self.system == "hivemind"
        num_in_worker = self.num_peers if has_children else 1
        initial_peers: list[str] = []
        for _ in range(0, self.num_peers, num_in_worker):
            worker = Worker(Side, self.system, num_in_worker, initial_peers, has_children=has_children)
            self._workers.append(self._stack.enter_context(worker))
            self._places += [(worker, index) for index in range(num_in_worker)]
            if not initial_peers:
                initial_peers = worker.call("addresses", timeout_s=START_TIMEOUT_S)
        for worker in self._workers:
            worker.call("addresses", timeout_s=START_TIMEOUT_S)

    def turn(self, keys: list[str], rng: random.Random, is_first: bool) -> None:
        """Store these keys, and read them."""
        cpu_before_s = self._cpu_now_s()
        writers = [rng.randrange(self.num_peers) for _ in keys]
        for key, writer in zip(keys, writers, strict=True):
            self._operate("store", writer, key)
        for key, writer in zip(keys, writers, strict=True):
            reader = (writer + rng.randrange(1, self.num_peers)) % self.num_peers
            self._operate("get", reader, key, is_first)
        self._cpu_s += self._cpu_now_s() - cpu_before_s

    def _operate(self, kind: str, node: int, key: str, *arguments: Any) -> None:
        worker, index = self._places[node]
        value = f"value of {key}"
        seconds, is_good = worker.call(kind, index, key, value, *arguments, timeout_s=OPERATION_TIMEOUT_S)
        self._samples[kind].append(1e3 * seconds)
        self._num_failures += not is_good

    def is_warm(self) -> None:
        """Discard the measurements so far."""
        self._cpu_s, self._num_failures = 0.0, 0
        for samples in self._samples.values():
            samples.clear()

    def result(self) -> Row:
        memory = [process.memory_full_info() for process in self._processes()]
        num_operations = sum(len(samples) for samples in self._samples.values())
        row: Row = {"system": self.system, "peers": self.num_peers}
        for kind, samples in self._samples.items():
            samples.sort()
            row[f"{kind}_p50_ms"] = round(statistics.median(samples), 3)
            row[f"{kind}_p99_ms"] = round(samples[math.ceil(0.99 * len(samples)) - 1], 3)
        row["failures"] = self._num_failures
        row["cpu_ms_per_op"] = round(1e3 * self._cpu_s / num_operations, 3)
        row["rss_mb_per_node"] = round(sum(one.rss for one in memory) / 1e6 / self.num_peers, 1)
        if hasattr(memory[0], "pss"):
            row["pss_mb_per_node"] = round(sum(one.pss for one in memory) / 1e6 / self.num_peers, 1)
        row["nodes_per_process"] = 1
        row["processes_per_node"] = round(len(memory) / self.num_peers, 2)
        return row

    def _processes(self) -> list[psutil.Process]:
        processes = []
        for worker in self._workers:
            process = psutil.Process(worker.pid)
            processes += [process, *process.children(recursive=True)]
        return processes

    def _cpu_now_s(self) -> float:
        times = [process.cpu_times() for process in self._processes()]
        return float(sum(one.user + one.system for one in times))


def measure(systems: list[str], options: argparse.Namespace) -> list[Row]:
    """One row for each system."""
    num_peers, num_ops = options.peers, options.ops
    num_warm_up_turns = math.ceil(options.warm_up / TURN)
    num_turns = num_warm_up_turns + math.ceil(num_ops / TURN)
    with contextlib.ExitStack() as stack, progress_of(len(systems) * (1 + num_turns)) as steps:
        swarms = [Swarm(stack, system, num_peers) for system in systems]
        for swarm in swarms:
            steps.begin(f"{swarm.system}: starting {num_peers} nodes")
            swarm.start()
        time.sleep(SETTLE_S)
        for turn in range(num_turns):
            begin = TURN * (turn - num_warm_up_turns)
            keys = [f"key {number}" for number in range(begin, min(num_ops, begin + TURN))]
            for swarm in swarms:
                steps.begin(f"{swarm.system}: turn {turn + 1} of {num_turns}")
                if turn == num_warm_up_turns:
                    swarm.is_warm()
                swarm.turn(keys, random.Random(f"{options.seed} {turn}"), options.first)
        return [swarm.result() for swarm in swarms]


def show(results: list[Row]) -> None:
    """Print the figures as a table, with the ratios of manyhands to another system."""
    table = Table(title=f"{results[0]['peers']} nodes on this machine")
    table.add_column("", no_wrap=True)
    for result in results:
        table.add_column(result["system"], justify="right")
    ours, other = (results[0], results[1]) if len(results) > 1 else (None, None)
    if ours and other:
        table.add_column(f"{ours['system']} / {other['system']}", justify="right")
    for name in results[0]:
        if name == "system":
            continue
        cells = [str(result.get(name, "")) for result in results]
        if ours and other and ("_ms" in name or "_mb" in name):
            cells.append(f"{ours[name] / other[name]:.3f}")
        table.add_row(name, *cells)
    Console().print(table)


def systems_of(text: str) -> list[str]:
    """Names of systems, separated by commas."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in SYSTEMS:
            raise argparse.ArgumentTypeError(f"no system {name!r}; there are {', '.join(SYSTEMS)}")
    return names


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--peers", type=positive_int, default=32, help="nodes of each system (default: 32)")
    parser.add_argument("--ops", type=positive_int, default=200, help="stores, and as many gets (default: 200)")
    parser.add_argument("--systems", type=systems_of, default=list(SYSTEMS), help="names, separated by commas")
    parser.add_argument("--warm-up", type=positive_int, default=100, help="operations before (default: 100)")
    parser.add_argument("--first", action="store_true", help="gets of hivemind take the first value that they find")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    if options.peers < 2:
        parser.error("--peers 1: another node than the one that stored reads, so at least 2 are needed")
    systems = []
    for system in options.systems:
        if importlib.util.find_spec(system) is None:
            hint = "pip install -r benchmarks/requirements.txt"
            print(f"{system} is skipped: it is not installed ({hint})", file=sys.stderr)
        else:
            systems.append(system)
    if not systems:
        sys.exit(2)
    results = measure(systems, options)
    show(results)
    for result in results:
        print(json.dumps(result))
    write_json(options.json, results)


if __name__ == "__main__":
    run(main)
