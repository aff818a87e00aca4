"""Slowdown of a training loop while the peer of the same process averages in the background.

    python benchmarks/overlap.py [--mb 64] [--codec none,int8] [--pauses 0,2] [--seconds 5] [--repeats 3] [--json FILE]

The main thread trains. In a second thread an Averager makes round after round with a peer in another process, with a
pause in between. Both processes share this machine's cores: on a machine with few of them, part of the slowdown comes
from the other process.

Two loops, each on one core:

  large  matrix products of 1024 x 1024 float32: most of the time is spent inside of torch, without the GIL
  tiny   additions of 64 float32: most of the time is spent in Python, as when a GPU waits for kernel launches. A step
         is 1000 of them

The figures, medians over the repeats:

  pause_s               between two rounds; "idle" is a peer that averages nothing
  round_s               of one round, including its formation
  averaging_share       share of the time with a round in progress
  steps_per_s           of the loop
  speed_kept            steps_per_s over that of the same loop with an idle peer in the same repeat
  core_wait_s_per_s     share of the time in which the main thread was ready, but no core was free. Linux only
  speed_kept_less_core_wait   speed_kept without that time: the cost of the GIL and memory, on a busy machine too
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _command_line import Parser, json_path, positive, positive_int, progress_of, run, write_json
from _worker import Worker
from rich.console import Console
from rich.table import Table

from manyhands import Averager, Peer
from manyhands.averaging.config import AveragingConfig

Row = dict[str, Any]
Step = Callable[[], object]

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
RUN_ID = "overlap"
FLOAT_BYTES = 4
MB = 10**6
STEP_TIMEOUT_S = 30.0
END_TIMEOUT_S = 40.0
SETTLE_S = 0.3  # from the start of the rounds to the first counted step
SCHEDSTAT = Path("/proc/thread-self/schedstat")  # running, waiting for a core, time slices
COLUMNS = ["loop", "codec", "pause_s", "rounds", "round_s", "averaging_share", "steps_per_s", "core_wait_s_per_s",
           "speed_kept", "speed_kept_less_core_wait"]  # fmt: skip


class Rounds:
    """Makes one round after the other on a separate thread."""

    def __init__(self, addresses: list[str], numel: int, codec: str) -> None:
        torch.set_num_threads(1)
        self._peer = Peer(addresses, listen=LISTEN)
        self._tensor_N = torch.randn(numel)
        self._averager = Averager(
            [self._tensor_N], peer=self._peer, run_id=RUN_ID, averaging=AveragingConfig(codec=codec)
        )
        self.seconds: list[float] = []
        self.failures: list[str] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=lambda: None)

    def addresses(self) -> list[str]:
        return [str(address) for address in self._peer.addresses]

    def begin(self, pause_s: float) -> None:
        """Average until :meth:`end`."""
        self.seconds, self.failures = [], []
        self._ending.clear()
        self._thread = threading.Thread(target=self._run, args=(pause_s,), daemon=True)
        self._thread.start()

    def _run(self, pause_s: float) -> None:
        while not self._ending.wait(pause_s):
            began = time.perf_counter()
            result = self._averager.step(timeout_s=STEP_TIMEOUT_S)
            if result.committed:
                self.seconds.append(time.perf_counter() - began)
            elif not self._ending.is_set():
                self.failures.append(result.reason)

    def end(self) -> None:
        """Begin no further round; the other peer may still wait for this one."""
        self._ending.set()

    def join(self) -> None:
        """Wait for the last round."""
        self._thread.join(END_TIMEOUT_S)

    def close(self) -> None:
        self._averager.close()
        self._peer.close()


@contextlib.contextmanager
def averaging(here: Rounds, there: Worker, pause_s: float | None) -> Iterator[None]:
    """Let both peers average during the block; without a pause given, neither does."""
    if pause_s is None:
        yield
        return
    there.call("begin", pause_s)
    here.begin(pause_s)
    try:
        yield
    finally:
        there.call("end")
        here.end()
        here.join()
        there.call("join", timeout_s=END_TIMEOUT_S + 10)


def large() -> Step:
    """One matrix product."""
    left, right, product = torch.rand(1024, 1024), torch.rand(1024, 1024), torch.empty(1024, 1024)
    return lambda: torch.matmul(left, right, out=product)


def tiny() -> Step:
    """A thousand small additions."""
    total, one = torch.zeros(64), torch.ones(64)

    def step() -> None:
        for _ in range(1000):
            total.add_(one)

    return step


LOOPS = {"large": large, "tiny": tiny}


def core_wait_s() -> float | None:
    """Time for which this thread was ready while no core was free; None where unknown."""
    try:
        return int(SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return None


def train(step: Step, seconds: float) -> Row:
    """Run steps for ``seconds``."""
    until = time.perf_counter() + SETTLE_S
    while time.perf_counter() < until:
        step()
    waited_before_s, start, num_steps = core_wait_s(), time.perf_counter(), 0
    while (passed_s := time.perf_counter() - start) < seconds:
        step()
        num_steps += 1
    waited_s, wait_share = core_wait_s(), None
    if waited_s is not None and waited_before_s is not None:
        wait_share = (waited_s - waited_before_s) / passed_s
    return {
        "steps_per_s": num_steps / passed_s,
        "core_wait_s_per_s": wait_share,
        "speed_kept": 1.0,
        "speed_kept_less_core_wait": None if wait_share is None else 1.0,
    }


def compared(row: Row, idle: Row) -> Row:
    """The row with its speed relative to that of an idle peer."""
    kept = row["steps_per_s"] / idle["steps_per_s"]
    if (wait_share := row["core_wait_s_per_s"]) is None:
        return row | {"speed_kept": kept}
    less_wait = kept * (1 - idle["core_wait_s_per_s"]) / (1 - wait_share)
    return row | {"speed_kept": kept, "speed_kept_less_core_wait": less_wait}


def median(values: list[float | None]) -> float | None:
    """The median, or None where the machine does not report the value."""
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 3) if known else None


def measure(options: argparse.Namespace, codec: str) -> list[Row]:
    """One row for each loop and pause."""
    torch.set_num_threads(1)
    numel = round(options.mb * MB / FLOAT_BYTES)
    pauses: list[float | None] = [None, *options.pauses]
    rows: dict[tuple[str, float | None], list[Row]] = {(loop, pause): [] for loop in LOOPS for pause in pauses}
    with contextlib.ExitStack() as stack, progress_of(options.repeats * len(rows)) as steps:
        here = stack.enter_context(contextlib.closing(Rounds([], numel, codec)))
        there = stack.enter_context(Worker(Rounds, here.addresses(), numel, codec))
        there.call("addresses")
        for repeat in range(options.repeats):
            for loop, make_step in LOOPS.items():
                step = make_step()
                for pause_s in pauses:
                    what = "idle" if pause_s is None else f"a round every {pause_s:g} s"
                    steps.begin(f"{codec}, {loop} loop, {what}, {repeat + 1} of {options.repeats}")
                    with averaging(here, there, pause_s):
                        row = train(step, options.seconds)
                    if here.failures:
                        raise SystemExit(f"a round failed: {here.failures[0]}")
                    seconds = here.seconds if pause_s is not None else []
                    row["rounds"] = len(seconds)
                    row["round_s"] = statistics.median(seconds) if seconds else None
                    row["averaging_share"] = row["round_s"] / (row["round_s"] + (pause_s or 0.0)) if seconds else 0.0
                    idle = rows[loop, None][repeat] if pause_s is not None else row
                    rows[loop, pause_s].append(compared(row, idle))
    return [
        {"loop": loop, "codec": codec, "mb": options.mb, "pause_s": pause}
        | {name: median([row[name] for row in of]) for name in COLUMNS[3:]}
        for (loop, pause), of in rows.items()
    ]


def show(results: list[Row]) -> None:
    """Print the figures as a table."""
    table = Table(title="a training loop beside rounds of averaging, medians")
    for name in COLUMNS:
        table.add_column(name.replace("_", " "), justify="left" if name in ("loop", "codec") else "right")
    for row in results:
        row = row | {"pause_s": "idle" if row["pause_s"] is None else row["pause_s"]}
        table.add_row(*("" if row[name] is None else str(row[name]) for name in COLUMNS))
    Console().print(table)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--mb", type=positive, default=64.0, help="of the float32 vector (default: 64)")
    parser.add_argument("--codec", type=lambda text: text.split(","), default=["none", "int8"])
    parser.add_argument("--pauses", type=lambda text: [float(part) for part in text.split(",")], default=[0.0, 2.0],
                        help="seconds between two rounds (default: 0,2)")  # fmt: skip
    parser.add_argument("--seconds", type=positive, default=5.0, help="of each loop at each pause (default: 5)")
    parser.add_argument("--repeats", type=positive_int, default=3, help="default: 3")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    results: list[Row] = []
    for codec in options.codec:
        results += measure(options, codec)
        write_json(options.json, results)
    show(results)
    for result in results:
        print(json.dumps(result))


if __name__ == "__main__":
    run(main)
