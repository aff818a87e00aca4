"""How well `manyhands plan` predicts the steps of four real peers.

    python benchmarks/plan_check.py [--set-ups loopback,sync,delayed,delayed-long,local,sparse] [--json FILE]

Each peer is a process. Computing a batch is a sleep, so that four peers fit on few cores; gradients, AdamW, rounds and
updates are real. ``loopback`` needs nothing. In the other set-ups each peer has an emulated line of 20 Mbit/s and 20 ms
one way (benchmarks/_star.py), which needs Linux and root; they are skipped without. ``delayed-long`` averages for
longer than it computes. The first two steps do not count.

The samples per second of the prediction are those of the first peer in batches without a step of the run, the median:
with local steps such a batch has an inner step of AdamW. As the peers share the cores of this machine, the CPU times of
the constants are multiplied by the number of peers for each core. Other work on the machine makes the measured steps
longer, not the predicted ones.

JSON: a list of ``{set_up, steps, codec, params, mbit, rtt_ms, target_batch_size, batch_s, predicted_s, measured_s,
ratio, predicted_bytes, measured_samples, predicted_samples, steps_s}``; ``measured_s`` is the median from one step to
the next of the first peer, ``ratio`` is predicted over measured.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from _command_line import Parser, json_path, positive_int, progress_of, run, skip, write_json
from _star import Line, address_of, enter, star, why_not
from _worker import Worker
from rich.console import Console
from rich.table import Table

import manyhands
from manyhands.averaging.config import AUTO, AveragingConfig
from manyhands.planning import Constants, Run, measured_constants
from manyhands.planning.model import SPARSE, Steps, predict

MEGA = 1e6
BITS = 8
PEERS = 4
SAMPLES = 8  # of a batch
WIDTH = 1000
JOIN_S = 120.0
STEPS_BEFORE = 2
LOOPBACK_MBIT = 10_000.0


@dataclass(frozen=True)
class SetUp:
    """A run of four peers.

    Attributes:
        batch_s: of computing a batch.
        num_batches: of each peer in a step.
        mbit: of each peer's emulated line; None for loopback.
        delay_ms: of an emulated line, one way.
    """

    steps: Steps
    codec: str
    params: int
    batch_s: float
    num_batches: int
    mbit: float | None = 20.0
    delay_ms: float = 20.0

    @property
    def target_batch_size(self) -> int:
        return PEERS * self.num_batches * SAMPLES

    @property
    def rtt_ms(self) -> float:
        return 2 * self.delay_ms if self.mbit else 0.0

    def run(self, samples_per_s: float) -> Run:
        """The run as it is planned."""
        return Run(
            params=self.params,
            peers=PEERS,
            mbit=self.mbit or LOOPBACK_MBIT,
            samples_per_s=samples_per_s,
            target_batch_size=self.target_batch_size,
            rtt_ms=self.rtt_ms,
        )


class Trained(NamedTuple):
    """What one peer saw.

    Attributes:
        steps_s: seconds of each step.
        samples: of all peers in each step.
        batch_s: median of a batch, with its call of ``step()``, where that made no step of the run.
    """

    steps_s: list[float]
    samples: list[float]
    batch_s: float


SET_UPS = {
    "loopback": SetUp("synchronous", "none", 4_000_000, batch_s=0.2, num_batches=5, mbit=None),
    "sync": SetUp("synchronous", "int8", 4_000_000, batch_s=0.5, num_batches=6),
    "delayed": SetUp("delayed", "int8", 4_000_000, batch_s=0.25, num_batches=20),
    "delayed-long": SetUp("delayed", "fp16", 4_000_000, batch_s=0.25, num_batches=16),
    "local": SetUp("local", "int8", 4_000_000, batch_s=0.25, num_batches=32),
    "sparse": SetUp("local", SPARSE, 4_000_000, batch_s=0.25, num_batches=16),
}


class Side:
    """One peer, in its own process, and in a namespace where it has an emulated line."""

    def __init__(self, rank: int, set_up: SetUp, namespace: str | None) -> None:
        if namespace is not None:
            enter(namespace)
        torch.set_num_threads(1)
        host = address_of(rank) if namespace is not None else "127.0.0.1"
        self._listen = [f"/ip4/{host}/tcp/0"]
        self._set_up = set_up
        numel = max(1, set_up.params // WIDTH), min(WIDTH, set_up.params)  # matrices: vectors would travel exactly
        self._parameter = torch.nn.Parameter(torch.zeros(numel))
        self._gradient = torch.randn(numel, generator=torch.Generator().manual_seed(rank))

    def join(self, initial_peers: list[str]) -> list[str]:
        """Join the run; returns the addresses of this peer."""
        set_up = self._set_up
        self._peer = manyhands.Peer(initial_peers, listen=self._listen)
        is_sparse = set_up.codec == SPARSE
        local = manyhands.LocalSteps(sparse=manyhands.Sparse() if is_sparse else None)
        self._optimizer = manyhands.Optimizer(
            torch.optim.AdamW([self._parameter], lr=1e-3),
            peer=self._peer,
            run_id="plan",
            target_batch_size=set_up.target_batch_size,
            batch_size_per_step=SAMPLES,
            delay="gradients" if set_up.steps == "delayed" else None,
            local_steps=local if set_up.steps == "local" else None,
            averaging=AveragingConfig(codec=AUTO if is_sparse else set_up.codec, averaging_timeout_s=120.0),
        )
        return self._peer.addresses

    def meet(self) -> None:
        """Wait until all peers are seen."""
        deadline = time.monotonic() + JOIN_S
        while self._optimizer.num_peers < PEERS:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._optimizer.num_peers} of {PEERS} peers are seen after {JOIN_S:g} s")
            self._optimizer.step(batch_size=0)
            time.sleep(0.1)

    def train(self, num_steps: int) -> Trained:
        """Train until so many steps after the first ones are there."""
        optimizer = self._optimizer
        ends, samples, batches_s = list[float](), list[float](), list[float]()
        while (before := optimizer.global_step) < STEPS_BEFORE + num_steps:
            began = time.perf_counter()
            time.sleep(self._set_up.batch_s)
            self._parameter.grad = self._gradient
            optimizer.step()
            ended = time.perf_counter()
            if optimizer.global_step == before:
                batches_s.append(ended - began)
            elif before >= STEPS_BEFORE - 1:
                ends.append(ended)
                assert optimizer.last_round is not None
                samples.append(sum(optimizer.last_round.weights))
        if optimizer.statistics.rounds_aborted:
            raise RuntimeError(f"a round has failed: {optimizer.statistics}")
        steps_s = [after - one for one, after in itertools.pairwise(ends)]
        return Trained(steps_s, samples[1:], statistics.median(batches_s))

    def stay(self) -> None:
        """Let the others end their last step."""
        self._optimizer.wait_for_others()

    def close(self) -> None:
        if hasattr(self, "_peer"):
            self._peer.close()


@contextlib.contextmanager
def namespaces(set_up: SetUp) -> Iterator[list[str | None]]:
    """The namespaces of the peers; None for loopback."""
    if set_up.mbit is None:
        yield [None] * PEERS
        return
    with star(PEERS, Line([set_up.mbit * MEGA / BITS], set_up.delay_ms / 1e3, 0.0)) as names:
        yield list(names)


def trained(set_up: SetUp, num_steps: int) -> Trained:
    """Run four peers; returns what the first one saw."""
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(namespaces(set_up))
        pool = stack.enter_context(ThreadPoolExecutor(PEERS))
        workers = [stack.enter_context(Worker(Side, rank, set_up, name)) for rank, name in enumerate(names)]

        def call(method: str, *arguments: Any, timeout_s: float = 2 * JOIN_S) -> list[Any]:
            calls = [pool.submit(worker.call, method, *arguments, timeout_s=timeout_s) for worker in workers]
            return [one.result() for one in calls]

        addresses: list[str] = []
        for worker in workers:  # one after the other: each loads the state of the first
            addresses = addresses or worker.call("join", [], timeout_s=2 * JOIN_S)
            if worker is not workers[0]:
                worker.call("join", addresses, timeout_s=2 * JOIN_S)
        call("meet")
        sides = call("train", num_steps, timeout_s=600.0)
        call("stay")
    first: Trained = sides[0]
    return first


def on_shared_cores(constants: Constants) -> Constants:
    """The constants for peers that share the cores of this machine."""
    peers_per_core = max(1.0, PEERS / (os.cpu_count() or 1))
    return dataclasses.replace(
        constants,
        round_ns_per_value={name: peers_per_core * ns for name, ns in constants.round_ns_per_value.items()},
        update_ns_per_value=peers_per_core * constants.update_ns_per_value,
    )


def measure(name: str, set_up: SetUp, num_steps: int) -> dict[str, Any]:
    """One row."""
    seen = trained(set_up, num_steps)
    planned = set_up.run(SAMPLES / seen.batch_s)
    step = predict(planned, on_shared_cores(measured_constants()), set_up.steps, set_up.codec)
    measured_s = statistics.median(seen.steps_s)
    return {
        "set_up": name,
        "steps": set_up.steps,
        "codec": set_up.codec,
        "params": set_up.params,
        "mbit": set_up.mbit,
        "rtt_ms": set_up.rtt_ms,
        "target_batch_size": set_up.target_batch_size,
        "batch_s": round(seen.batch_s, 3),
        "predicted_s": round(step.step_s, 2),
        "measured_s": round(measured_s, 2),
        "ratio": round(step.step_s / measured_s, 2),
        "predicted_bytes": round(step.bytes_per_step),
        "predicted_samples": step.samples,
        "measured_samples": round(statistics.median(seen.samples)),
        "steps_s": [round(one, 2) for one in seen.steps_s],
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the ratios as a table."""
    table = Table(title="seconds of a step: predicted over measured")
    for head in ("set-up", "steps", "codec", "predicted", "measured", "ratio"):
        table.add_column(head, justify="left" if head in ("set-up", "steps", "codec") else "right")
    for row in rows:
        figures = (row["predicted_s"], row["measured_s"], row["ratio"])
        table.add_row(row["set_up"], row["steps"], row["codec"], *map(str, figures))
    Console().print(table)


def set_ups(text: str) -> list[str]:
    """Set-ups, separated by commas."""
    names = text.split(",")
    if unknown := [name for name in names if name not in SET_UPS]:
        raise argparse.ArgumentTypeError(f"no set-up {unknown[0]!r}; there are {', '.join(SET_UPS)}")
    return names


def main() -> None:
    parser = Parser(__doc__)
    default = ",".join(SET_UPS)
    parser.add_argument("--set-ups", type=set_ups, default=list(SET_UPS), help=f"several (default: {default})")
    parser.add_argument("--steps", type=positive_int, default=5, help="that count (default: 5)")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    names = options.set_ups
    if (reason := why_not()) is not None and any(SET_UPS[name].mbit for name in names):
        names = [name for name in names if SET_UPS[name].mbit is None]
        if not names:
            skip(reason)
        print(f"only {', '.join(names)}: {reason}", flush=True)
    rows = []
    with progress_of(len(names)) as steps:
        for name in names:
            steps.begin(name)
            rows.append(measure(name, SET_UPS[name], options.steps))
            write_json(options.json, rows)
            print(json.dumps(rows[-1]), flush=True)
    show(rows)


if __name__ == "__main__":
    run(main)
