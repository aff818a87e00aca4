"""Speed of averaging one vector in a group: each peer is a separate process on this machine.

    python benchmarks/allreduce.py --peers 2,4,8 --mb 64 --codec none,fp16,int8 --systems manyhands,hivemind,gloo
        --rounds 6 [--json FILE]

The peers of all systems are up at the same time and take turns, one round each, so that other load on the machine
affects them alike. The results are medians over the rounds after the first. In each round every peer has another
vector, and the result is compared with the mean; a wrong result ends the benchmark.

  manyhands  `manyhands.Peer` and an averager: mutual TLS 1.3, and a vote on the digest of the result
  hivemind   `hivemind.DecentralizedAverager` with default options, without int8: with torch 2.13 its uniform
             quantization loses a part of the values, and its blockwise one needs bitsandbytes. Skipped if not
             installed (pip install -r benchmarks/requirements.txt)
  gloo       `torch.distributed`, not encrypted, uncompressed only

The figures, 1 MB = 10^6 bytes, always of the float32 vector, whatever the codec:

  seconds        until the slowest peer has the result, without formation
  mb_per_s       the size of the vector over seconds: what each peer gets averaged
  formation_s    until the group is known; gloo has none
  cpu_s_per_gb   user and system time of all processes of the system in its rounds, formation included, for each GB of
                 vector and peer; a mean, as the system counts CPU time in ticks that are long compared with a round
  peak_extra_mb  most memory that a peer needed in a round above what it had before the first round of that codec,
                 including the result if it is not written over the vector; of all its processes, without memory that
                 they share or that rounds of other codecs have kept. Linux only
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from _command_line import Parser, json_path, positive, positive_int, progress_of, run, write_json
from _memory import own_bytes, peak_own_bytes, start_peak
from _worker import Worker
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]

CODECS = {"manyhands": ["none", "fp16", "int8"], "hivemind": ["none", "fp16"], "gloo": ["none"]}
"""The codecs of each system."""
PACKAGES = {"hivemind": "hivemind"}
MAX_ERRORS = {"none": 1e-6, "fp16": 1e-3, "bf16": 1e-2, "int8": 2e-2, "int4": 0.2}
"""Largest error of the result, root mean square, relative to the mean."""
MB = 10**6
FLOAT_BYTES = 4
CHECKED_NUMEL = 1 << 18
START_TIMEOUT_S = 300.0
ROUND_TIMEOUT_S = 320.0
HAS_PROC = sys.platform == "linux"


# runs in the processes of a system


class Side:
    """One peer of one system, in a separate process.

    Each system has a module ``_allreduce_NAME`` with a class ``System``. ``contact`` is its address, and ``join`` gets
    the contacts of all peers. ``fill`` makes its vector; ``form`` and ``reduce`` make up a round, and return their
    seconds; ``result`` is the averaged vector.
    """

    def __init__(self, system: str, rank: int, num_peers: int, numel: int, codecs: list[str], folder: str) -> None:
        torch.set_num_threads(1)
        self._rank = rank
        self._num_peers = num_peers
        self._base_N = torch.randn(numel, generator=torch.Generator().manual_seed(1))
        module = importlib.import_module(f"_allreduce_{system}")
        self._system = module.System(rank, num_peers, numel, codecs, folder)

    def contact(self) -> list[str]:
        return list(self._system.contact())

    def join(self, contacts: list[list[str]]) -> None:
        self._system.join(contacts)

    def fill(self, codec: str, number: int) -> None:
        """Make the vector of a round, which differs between peers and rounds."""
        self._system.fill(codec, self._base_N, self._rank + 1.0 + number)

    def form(self, codec: str) -> float:
        return float(self._system.form(codec))

    def reduce(self, codec: str) -> tuple[float, float]:
        """Average; returns the seconds of the round, and those of formation in it."""
        seconds, formation_s = self._system.reduce(codec)
        return float(seconds), float(formation_s)

    def error(self, codec: str, number: int) -> float:
        """Error of the result, relative to the mean; computed in parts to need no memory."""
        factor = (self._num_peers + 1) / 2 + number
        square = total = 0.0
        result_N = self._system.result(codec)
        assert result_N.shape == self._base_N.shape
        assert result_N.dtype == torch.float32
        parts = torch.split(result_N, CHECKED_NUMEL), torch.split(self._base_N, CHECKED_NUMEL)
        for result, base in zip(*parts, strict=True):
            mean = base * factor
            square += float((result - mean).square().sum(dtype=torch.float64))
            total += float(mean.square().sum(dtype=torch.float64))
        return float((square / total) ** 0.5)

    def close(self) -> None:
        self._system.close()


# runs in the main process


@dataclass
class Figures:
    """Figures of the rounds of one codec, without the first."""

    seconds: list[float] = field(default_factory=list)
    formation_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    peak_extra_bytes: list[int] = field(default_factory=list)


class Group:
    """The peers of one system."""

    def __init__(self, stack: contextlib.ExitStack, system: str, codecs: list[str], num_peers: int, numel: int) -> None:
        self.system = system
        self.codecs = codecs
        self._figures = {codec: Figures() for codec in codecs}
        self._memory_before: dict[Worker, int] = {}
        self._kept_bytes: Counter[tuple[str, Worker]] = Counter()
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        self._pool = stack.enter_context(ThreadPoolExecutor(num_peers))
        self._workers: list[Worker] = []
        for rank in range(num_peers):
            worker = Worker(Side, system, rank, num_peers, numel, codecs, folder, has_children=system == "hivemind")
            self._workers.append(stack.enter_context(worker))
        contacts = self._call("contact", timeout_s=START_TIMEOUT_S)
        self._call("join", contacts, timeout_s=START_TIMEOUT_S)

    def round(self, codec: str, number: int) -> None:
        """Run one round; the first has number 0."""
        self._call("fill", codec, number)
        for worker in self._workers:
            self._before(codec, worker)
        cpu_before_s = self._cpu_now_s()
        formation_s = max(self._call("form", codec))
        times = self._call("reduce", codec)
        cpu_s = self._cpu_now_s() - cpu_before_s
        extra = max(self._extra(codec, worker) for worker in self._workers)
        error = max(self._call("error", codec, number))
        if not error <= MAX_ERRORS[codec]:
            raise SystemExit(f"{self.system} with {codec} is off by {error:.2g} of the mean: something is wrong")
        if number > 0:
            figures = self._figures[codec]
            figures.seconds.append(max(seconds for seconds, _ in times))
            figures.formation_s.append(max([formation_s, *(formation for _, formation in times)]))
            figures.cpu_s.append(cpu_s)
            figures.peak_extra_bytes.append(extra)

    def row(self, codec: str, mb: float) -> Row:
        figures = self._figures[codec]
        seconds = statistics.median(figures.seconds)
        num_peers = len(self._workers)
        return {
            "system": self.system,
            "peers": num_peers,
            "mb": mb,
            "codec": codec,
            "mb_per_s": round(mb / seconds, 1),
            "seconds": round(seconds, 4),
            "formation_s": round(statistics.median(figures.formation_s), 4),
            "cpu_s_per_gb": round(1e3 * statistics.fmean(figures.cpu_s) / mb / num_peers, 3),
            "peak_extra_mb": round(max(figures.peak_extra_bytes) / MB, 1) if HAS_PROC else None,
        }

    def _call(self, method: str, *arguments: Any, timeout_s: float = ROUND_TIMEOUT_S) -> list[Any]:
        """Call a method of all peers at once; returns their results in the order of ranks."""
        calls = [self._pool.submit(worker.call, method, *arguments, timeout_s=timeout_s) for worker in self._workers]
        return [call.result() for call in calls]

    def _processes(self, worker: Worker) -> list[psutil.Process]:
        process = psutil.Process(worker.pid)
        return [process, *process.children(recursive=True)]

    def _cpu_now_s(self) -> float:
        times = [process.cpu_times() for worker in self._workers for process in self._processes(worker)]
        return float(sum(one.user + one.system for one in times))

    def _memory(self, worker: Worker, measure: Callable[[int], int]) -> int:
        return sum(measure(process.pid) for process in self._processes(worker))

    def _before(self, codec: str, worker: Worker) -> None:
        if not HAS_PROC:
            return
        self._memory_before[worker] = self._memory(worker, own_bytes)
        for process in self._processes(worker):
            start_peak(process.pid)

    def _extra(self, codec: str, worker: Worker) -> int:
        """Peak memory of a round, with what earlier rounds of its codec keep, and without what others keep."""
        if not HAS_PROC:
            return 0
        before = self._memory_before[worker]
        needed = self._memory(worker, peak_own_bytes) - before + self._kept_bytes[codec, worker]
        self._kept_bytes[codec, worker] += self._memory(worker, own_bytes) - before
        return needed


def measure(codecs: dict[str, list[str]], num_peers: int, mb: float, num_rounds: int) -> list[Row]:
    """One row for each system and codec.

    Args:
        codecs: by system.
    """
    numel = max(1, round(mb * MB / FLOAT_BYTES))
    total = len(codecs) + num_rounds * sum(map(len, codecs.values()))
    with contextlib.ExitStack() as stack, progress_of(total) as steps:
        groups = []
        for system, its_codecs in codecs.items():
            steps.begin(f"{system}: starting {num_peers} peers")
            groups.append(Group(stack, system, its_codecs, num_peers, numel))
        for number in range(num_rounds):
            for group in groups:
                for codec in group.codecs:
                    steps.begin(f"{group.system}, {num_peers} peers, {codec}: round {number + 1} of {num_rounds}")
                    group.round(codec, number)
        return [group.row(codec, mb) for group in groups for codec in group.codecs]


def show(results: list[Row]) -> None:
    """Print the figures as a table."""
    table = Table(title="All-reduce on this machine", box=SIMPLE)
    for name in results[0]:
        table.add_column(name.replace("_", " "), justify="left" if name in ("system", "codec") else "right")
    for result in results:
        table.add_row(*("" if value is None else str(value) for value in result.values()))
    Console().print(table)


def names_of(known: list[str], kind: str) -> Callable[[str], list[str]]:
    """A parser for names separated by commas."""

    def read(text: str) -> list[str]:
        names = list(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"no {kind} {name!r}; there are {', '.join(known)}")
        return names

    return read


def group_sizes(text: str) -> list[int]:
    """Group sizes, separated by commas."""
    sizes = [positive_int(part.strip()) for part in text.split(",")]
    if min(sizes) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: it takes at least 2 peers to average")
    return list(dict.fromkeys(sizes))


def possible(systems: list[str], codecs: list[str]) -> dict[str, list[str]]:
    """The codecs that can be measured here, by system; prints what is skipped."""
    found: dict[str, list[str]] = {}
    for system in systems:
        if importlib.util.find_spec(PACKAGES.get(system, "torch")) is None:
            hint = "pip install -r benchmarks/requirements.txt"
            print(f"{system} is skipped: it is not installed ({hint})", file=sys.stderr)
            continue
        for codec in codecs:
            if codec in CODECS[system]:
                found.setdefault(system, []).append(codec)
            else:
                print(f"{system} with {codec} is skipped: it has no such codec", file=sys.stderr)
    return found


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--peers", type=group_sizes, default=[2, 4, 8], help="sizes of the group (default: 2,4,8)")
    parser.add_argument("--mb", type=positive, default=64.0, help="of the float32 vector (default: 64)")
    parser.add_argument("--codec", type=names_of(list(MAX_ERRORS), "codec"), default=list(MAX_ERRORS))
    parser.add_argument("--systems", type=names_of(list(CODECS), "system"), default=list(CODECS))
    parser.add_argument("--rounds", type=positive_int, default=6, help="the first does not count (default: 6)")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds 1: the first round does not count, so at least 2 are needed")
    codecs = possible(options.systems, options.codec)
    if not codecs:
        sys.exit(2)
    results: list[Row] = []
    for num_peers in options.peers:
        results += measure(codecs, num_peers, options.mb, options.rounds)
        write_json(options.json, results)
    show(results)
    for result in results:
        print(json.dumps(result))


if __name__ == "__main__":
    run(main)
