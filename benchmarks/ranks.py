"""Two ways in which a peer of several ranks with FSDP2 can average: through rank 0, or each rank its own shards.

    python benchmarks/ranks.py [--mb 200] [--rounds 5] [--line-mbit-s 1000] [--json FILE]

Two peers of two ranks each, on loopback; each rank is a process with one thread, so four of them share the machine. The
figures are medians over the rounds without the first. Times are those of the slower rank, of either peer.

  gather   as manyhands.ProcessGroupOptimizer does it: rank 0 gathers the gradients, averages them with rank 0 of the
           other peer, makes the update on the host, and sends the ranks their shards of the parameters
  shards   each rank averages its shards with the same rank of the other peer, with an Averager of its own, at the same
           time as the other rank; and makes the update of its shards

  gather_s      rank 0 gathers the gradients
  average_s     a round, from when all have come to it
  update_s      the update
  send_back_s   rank 0 sends the parameters
  line_s        the least time of the round behind a line of --line-mbit-s each way: half of the vector is sent twice,
                and received twice. It is the same in both ways, as the ranks of one peer share its line
  added         what gathering and sending back add to a step behind such a line: their part of line_s
  rank_0_x      peak memory of rank 0 above that of a model in shards, in multiples of the whole parameters; likewise of
                rank 1. With AdamW, averaging and update included
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from _command_line import Parser, json_path, positive, positive_int, progress_of, run, write_json
from _memory import free_at_once, own_bytes, peak_own_bytes, start_peak
from _worker import Worker
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import manyhands
from manyhands.optim.step.replica import Replica
from manyhands.optim.step.shards import Shards, local_of

Row = dict[str, Any]

MB = 10**6
NUM_RANKS = NUM_PEERS = 2
NUM_LAYERS = 16
WAYS = ("gather", "shards")
LISTEN = ["/ip4/127.0.0.1/tcp/0"]
TIMEOUT_S = 300.0


# runs in the process of a rank


def _timed(times: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        result = function(*args, **kwargs)
        times[name] = time.perf_counter() - begun
        return result

    return timed


class Rank:
    """One rank of one peer."""

    def __init__(self, rank: int, store: str, way: str, mb: float) -> None:
        torch.set_num_threads(1)
        free_at_once()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
        self._rank, self._way = rank, way
        width = round(math.sqrt(mb * MB / 4 / NUM_LAYERS))
        self._model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(NUM_LAYERS)))
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        for part in (*self._model, self._model):
            fully_shard(part, mesh=mesh)
        self._before = own_bytes(os.getpid())
        self._inputs = torch.randn(8, width)
        self._times: dict[str, float] = {}
        self._peer: manyhands.Peer | None = None

    def open(self, initial_peers: Sequence[str]) -> list[str]:
        """Open the peer, if this rank has one; returns its addresses."""
        if self._way == "shards" or self._rank == 0:
            self._peer = manyhands.Peer(initial_peers, listen=LISTEN)
        return self._peer.addresses if self._peer is not None else []

    def join(self) -> None:
        """Make the optimizer, or the averager."""
        self._inner = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._shards = [torch.zeros_like(local_of(parameter)) for parameter in self._model.parameters()]
        if self._way == "shards":
            assert self._peer is not None
            self._averager = manyhands.Averager(self._shards, peer=self._peer, run_id=f"shards{self._rank}")
            return
        self._shards.clear()
        times: Any = self._times
        for kind, method, name in (
            (Shards, "gather_gradients", "gather_s"),
            (Shards, "distribute", "send_back_s"),
            (Replica, "advance", "update_s"),
        ):
            setattr(kind, method, _timed(times, name, getattr(kind, method)))
        self._optimizer = manyhands.ProcessGroupOptimizer(
            self._inner, peer=self._peer, run_id="gather", target_batch_size=NUM_PEERS * NUM_RANKS * 8
        )
        if (leader := self._optimizer.leader) is not None:
            client: Any = leader._client  # noqa: SLF001 (no public name is called in each step)
            client.average = _timed(times, "average_s", client.average)

    def step(self) -> Row:
        """Make a step with the other peer."""
        start_peak(os.getpid())
        self._times.clear()
        self._model(self._inputs).square().mean().backward()
        if self._way == "gather":
            self._step_through_rank_0()
        else:
            self._step_with_shards()
        return {**self._times, "bytes": peak_own_bytes(os.getpid()) - self._before}

    def _step_through_rank_0(self) -> None:
        optimizer, before = self._optimizer, self._optimizer.global_step
        while optimizer.num_peers < NUM_PEERS:
            optimizer.step(batch_size=0)
            time.sleep(0.01)
        optimizer.step(batch_size=8)
        optimizer.zero_grad()
        while optimizer.global_step == before:
            optimizer.step(batch_size=0)
            time.sleep(0.01)

    def _step_with_shards(self) -> None:
        for shard, parameter in zip(self._shards, self._model.parameters(), strict=True):
            assert parameter.grad is not None
            shard.copy_(local_of(parameter.grad))
        begun = time.perf_counter()
        while not (result := self._averager.step(timeout_s=TIMEOUT_S)).committed or len(result.group) < NUM_PEERS:
            begun = time.perf_counter()
        self._times["average_s"] = time.perf_counter() - begun
        for shard, parameter in zip(self._shards, self._model.parameters(), strict=True):
            assert parameter.grad is not None
            local_of(parameter.grad).copy_(shard)
        begun = time.perf_counter()
        self._inner.step()
        self._inner.zero_grad()
        self._times["update_s"] = time.perf_counter() - begun

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()


# runs in the main process


def measure(way: str, mb: float, num_rounds: int, line_mbit_s: float) -> Row:
    with contextlib.ExitStack() as stack, progress_of(num_rounds + 2) as steps:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        steps.begin(f"{way}, {mb:g} MB: starting {NUM_PEERS * NUM_RANKS} ranks")
        workers = [
            stack.enter_context(Worker(Rank, rank, f"{folder}/store{peer}", way, mb))
            for peer in range(NUM_PEERS)
            for rank in range(NUM_RANKS)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(len(workers)))

        def call(method: str) -> list[Any]:
            return list(pool.map(lambda worker: worker.call(method, timeout_s=TIMEOUT_S), workers))

        addresses: list[str] = []
        for worker in workers:
            addresses = worker.call("open", addresses, timeout_s=TIMEOUT_S) or addresses
        call("join")
        rounds = []
        for number in range(num_rounds + 1):
            steps.begin(f"{way}, {mb:g} MB: round {number} of {num_rounds}")
            rounds.append(call("step"))

    def median(name: str, ranks: Sequence[int] = range(NUM_PEERS * NUM_RANKS)) -> float:
        return float(statistics.median(max(said[rank].get(name, 0.0) for rank in ranks) for said in rounds[1:]))

    times = {name: median(name) for name in ("gather_s", "average_s", "update_s", "send_back_s")}
    line_s = 8 * mb * 2 * (NUM_PEERS - 1) / NUM_PEERS / line_mbit_s
    return {
        "way": way,
        "mb": mb,
        **{name: round(seconds, 3) for name, seconds in times.items()},
        "line_s": round(line_s, 3),
        "added": round((times["gather_s"] + times["send_back_s"]) / line_s, 3),
        "rank_0_x": round(median("bytes", [0, 2]) / (mb * MB), 2),
        "rank_1_x": round(median("bytes", [1, 3]) / (mb * MB), 2),
    }


def show(results: list[Row]) -> None:
    """Print the figures as a table."""
    table = Table(title="A step of two peers with two ranks each, on this machine", box=SIMPLE)
    for name in results[0]:
        table.add_column(name.replace("_", " "), justify="left" if name == "way" else "right", overflow="fold")
    for result in results:
        table.add_row(*map(str, result.values()))
    Console().print(table)


def sizes(text: str) -> list[float]:
    """Numbers above zero, separated by commas."""
    return [positive(part.strip()) for part in text.split(",")]


def parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--mb", type=sizes, default=[200.0], help="sizes of the parameters in MB")
    parser.add_argument("--rounds", type=positive_int, default=5, help="rounds that count")
    parser.add_argument("--line-mbit-s", type=positive, default=1000.0, help="speed of the line of each peer")
    parser.add_argument("--json", type=json_path, help="also write the figures there")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    results = [measure(way, mb, arguments.rounds, arguments.line_mbit_s) for mb in arguments.mb for way in WAYS]
    show(results)
    write_json(arguments.json, results)


if __name__ == "__main__":
    run(main)
