"""Speed and cost of handing the state of a run out to a newcomer.

    python benchmarks/state.py --mb 200,1000 --donors 1,2,4 --systems manyhands,hivemind [--rounds 5] [--json FILE]
    python benchmarks/state.py --link [--mb 50] [--donors 1,2] [--rounds 3] [--json FILE]     # Linux, root

Donors and the newcomer are processes of this machine. The donors of the system whose turn it is train all the while:
their main threads multiply matrices, without a step of the run. The newcomer looks for donors, downloads the state and
compares it with what the donors have, in each round.

  manyhands  donors with `manyhands.Optimizer`; the newcomer downloads as one that joins
  hivemind   `DecentralizedAverager.load_state_from_peers()`, with default options

The figures, medians over the rounds without the first:

  mb_per_s                    size of the state by the time of the whole call
  donor_step_slowdown         share of a donor's matrix products that are lost while it hands the state out, less the
                              time in which no core was free for its thread
  donor_extra_x_state         peak memory while it hands the state out, by the size of the state; the largest
  newcomer_extra_x_state      likewise of the newcomer, with the state itself
  killed_donor_extra_s        with two donors and more, one of which is killed at a third of the download: what the call
                              takes more than one without a killed donor
  frozen_donor_extra_s        likewise with SIGSTOP

With --link each donor is behind an emulated line of 100 Mbit/s, and the newcomer behind one of 1000, 20 ms apart. The
figures are mbit_s, of all donors together, without a limit and with max_upload_mbit_s=40 on each donor.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import signal
import statistics
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from _command_line import Parser, json_path, positive_int, progress_of, run, write_json
from _memory import free_at_once, own_bytes, peak_own_bytes, start_peak
from _star import Line, address_of, enter, star, why_not
from _worker import Worker
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]

SYSTEMS = ["manyhands", "hivemind"]
MB = 10**6
NUM_TENSORS = 16
START_TIMEOUT_S = 300.0
LOAD_TIMEOUT_S = 320.0
BASELINE_S = 2.0
SETTLE_S = 1.0
LINK_MBIT_S, LINK_DELAY_S, LIMIT_MBIT_S = 100.0, 0.01, 40.0
BROKEN_AT = 0.33
"""Part of a download after which a donor is killed or stopped."""


# runs in the processes of a system


def make_tensors(mb: float) -> list[torch.Tensor]:
    numel = round(mb * MB / 4 / NUM_TENSORS)
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(numel, generator=generator) for _ in range(NUM_TENSORS)]


def enter_place(place: tuple[Any, ...]) -> None:
    """Prepare a process; its place, if given, begins with the network namespace."""
    if place:
        enter(place[0])
    torch.set_num_threads(1)
    free_at_once()


class DonorSide:
    """A donor, with a thread that trains."""

    def __init__(self, system: str, mb: float, contacts: list[str], *place: Any) -> None:
        enter_place(place)
        self._donor = importlib.import_module(f"_state_{system}").Donor(make_tensors(mb), contacts, *place[1:])
        self._num_batches, self._waited_s, self._may_train = 0, 0.0, threading.Event()
        self._may_train.set()
        threading.Thread(target=self._train, daemon=True).start()

    def _train(self) -> None:
        torch.set_num_threads(1)  # it holds for the thread that calls it
        left, right, product = torch.rand(256, 256), torch.rand(256, 256), torch.empty(256, 256)
        schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        while True:
            self._may_train.wait()
            torch.matmul(left, right, out=product)
            self._num_batches += 1
            if self._num_batches % 10 == 0:
                self._waited_s = int(schedstat.read_text().split()[1]) / 1e9

    def contacts(self) -> list[str]:
        return list(self._donor.contacts())

    def go_on(self) -> None:
        """Go on training."""
        self._may_train.set()

    def pause(self) -> None:
        """Interrupt the training."""
        self._may_train.clear()

    def batches(self) -> tuple[int, float]:
        """Batches so far, and seconds in which the training thread waited for a core."""
        return self._num_batches, self._waited_s

    def close(self) -> None:
        self._donor.close()


class NewcomerSide:
    """A newcomer."""

    def __init__(self, system: str, mb: float, contacts: list[str], *place: Any) -> None:
        enter_place(place)
        self._checksums = [zlib.crc32(tensor.numpy().data) for tensor in make_tensors(mb)]
        self._newcomer = importlib.import_module(f"_state_{system}").Newcomer(make_tensors(mb), contacts, *place[1:])

    def load(self) -> float:
        """Download the state; returns the seconds."""
        begun = time.perf_counter()
        tensors = self._newcomer.load()
        seconds = time.perf_counter() - begun
        if [zlib.crc32(tensor.numpy().data) for tensor in tensors] != self._checksums:
            raise RuntimeError("the newcomer has another state than the donors")
        return seconds

    def close(self) -> None:
        self._newcomer.close()


# runs in the main process


class Swarm:
    """The donors and the newcomer of one system."""

    def __init__(self, stack: contextlib.ExitStack, system: str, mb: float, num_donors: int) -> None:
        self.system, self._mb, self._num_donors = system, mb, num_donors
        has_children = system == "hivemind"
        self.donors: list[Worker] = []
        contacts: list[str] = []
        for _ in range(num_donors):
            donor = Worker(DonorSide, system, mb, contacts, has_children=has_children)
            self.donors.append(stack.enter_context(donor))
            contacts = contacts or donor.call("contacts", timeout_s=START_TIMEOUT_S)
            donor.call("contacts", timeout_s=START_TIMEOUT_S)
        self.newcomer = stack.enter_context(Worker(NewcomerSide, system, mb, contacts, has_children=has_children))
        time.sleep(SETTLE_S)
        self.seconds: list[float] = []
        self.slowdowns: list[float] = []
        self.extra: dict[str, list[float]] = {"donor": [], "newcomer": []}
        self.broken_s: dict[str, float] = {}
        self._is_first = True
        for donor in self.donors:
            donor.call("pause")

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Have the donors train meanwhile."""
        for donor in self.donors:
            donor.call("go_on")
        yield
        for donor in self.donors:
            donor.call("pause")

    def round(self) -> None:
        """Download once. The first time does not count."""
        idle = self._speed(BASELINE_S)
        before = {worker: self._memory(worker, own_bytes) for worker in [*self.donors, self.newcomer]}
        for worker in before:
            for pid in self._pids(worker):
                start_peak(pid)
        counts = [donor.call("batches") for donor in self.donors]
        begun = time.perf_counter()
        seconds = self.newcomer.call("load", timeout_s=LOAD_TIMEOUT_S)
        busy = self._speeds(counts, [donor.call("batches") for donor in self.donors], time.perf_counter() - begun)
        size = self._mb * MB
        extra = {worker: (self._memory(worker, peak_own_bytes) - then) / size for worker, then in before.items()}
        if self._is_first:
            self._is_first = False
            return
        self.seconds.append(seconds)
        self.slowdowns += [1 - one / other for one, other in zip(busy, idle, strict=True)]
        self.extra["donor"].append(max(extra[donor] for donor in self.donors))
        self.extra["newcomer"].append(extra[self.newcomer])

    def break_one(self, number: signal.Signals) -> None:
        """Download once more, and send one donor a signal meanwhile; a stopped one goes on afterwards."""
        typical_s = statistics.median(self.seconds)
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(self.newcomer.call, "load", timeout_s=LOAD_TIMEOUT_S)
            time.sleep(BROKEN_AT * typical_s)
            pids = self._pids(self.donors[-1])
            for pid in pids:
                os.kill(pid, number)
            self.broken_s[number.name] = loading.result() - typical_s
        if number == signal.SIGSTOP:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            time.sleep(SETTLE_S)
        else:
            self.donors.pop()

    def row(self) -> Row:
        seconds = statistics.median(self.seconds)
        return {
            "system": self.system,
            "mb": self._mb,
            "donors": self._num_donors,
            "mb_per_s": round(self._mb / seconds, 1),
            "donor_step_slowdown": round(statistics.median(self.slowdowns), 3),
            "donor_extra_x_state": round(max(self.extra["donor"]), 3),
            "newcomer_extra_x_state": round(max(self.extra["newcomer"]), 3),
            "killed_donor_extra_s": _rounded(self.broken_s.get("SIGKILL")),
            "frozen_donor_extra_s": _rounded(self.broken_s.get("SIGSTOP")),
        }

    def _speed(self, seconds: float) -> list[float]:
        counts = [donor.call("batches") for donor in self.donors]
        begun = time.perf_counter()
        time.sleep(seconds)
        return self._speeds(counts, [donor.call("batches") for donor in self.donors], time.perf_counter() - begun)

    @staticmethod
    def _speeds(before: list[tuple[int, float]], after: list[tuple[int, float]], seconds: float) -> list[float]:
        """Batches of each donor by the time in which it had a core."""
        return [
            (num_now - num) / max(seconds - (waited_now_s - waited_s), 1e-3)
            for (num, waited_s), (num_now, waited_now_s) in zip(before, after, strict=True)
        ]

    @staticmethod
    def _pids(worker: Worker) -> list[int]:
        process = psutil.Process(worker.pid)
        return [one.pid for one in [process, *process.children(recursive=True)]]

    def _memory(self, worker: Worker, measure: Any) -> int:
        return sum(measure(pid) for pid in self._pids(worker))


def _rounded(seconds: float | None) -> float | None:
    return round(seconds, 2) if seconds is not None else None


def measure(systems: list[str], mb: float, num_donors: int, num_rounds: int) -> list[Row]:
    total = len(systems) * (num_rounds + 2 + (2 if num_donors > 1 else 0))
    with contextlib.ExitStack() as stack, progress_of(total) as steps:
        swarms = []
        for system in systems:
            steps.begin(f"{system}: starting {num_donors} donors of {mb:g} MB")
            swarms.append(Swarm(stack, system, mb, num_donors))
        for number in range(num_rounds + 1):
            for swarm in swarms:
                steps.begin(f"{swarm.system}, {num_donors} donors, {mb:g} MB: round {number} of {num_rounds}")
                with swarm.training():
                    swarm.round()
        for how in (signal.SIGSTOP, signal.SIGKILL) if num_donors > 1 else ():
            for swarm in swarms:
                steps.begin(f"{swarm.system}, {num_donors} donors, {mb:g} MB: {how.name} for one of them")
                with swarm.training():
                    swarm.break_one(how)
        return [swarm.row() for swarm in swarms]


def measure_link(mb: float, num_donors: int, num_rounds: int) -> list[Row]:
    """Two rows: without and with a limit of each donor's upload."""
    rows: list[Row] = []
    lines = [LINK_MBIT_S * MB / 8] * num_donors + [10 * LINK_MBIT_S * MB / 8]
    with contextlib.ExitStack() as stack, progress_of(2 * (num_rounds + 2)) as steps:
        names = stack.enter_context(star(num_donors + 1, Line(lines, LINK_DELAY_S, 0.0)))
        for limit in (None, LIMIT_MBIT_S):
            with contextlib.ExitStack() as swarm:
                contacts: list[str] = []
                for number, name in enumerate(names[:-1]):
                    steps.begin(f"starting donor {number + 1}")
                    place = (name, address_of(number), limit)
                    donor = swarm.enter_context(Worker(DonorSide, "manyhands", mb, contacts, *place))
                    contacts = contacts or donor.call("contacts", timeout_s=START_TIMEOUT_S)
                    donor.call("contacts", timeout_s=START_TIMEOUT_S)
                at = (names[-1], address_of(num_donors))
                newcomer = swarm.enter_context(Worker(NewcomerSide, "manyhands", mb, contacts, *at))
                seconds = []
                for number in range(num_rounds + 1):
                    steps.begin(f"{num_donors} donors, limit {limit}: round {number} of {num_rounds}")
                    seconds.append(newcomer.call("load", timeout_s=LOAD_TIMEOUT_S))
                mbit_s = 8 * mb / statistics.median(seconds[1:])
                rows.append({"donors": num_donors, "mb": mb, "max_upload_mbit_s": limit, "mbit_s": round(mbit_s, 1)})
    return rows


def show(results: list[Row]) -> None:
    """Print the figures as a table."""
    table = Table(title="Handing a state out on this machine", box=SIMPLE)
    for name in results[0]:
        table.add_column(name.replace("_", " "), justify="left" if name == "system" else "right", overflow="fold")
    for result in results:
        table.add_row(*("" if value is None else str(value) for value in result.values()))
    Console().print(table)


def positive_ints(text: str) -> list[int]:
    """Whole numbers above zero, separated by commas."""
    return [positive_int(part.strip()) for part in text.split(",")]


def systems(text: str) -> list[str]:
    """Names of systems, separated by commas."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in SYSTEMS:
            raise argparse.ArgumentTypeError(f"no system {name!r}; there are {', '.join(SYSTEMS)}")
    return names


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--mb", type=positive_ints, help="sizes of the state (default: 200; with --link 50)")
    parser.add_argument("--donors", type=positive_ints, default=[1, 2], help="numbers of donors (default: 1,2)")
    parser.add_argument("--systems", type=systems, default=["manyhands"], help="default: manyhands")
    parser.add_argument("--rounds", type=positive_int, default=5, help="default: 5")
    parser.add_argument("--link", action="store_true", help="over emulated lines, manyhands alone")
    parser.add_argument("--json", type=json_path, metavar="FILE")
    options = parser.parse_args()
    if "hivemind" in options.systems and importlib.util.find_spec("hivemind") is None:
        parser.error("hivemind is not installed; see benchmarks/requirements.txt, or leave it out of --systems")
    if options.link and (reason := why_not()):
        parser.error(reason)
    results: list[Row] = []
    for mb in options.mb or ([50] if options.link else [200]):
        for num_donors in options.donors:
            if options.link:
                results += measure_link(mb, num_donors, options.rounds)
            else:
                results += measure(options.systems, mb, num_donors, options.rounds)
            write_json(options.json, results)
    show(results)


if __name__ == "__main__":
    run(main)
