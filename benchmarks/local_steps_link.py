"""Share of the time that peers compute, with local steps over slow lines. Needs Linux and root.

    python benchmarks/local_steps_link.py --json FILE [--h 128] [--mbit-s 50] [--batch-s 0.5] [--codec none,int8,sparse]

Four peers train 30.8 million parameters, each in a process and a network namespace of its own (benchmarks/_star.py).
Computing a batch is a sleep of ``--batch-s``, so that four peers fit on two cores; the inner optimizer (SGD), the
averages and the outer optimizer are real. ``sparse`` is LocalSteps(sparse=Sparse()). The first average does not count.
JSON: a list of ``{peers, params, mbit_s, delay_ms, H, batch_s, codec, overlap_steps, computing, average_s,
inner_step_s, batches_per_average}``:

  computing            share of the time in which a peer computes: its batches with their undisturbed inner steps, over
                       all time; of the slowest peer
  average_s            seconds that an average adds to the batches
  inner_step_s         of a call of ``step()`` without an average, the first decile; part of computing.
  batches_per_average  those that a peer really made, the mean

A line must carry 2 (P - 1) / P times the bytes of the codec: at 50 Mbit/s 29.6 s for ``none``, and 7.5 s for ``int8``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from _command_line import Parser, json_path, positive, positive_int, progress_of, run, skip, write_json
from _star import Line, address_of, enter, star, why_not
from _worker import Worker

import manyhands
from manyhands.averaging import AveragingConfig
from manyhands.averaging.codecs.sparse import SPARSE
from manyhands.averaging.config import AUTO, CODEC_NAMES

MEGA = 10**6
BITS = 8
NUM_PARAMS = 30_800_000
NUM_TENSORS = 16
WIDTH = 1000
SAMPLES = 8  # of a batch
JOIN_S = 60.0


class Side:
    """One peer, in its own process and namespace."""

    def __init__(self, namespace: str, rank: int, num_params: int) -> None:
        enter(namespace)
        torch.set_num_threads(1)
        size = (num_params // NUM_TENSORS // WIDTH, WIDTH)  # matrices: codecs leave vectors, such as biases, exact
        self._parameters = [torch.nn.Parameter(torch.zeros(size)) for _ in range(NUM_TENSORS)]
        generator = torch.Generator().manual_seed(rank)
        for parameter in self._parameters:
            parameter.grad = torch.randn(*size, generator=generator)
        self._peer = manyhands.Peer(listen=[f"/ip4/{address_of(rank)}/tcp/0"]) if rank == 0 else None
        self._rank = rank

    def addresses(self) -> list[str]:
        assert self._peer is not None
        return self._peer.addresses

    def join(self, initial_peers: list[str], target: int, codec: str, overlap_steps: int) -> None:
        if self._peer is None:
            self._peer = manyhands.Peer(initial_peers, listen=[f"/ip4/{address_of(self._rank)}/tcp/0"])
        self._optimizer = manyhands.Optimizer(
            torch.optim.SGD(self._parameters, lr=1e-3), peer=self._peer, run_id="link", target_batch_size=target,
            batch_size_per_step=SAMPLES,
            local_steps=manyhands.LocalSteps(
                overlap_steps=overlap_steps, sparse=manyhands.Sparse() if codec == SPARSE else None
            ),
            averaging=AveragingConfig(
                codec=AUTO if codec == SPARSE else codec, matchmaking_time_s=30.0, averaging_timeout_s=200.0
            ),
        )  # fmt: skip

    def meet(self, num_peers: int) -> None:
        """Wait until all peers are seen."""
        deadline = time.monotonic() + JOIN_S
        while self._optimizer.num_peers < num_peers:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._optimizer.num_peers} of {num_peers} peers are seen after {JOIN_S:g} s")
            self._optimizer.step(batch_size=0)
            time.sleep(0.1)

    def train(self, num_averages: int, batch_s: float) -> dict[str, float]:
        """Train until so many averages after the first are there."""
        optimizer, began = self._optimizer, 0.0
        steps_s: list[float] = []
        while optimizer.global_step < 1 + num_averages:
            time.sleep(batch_s)
            called = time.perf_counter()
            was_first = optimizer.global_step < 1
            optimizer.step()
            ended = time.perf_counter()
            if was_first and optimizer.global_step == 1:
                began, steps_s = ended, []
            else:
                steps_s.append(ended - called)
        if optimizer.statistics.rounds_aborted:
            raise RuntimeError(f"an average has failed: {optimizer.statistics}")
        inner_s = sorted(steps_s)[len(steps_s) // 10]
        elapsed_s = time.perf_counter() - began
        computing_s = len(steps_s) * (batch_s + inner_s)
        return {
            "computing": computing_s / elapsed_s,
            "average_s": (elapsed_s - computing_s) / num_averages,
            "inner_step_s": inner_s,
            "batches_per_average": len(steps_s) / num_averages,
        }

    def stay(self) -> None:
        """Let the others end their last step."""
        self._optimizer.wait_for_others()

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()


def measure(options: argparse.Namespace, codec: str, overlap_steps: int) -> dict[str, Any]:
    """One row."""
    line = Line([options.mbit_s * MEGA / BITS], options.delay_ms / 1000, 0.0)
    target = options.h * options.peers * SAMPLES
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(star(options.peers, line))
        pool = stack.enter_context(ThreadPoolExecutor(options.peers))
        workers = [stack.enter_context(Worker(Side, name, rank, options.params)) for rank, name in enumerate(names)]

        def call(method: str, *arguments: Any, timeout_s: float = 2 * JOIN_S) -> list[Any]:
            calls = [pool.submit(worker.call, method, *arguments, timeout_s=timeout_s) for worker in workers]
            return [one.result() for one in calls]

        addresses = workers[0].call("addresses")
        for worker in workers:  # one after the other: each loads the state of the first
            worker.call("join", addresses, target, codec, overlap_steps, timeout_s=4 * JOIN_S)
        call("meet", options.peers)
        limit_s = (1 + options.averages) * (2 * options.h * options.batch_s + 200.0)
        sides = call("train", options.averages, options.batch_s, timeout_s=limit_s)
        call("stay")
    slowest = min(sides, key=lambda side: side["computing"])
    return {
        "peers": options.peers, "params": options.params, "mbit_s": options.mbit_s, "delay_ms": options.delay_ms,
        "H": options.h, "batch_s": options.batch_s, "codec": codec, "overlap_steps": overlap_steps,
        **{name: round(value, 4) for name, value in slowest.items()},
    }  # fmt: skip


def codecs(text: str) -> list[str]:
    """Codecs, separated by commas."""
    names = text.split(",")
    if unknown := [name for name in names if name not in (*CODEC_NAMES, SPARSE)]:
        raise argparse.ArgumentTypeError(f"no codec {unknown[0]!r}; there are {', '.join((*CODEC_NAMES, SPARSE))}")
    return names


def overlaps(text: str) -> list[int]:
    """Numbers of batches, separated by commas."""
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: numbers of batches, for example 0,10")
    return [int(part) for part in parts]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--peers", type=positive_int, default=4)
    parser.add_argument("--params", type=positive_int, default=NUM_PARAMS, help=f"default: {NUM_PARAMS}")
    parser.add_argument("--h", type=positive_int, default=128, help="batches between two averages (default: 128)")
    parser.add_argument("--batch-s", type=positive, default=0.5, help="of computing a batch (default: 0.5)")
    parser.add_argument("--mbit-s", type=positive, default=50.0, help="of each peer, both ways (default: 50)")
    parser.add_argument("--delay-ms", type=positive, default=20.0, help="one way (default: 20)")
    parser.add_argument(
        "--codec", type=codecs, default=["none", "int8", SPARSE], help="several (default: none,int8,sparse)"
    )
    parser.add_argument("--overlap", type=overlaps, default=[0, 10], help="several overlap_steps (default: 0,10)")
    parser.add_argument("--averages", type=positive_int, default=2, help="after the first (default: 2)")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        skip(reason)
    cases = list(itertools.product(options.codec, options.overlap))
    rows = []
    with progress_of(len(cases)) as steps:
        for codec, overlap_steps in cases:
            steps.begin(f"{codec}, overlap of {overlap_steps} batches")
            rows.append(measure(options, codec, overlap_steps))
            write_json(options.json, rows)
            print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    run(main)
