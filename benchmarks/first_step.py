"""What a volunteer waits for: seconds from Enter on `manyhands join` to the first samples that count.

    python benchmarks/first_step.py [--peers 1,4] [--runs 3] [--json FILE]

A trainer at the lowest priority, with one thread, keeps a run going; beside many others its steps are slow. So many
processes then join it at one moment, as users do, with one thread each and a home folder of their own, which is empty
at the first start; when they have been ended, they do so once more. JSON: a list of rows, medians over peers and runs:

  peers, start           how many at once; ``first`` or ``second``
  import_torch_s         `python -c "import torch"` alone, just before
  joined_s               until the peer holds the state of the run, its text, tokenizer, batch size and held-out loss
  first_contribution_s   until the end of its first batch that counts
  beyond_torch_s         of ``first_contribution_s``, beyond ``import_torch_s``
  slowest_s              ``first_contribution_s`` of the slowest peer, in the median run
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _command_line import Parser, json_path, positive_int, positive_ints, progress_of, run, write_json

MANYHANDS = [sys.executable, "-m", "manyhands"]
RUN = "first-step"
TARGET = 256
PATIENCE_S = 120.0
EXIT_S = 20.0
POLL_S = 0.02
LOWEST = 19


@dataclass
class Command:
    """One process of the command line, with its home folder and its events."""

    process: subprocess.Popen[bytes]
    events_path: Path
    began: float  # by the wall clock, as the events

    def events(self) -> list[dict[str, Any]]:
        if not self.events_path.exists():
            return []
        lines = self.events_path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for(self, kind: str, **least: int) -> dict[str, Any]:
        """The first event of a kind whose counts are at least these."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for event in self.events():
                if event["type"] == kind and all(event["counts"][name] >= least[name] for name in least):
                    return event
            if self.process.poll() is not None:
                raise RuntimeError(f"a process ended: {(self.events_path.parent / 'log').read_text()[-500:]}")
            time.sleep(POLL_S)
        raise RuntimeError(f"no event {kind!r} within {PATIENCE_S:.0f} s")

    def end(self) -> None:
        """Wait until it has ended, and kill it if it does not."""
        try:
            self.process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start(home: Path, *words: str, niceness: int = 0) -> Command:
    """Start `manyhands ...` in a home folder."""
    home.mkdir(exist_ok=True)
    events_path = home / "events.jsonl"
    events_path.unlink(missing_ok=True)
    began = time.time()
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [*MANYHANDS, *words, "--threads", "1", "--no-port-mapping", "--events", str(events_path)],
            cwd=home, env=os.environ | {"HOME": str(home)}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
    return Command(process, events_path, began)


@contextlib.contextmanager
def ended(commands: list[Command]) -> Iterator[list[Command]]:
    """No process outlives the block."""
    try:
        yield commands
    finally:
        for command in commands:
            command.process.terminate()  # as systemd does; in a script's background job Ctrl-C is ignored
        for command in commands:
            command.end()


def joined(home: Path, address: str, num_peers: int) -> list[dict[str, float]]:
    """Have the peers join at one moment; returns the seconds of each."""
    with ended([]) as peers:
        for number in range(num_peers):
            peers.append(start(home / str(number), "join", address, "--listen", "127.0.0.1:0"))
        return [seconds_of(peer) for peer in peers]


def seconds_of(peer: Command) -> dict[str, float]:
    """The seconds of a peer, once a step has used samples of it."""
    step = peer.wait_for("step", samples_used=1)
    dropped = step["counts"]["samples_dropped"]  # the first batches, if any: they came too late for a step
    times = {
        "joined_s": peer.wait_for("joined"),
        "first_contribution_s": peer.wait_for("batch", samples_computed=dropped + 1),
    }
    return {name: event["time"] - peer.began for name, event in times.items()}


def measure(num_peers: int, num_runs: int) -> list[dict[str, Any]]:
    """The rows of the first and the second start."""
    seconds: dict[str, list[list[dict[str, float]]]] = {"first": [], "second": []}
    imports_s: list[float] = []
    for _ in range(num_runs):
        with tempfile.TemporaryDirectory() as folder:
            first = start(
                Path(folder) / "trainer", "train", "--run-id", RUN, "--target-batch-size", str(TARGET), "--listen",
                "127.0.0.1:0", niceness=LOWEST,
            )  # fmt: skip
            with ended([first]):
                first.wait_for("step", samples_used=1)
                began = time.monotonic()
                subprocess.run([sys.executable, "-c", "import torch"], check=True)
                imports_s.append(time.monotonic() - began)
                for results in seconds.values():
                    results.append(joined(Path(folder), address_of(first), num_peers))
    return [row(num_peers, which, statistics.median(imports_s), results) for which, results in seconds.items()]


def address_of(first: Command) -> str:
    """Where others dial it: the last word of the line that says so."""
    log = (first.events_path.parent / "log").read_text()
    return next(line.split()[-1] for line in log.splitlines() if "--initial-peers" in line)


def row(num_peers: int, which: str, import_s: float, runs: list[list[dict[str, float]]]) -> dict[str, Any]:
    """See the module's docstring."""
    medians = {name: statistics.median(peer[name] for peers in runs for peer in peers) for name in runs[0][0]}
    slowest = statistics.median(max(peer["first_contribution_s"] for peer in peers) for peers in runs)
    figures = {
        "import_torch_s": import_s, **medians, "beyond_torch_s": medians["first_contribution_s"] - import_s,
        "slowest_s": slowest,
    }  # fmt: skip
    return {"peers": num_peers, "start": which} | {name: round(value, 1) for name, value in figures.items()}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--peers", type=positive_ints, default=[1, 4], help="that join at once (default: 1,4)")
    parser.add_argument("--runs", type=positive_int, default=3, help="of each number (default: 3)")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with progress_of(len(options.peers)) as steps:
        for num_peers in options.peers:
            steps.begin(f"{num_peers} peers that join at once, {options.runs} times")
            rows += measure(num_peers, options.runs)
            write_json(options.json, rows)
    for one in rows:
        print(one)


if __name__ == "__main__":
    run(main)
