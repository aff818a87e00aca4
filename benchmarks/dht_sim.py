"""A DHT of thousands of nodes with constant churn, in virtual time.

    python benchmarks/dht_sim.py --nodes 1000,10000 --churn-per-min 0.1 [--minutes 10] [--seed 0] [--json FILE]

Every node is a real ``DhtNode``: routing, lookups, storage, upkeep, handover. Connections are modelled by
``_light_endpoint.py``. Round trips are 20 to 100 ms, drawn for each pair.

All nodes join through three coordinators, which stay. The swarm is measured at rest for two minutes. Then the given
share of the other nodes is replaced in each minute, one by one: a random node ends, and a new one joins. Half of the
ended nodes were killed and refuse connections; the other half vanish with their machine and answer nothing. Meanwhile
random nodes make ten operations a second, half of them stores, half of them gets. Records live 5 minutes and are not
renewed; each fifth store replaces an older record. A get is good if it returns the last value of a store that had
returned before, as long as the record lives.

The figures, for each size:

  gets, gets_good            number of gets, and the share of good ones; lost: no living node had the record any more;
                             missed: some living node had it; stale: an older value was returned
  stores, stores_failed      failed: no node took the record
  get_hops, get_messages, store_hops, store_messages
                             means: the longest chain of peers in which each named the next, and the calls made
  *_p50_ms, *_p99_ms         in virtual time
  rest_bytes_per_node_and_min, rest_calls_per_node_and_min, rest_dials_per_node_and_min
                             of messages between DHT nodes, requests and responses, with the overhead of TLS records;
                             each dial, also a failed one, costs the handshake of a connection in addition
  churn_...                  the same, during the churn
  coordinator_calls_per_s    calls that one coordinator answered during the churn, the mean of the three
  wall_s, cpu_s, peak_mb     of the process that simulates this size
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import random
import resource
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

from _command_line import Parser, json_path, positive, positive_int, run, write_json
from _light_endpoint import LightEndpoint, LightNetwork, Watch, watching
from _worker import Worker
from rich.console import Console
from rich.table import Table

from manyhands.base.errors import JoinFailed
from manyhands.base.identity import Identity
from manyhands.dht import DhtConfig, DhtNode
from manyhands.rpc import Endpoint
from manyhands.testing import VirtualLoop
from manyhands.testing.verdicts import each_signature_once

NUM_COORDINATORS = 3
GROW_S = 60.0
SETTLE_S = 120.0
REST_S = 120.0
TTL_S = 300.0
OPERATIONS_PER_S = 10.0
REPLACED_SHARE = 0.2  # of the stores
GRACE_S = 15.0  # for operations in progress at the end
EPOCH_S = 1_800_000_000.0
RETRY_S = 5.0


@dataclass(eq=False)
class Node:
    """One node and the tasks of its user."""

    endpoint: LightEndpoint
    dht: DhtNode
    tasks: set[asyncio.Task[Any]]


@dataclass
class Stored:
    """The value that a get must return."""

    value: int
    expires_at: float
    is_changing: bool = False


class Simulation:
    """One swarm, from its start to its end.

    Args:
        churn_per_min: share of the nodes that is replaced in a minute.
        minutes: of churn, in virtual time.
    """

    def __init__(self, num_nodes: int, churn_per_min: float, minutes: float, seed: int) -> None:
        self._num_nodes = num_nodes
        self._churn_per_min = churn_per_min
        self._minutes = minutes
        self._rng = random.Random(f"{seed} {num_nodes}")
        self._loop = VirtualLoop()
        self._network = LightNetwork(self._loop, seed)
        self._config = DhtConfig()
        self._nodes: list[Node] = []
        self._joined: dict[Node, None] = {}
        self._initial: list[Any] = []
        self._stored: dict[str, Stored] = {}
        self._keys: list[str] = []  # to draw from
        self._tasks: set[asyncio.Task[Any]] = set()
        self._counts: Counter[str] = Counter()
        self._watched: dict[str, list[tuple[float, int, int]]] = {"get": [], "store": []}
        self._errors: list[BaseException] = []

    def close(self) -> None:
        """Does nothing."""

    def run(self) -> dict[str, float]:
        """Run the simulation; returns the figures."""
        logging.getLogger("manyhands").setLevel(logging.ERROR)
        started, started_cpu = time.perf_counter(), time.process_time()
        gc.set_threshold(100_000, 20, 100)
        with each_signature_once():
            result = self._loop.run(self._story(), math.inf)
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak_mb = peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)
        return result | {"wall_s": round(wall_s, 1), "cpu_s": round(cpu_s, 1), "peak_mb": round(peak_mb)}

    async def _story(self) -> dict[str, float]:
        await self._grow()
        self._say("all nodes have joined")
        gc.collect()
        gc.freeze()
        await asyncio.sleep(SETTLE_S)
        self._say("at rest")
        before = self._traffic()
        await asyncio.sleep(REST_S)
        rest = self._rates("rest", before, REST_S)
        before, served_before = self._traffic(), self._served_by_coordinators()
        churn_s = 60 * self._minutes
        await self._churn(churn_s)
        churn = self._rates("churn", before, churn_s)
        served = (self._served_by_coordinators() - served_before) / churn_s / NUM_COORDINATORS
        await asyncio.sleep(GRACE_S)
        if self._errors:
            raise self._errors[0]
        head = {"nodes": self._num_nodes, "log2_nodes": round(math.log2(self._num_nodes), 1)}
        return head | self._outcome() | rest | churn | {"coordinator_calls_per_s": round(served, 1)}

    # the swarm

    async def _grow(self) -> None:
        for number in range(self._num_nodes):
            node = self._add()
            if number < NUM_COORDINATORS:
                await self._join(node)
                self._initial += node.endpoint.addresses
            else:
                self._begin(self._join(node), node)
                await asyncio.sleep(GROW_S / self._num_nodes)
        while len(self._joined) < self._num_nodes:  # noqa: ASYNC110 (in virtual time)
            await asyncio.sleep(1.0)

    def _add(self) -> Node:
        rng = random.Random(self._rng.random())
        endpoint = self._network.add(Identity.from_seed(rng.randbytes(32)), rng)
        stand_in = cast(Endpoint, endpoint)  # it has all of one that a node uses
        node = Node(endpoint, DhtNode(stand_in, self._config, rng, self._wall_clock), set())
        self._nodes.append(node)
        return node

    def _wall_clock(self) -> float:
        return EPOCH_S + self._loop.now

    async def _join(self, node: Node) -> None:
        while True:
            try:
                await node.dht.join(self._initial)
            except JoinFailed:
                self._counts["joins_failed"] += 1
                await asyncio.sleep(RETRY_S)
            else:
                self._joined[node] = None
                return

    async def _churn(self, seconds: float) -> None:
        replaced_per_s = (self._num_nodes - NUM_COORDINATORS) * self._churn_per_min / 60
        end = self._loop.now + seconds
        replaced = asyncio.ensure_future(self._at_rate(replaced_per_s, end, self._replace_one))
        await self._at_rate(OPERATIONS_PER_S, end, self._operate, tell=True)
        await replaced

    async def _at_rate(self, per_s: float, end: float, do: Any, *, tell: bool = False) -> None:
        said_at = self._loop.now
        while per_s > 0 and self._loop.now < end:
            await asyncio.sleep(1 / per_s)
            do()
            if tell and self._loop.now >= said_at + 60:
                said_at += 60
                self._say(
                    f"churn; {self._counts['gets'] - self._counts['gets_good']} of {self._counts['gets']} gets failed"
                )

    def _replace_one(self) -> None:
        index = self._rng.randrange(NUM_COORDINATORS, len(self._nodes))
        node, self._nodes[index] = self._nodes[index], self._nodes[-1]
        self._nodes.pop()
        self._joined.pop(node, None)
        self._network.end(node.endpoint, is_vanished=self._rng.random() < 0.5)
        for task in list(node.tasks):
            task.cancel()
        self._begin(node.dht.close())
        newcomer = self._add()
        self._begin(self._join(newcomer), newcomer)

    def _begin(self, coro: Any, node: Node | None = None) -> None:
        """Run a coroutine, until it or its node ends."""
        tasks = self._tasks if node is None else node.tasks
        task = self._loop.create_task(coro)
        tasks.add(task)
        task.add_done_callback(lambda task: self._done(task, tasks))

    def _done(self, task: asyncio.Task[Any], tasks: set[asyncio.Task[Any]]) -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._errors.append(error)

    # the users

    def _operate(self) -> None:
        node = self._rng.choice(self._nodes)
        if node not in self._joined:
            return
        if self._rng.random() < 0.5:
            self._begin(self._store(node), node)
        elif (key := self._any_key()) is not None:
            self._begin(self._get(node, key), node)

    def _any_key(self) -> str | None:
        """A random key whose record lives and is not being replaced."""
        while self._keys:
            index = self._rng.randrange(len(self._keys))
            stored = self._stored[self._keys[index]]
            if stored.expires_at > self._loop.now:
                return None if stored.is_changing else self._keys[index]
            del self._stored[self._keys[index]]
            self._keys[index] = self._keys[-1]
            self._keys.pop()
        return None

    async def _store(self, node: Node) -> None:
        self._counts["stores"] += 1
        replaced = self._any_key() if self._rng.random() < REPLACED_SHARE else None
        key = replaced or f"key {self._counts['stores']}"
        before = self._stored.get(key)
        if before is not None:
            before.is_changing = True
        value, expires_at = self._counts["stores"], self._loop.now + TTL_S
        num_holders = await self._watch("store", node.dht.store(key, value, TTL_S))
        if num_holders:
            if key not in self._stored:
                self._keys.append(key)
            self._stored[key] = Stored(value, expires_at)
        else:
            self._counts["stores_failed"] += 1

    async def _get(self, node: Node, key: str) -> None:
        wanted = self._stored[key]
        found = await self._watch("get", node.dht.get(key))
        now = self._loop.now
        if self._stored.get(key) is not wanted or wanted.is_changing or wanted.expires_at < now:
            return  # replaced or expired meanwhile
        self._counts["gets"] += 1
        value = found[""].value if "" in found else None
        if value == wanted.value:
            self._counts["gets_good"] += 1
        elif value is not None:
            self._counts["stale"] += 1
        else:
            holders = [other for other in self._nodes if other.dht._storage.get(key, now)]  # noqa: SLF001
            self._counts["missed" if holders else "lost"] += 1

    async def _watch(self, kind: str, operation: Any) -> Any:
        watch = Watch()
        watching.set(watch)
        started = self._loop.now
        result = await operation
        self._watched[kind].append((self._loop.now - started, watch.num_hops, watch.num_calls))
        return result

    # figures

    def _say(self, text: str) -> None:
        cpu_s = time.process_time()
        print(
            f"{self._num_nodes} nodes, {self._loop.now:.0f} virtual s, {cpu_s:.0f} s of CPU: {text}",
            file=sys.stderr,
            flush=True,
        )

    def _traffic(self) -> tuple[int, int, int]:
        network = self._network
        return sum(network.num_calls.values()), sum(network.num_bytes.values()), network.num_dials

    def _rates(self, when: str, before: tuple[int, int, int], seconds: float) -> dict[str, float]:
        calls, num_bytes, dials = (now - then for now, then in zip(self._traffic(), before, strict=True))
        per = self._num_nodes * seconds / 60
        return {
            f"{when}_bytes_per_node_and_min": round(num_bytes / per),
            f"{when}_calls_per_node_and_min": round(calls / per, 1),
            f"{when}_dials_per_node_and_min": round(dials / per, 1),
        }

    def _served_by_coordinators(self) -> int:
        return sum(node.endpoint.num_served for node in self._nodes[:NUM_COORDINATORS])

    def _outcome(self) -> dict[str, float]:
        counts = self._counts
        outcome: dict[str, float] = {"gets": counts["gets"]}
        outcome["gets_good"] = round(counts["gets_good"] / max(1, counts["gets"]), 5)
        names = ("lost", "missed", "stale", "stores", "stores_failed", "joins_failed")
        outcome |= {name: counts[name] for name in names}
        for kind, watched in self._watched.items():
            if watched:
                seconds, hops, calls = (sorted(values) for values in zip(*watched, strict=True))
                outcome[f"{kind}_hops"] = round(statistics.mean(hops), 2)
                outcome[f"{kind}_messages"] = round(statistics.mean(calls), 2)
                outcome[f"{kind}_p50_ms"] = round(1e3 * statistics.median(seconds))
                outcome[f"{kind}_p99_ms"] = round(1e3 * seconds[math.ceil(0.99 * len(seconds)) - 1])
        return outcome


def measure(num_nodes: int, churn_per_min: float, minutes: float, seed: int) -> dict[str, float]:
    """The figures of one size, simulated in a process of its own."""
    with Worker(Simulation, num_nodes, churn_per_min, minutes, seed) as simulation:
        figures: dict[str, float] = simulation.call("run", timeout_s=24 * 3600.0)
    return figures


def show(results: list[dict[str, float]]) -> None:
    """Print the figures as a table."""
    table = Table(title="DHT in virtual time")
    table.add_column("")
    for result in results:
        table.add_column(str(result["nodes"]), justify="right")
    for name in dict.fromkeys(name for result in results for name in result):
        table.add_row(name, *(str(result.get(name, "")) for result in results))
    Console().print(table)


def sizes_of(text: str) -> list[int]:
    """Numbers of nodes, separated by commas; each must exceed the number of coordinators."""
    return [max(NUM_COORDINATORS + 1, positive_int(part.strip())) for part in text.split(",")]


def share(text: str) -> float:
    """A number from 0 on."""
    return 0.0 if text in ("0", "0.0") else positive(text)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--nodes", type=sizes_of, default=[1000], help="one or more, separated by commas (default: 1000)"
    )
    parser.add_argument("--churn-per-min", type=share, default=0.1, help="share of nodes replaced (default: 0.1)")
    parser.add_argument("--minutes", type=positive, default=10.0, help="of churn, in virtual time (default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    results = []
    for num_nodes in options.nodes:
        results.append(measure(num_nodes, options.churn_per_min, options.minutes, options.seed))
        print(json.dumps(results[-1]), flush=True)
    show(results)
    write_json(options.json, results)


if __name__ == "__main__":
    run(main)
