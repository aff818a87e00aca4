"""Training together under churn, beside hivemind: paced trainers, a kill, a newcomer, Ctrl-C and SIGTERM.

    python benchmarks/collaboration.py --systems manyhands,hivemind --peers 4 --target 256,64 --json FILE
        [--modes sync,delayed,local] [--runs 3] [--quick] [--link wan] [--folder DIR]

Each trainer is a process that trains the same small ALBERT (0.5 million parameters) from the same initial parameters
with AdamW, on batches of 8 samples of its own, which both systems share. The gradients are real; the trainer then
sleeps until its batch has taken 0.4, 0.4, 0.8 and 0.8 s (in turns), so that four of them fit on two cores. A first
peer, which computes nothing, is the others' initial peer.

  manyhands  the tutorial's loop with default settings; ``delayed`` is ``delay="gradients"``, and ``local`` is
             ``LocalSteps()`` with an average in each ``--target`` samples
  hivemind   ``sync`` with the times of the quick start, ``delayed`` with the options of the ALBERT example, ``local``
             the quick start itself (``use_local_updates``). pip install -r benchmarks/requirements.txt

A run: all trainers start at once; when all have contributed and two more steps are made, the *steady part* begins.
Then the second (a fast) trainer is killed with all its processes; later a newcomer with the same pace starts. At last
half of the processes get Ctrl-C (SIGINT to the whole process group, as from a terminal), the others SIGTERM.

The figures, of trainers unless they say otherwise; a sample is *used* if it is in the average of a committed round:

  share_of_ideal        samples computed in the steady part, over those of trainers that never wait; a batch counts by
                        the part of its time. From the first to the last step of that part
  samples_per_s_used    samples used there, of all together, for each second
  global_steps_per_min  there
  wait_per_step_s       time in step() there, for each global step; the mean of the trainers
  samples_over_target   samples of a global step there, over the target; the median
  heldout_loss_at_samples   loss on held-out data when so many samples are used, by number of samples. This script
                        computes it afterwards from the parameters that the last trainer wrote down
  seconds_to_first_step from the start of the processes to the first step that a round made, with all their imports
  after_kill_share_of_ideal  the same share, of the survivors, from 5 s after the kill to the start of the newcomer
  recovery_s            from the kill to the end of the survivors' last call of step() that took more than twice as long
                        as the longest one of the steady part; 0 if none did
  newcomer_first_contribution_s  from the start of its process to the end of its first batch that is used
  newcomer_beyond_imports_s  the same, from the end of its imports
  others_slowed_by_newcomer  by how much the share of the others falls from the part before to that after its start;
                        below 0 is noise
  partial_or_failed_rounds   global steps, from the steady part to the signals, of which a trainer saw a round fail, or
                        whose group lacked a trainer that was there; the kill alone makes one
  bytes_per_peer        sent for each global step of the steady part, all traffic with headers; null if this machine
                        gives the script no network namespace
  cores_per_peer        CPU time of all processes of a trainer in the steady part, over its seconds
  pss_mb_per_peer       memory of all processes of a trainer at the end of the steady part, shared pages by their
                        share; the median. 1 MB = 10^6 bytes
  exit_s                from the signals until no process is left; null if some are after 20 s
  left_after_exit       processes that are left 10 s after the signals, the first peer's too; they are then killed

Three figures say how far to trust a row: ``slow_batches``, the share of batches whose gradients took longer than the
pace, ``others_cores``, the cores that other programs used in the steady part, and ``spread``, the least and greatest
value of each figure over the runs, whose median the row has. A row of which a run failed has ``failed_runs`` and their
``reasons``; if all failed, it has no figures.

``--link wan`` (as root): 12 million parameters, lines of 100 Mbit/s and 50 ms one way for each peer, batches of 1 s on
all trainers, and a target of 2 s (64 samples for four).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import fcntl
import importlib.util
import json
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from _collaboration_figures import (
    Steps,
    Trainer,
    Window,
    after_kill_figures,
    at_samples,
    medians,
    newcomer_figures,
    partial_or_failed,
    steady_figures,
)
from _collaboration_task import Role, Task, events_path, kept_path, loss_of, new_model
from _command_line import Parser, json_path, positive_int, positive_ints, progress_of, run, write_json
from _command_line import Steps as Shown
from _star import Line, address_of, star, why_not
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from manyhands.recipes.albert.batches import Batches, heldout_batch
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.data.corpus import load_documents
from manyhands.recipes.albert.data.samples import make_samples
from manyhands.recipes.albert.data.tokenizer import train_tokenizer
from manyhands.recipes.albert.model import build_model

Row = dict[str, Any]

SYSTEMS = ["manyhands", "hivemind"]
MODES = ["sync", "delayed", "local"]
MB = 10**6
BATCH = 8
NUM_BATCHES = 512  # of each trainer; then again
NUM_HELDOUT = 256
KEPT_SAMPLES = 512  # the parameters are written down about so often
MARKS = [1024 * number for number in range(1, 17)]
LOOPBACK = "127.0.0.1"

START_S = 180.0
SETTLED_STEPS = 2
STEP_S = 60.0
LEFT_S = 10.0
EXIT_S = 20.0
POLL_S = 0.05
READ_S = 0.25


@dataclass(frozen=True)
class Setting:
    """Where and how the trainers train."""

    model: dict[str, Any]
    paces_s: Sequence[float]
    targets: list[int]
    learning_rate: float
    line: Line | None = None


SETTINGS = {
    None: Setting(
        {"vocab_size": 2048, "embedding_size": 64, "hidden_size": 160, "num_hidden_layers": 2,
         "num_attention_heads": 4, "intermediate_size": 640, "seq_length": 32},
        (0.4, 0.4, 0.8, 0.8), [256, 64], 1e-3,
    ),
    "wan": Setting(
        {"vocab_size": 2048, "embedding_size": 128, "hidden_size": 1024, "num_hidden_layers": 1,
         "num_attention_heads": 8, "intermediate_size": 3072, "seq_length": 16},
        (1.0,), [64], 1e-4, Line([100 * MB / 8], 0.05, 0.0),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Durations:
    """Seconds of the parts of a run."""

    steady_s: float
    after_kill_s: float
    newcomer_s: float


FULL = Durations(40.0, 30.0, 40.0)
QUICK = Durations(16.0, 14.0, 25.0)
WAN = Durations(60.0, 40.0, 80.0)  # a newcomer needs 12 s for the state alone; quick or not


class RunFailed(Exception):
    """A run has no figures, for the reason that this has."""


# processes


class Process:
    """One process of a system, in a session of its own; so are all processes that it starts."""

    def __init__(self, system: str, role: Role, folder: str, namespace: str | None) -> None:
        self.name = "the first peer" if role.rank < 0 else f"trainer {role.rank}"
        self.pace_s = role.pace_s
        self.rank = role.rank
        self._path = events_path(folder, role.rank)
        self._log_path = Path(folder) / f"log-{role.rank}.txt"
        program = Path(__file__).with_name(f"_collaboration_{system}.py")
        command = [sys.executable, str(program), json.dumps(dataclasses.asdict(role))]
        if namespace is not None:
            command = ["ip", "netns", "exec", namespace, *command]
        self.started = time.monotonic()
        with self._log_path.open("w") as log:
            self._popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self.session = self._popen.pid

    def events(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        lines = self._path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def check(self) -> None:
        """Raise ``RunFailed`` if the process has ended."""
        if self._popen.poll() is not None:
            lines = self._log_path.read_text(errors="replace").strip().splitlines()
            raise RunFailed(
                f"{self.name} has ended with {self._popen.returncode}: {lines[-1] if lines else 'no words'}"
            )

    def alive(self) -> list[psutil.Process]:
        """All processes of the session; without those that have ended and were not waited for."""
        self._popen.poll()
        return sessions([self.session])[self.session]

    def signal_main(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.session, number)

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.session, number)

    def kill(self) -> None:
        """Kill the groups of this session, until nothing is left of it."""
        for _ in range(100):
            left = self.alive()
            for group in {os_call(os.getpgid, process.pid) for process in left}:
                if group is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(group, signal.SIGKILL)
            if not left:
                return
            time.sleep(POLL_S)


def os_call(function: Callable[[int], int], pid: int) -> int | None:
    try:
        return function(pid)
    except ProcessLookupError:
        return None


def sessions(ids: Sequence[int]) -> dict[int, list[psutil.Process]]:
    """The processes of sessions, by id of the session."""
    found: dict[int, list[psutil.Process]] = {session: [] for session in ids}
    for pid in psutil.pids():
        session = os_call(os.getsid, pid)
        if session in found:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[session].append(process)
    return found


@dataclass(frozen=True)
class Usage:
    """What all trainers together have used up to an instant."""

    cpu_s: float
    machine_cpu_s: float
    bytes_sent: int | None

    @classmethod
    def now(cls, processes: Sequence[Process], *, counts_bytes: bool, is_wan: bool) -> Usage:
        cpu_s, sent = 0.0, 0
        for process in processes:
            for one in process.alive():
                with contextlib.suppress(psutil.Error):
                    times = one.cpu_times()
                    cpu_s += times.user + times.system
            if is_wan:
                sent += sent_in_namespace_of(process.session, is_loopback=False)
        machine = psutil.cpu_times()
        if not is_wan:
            sent = sent_in_namespace_of(os.getpid(), is_loopback=True) if counts_bytes else 0
        busy_s = machine.user + machine.nice + machine.system
        return cls(cpu_s, busy_s, sent if counts_bytes else None)


def sent_in_namespace_of(pid: int, *, is_loopback: bool) -> int:
    """Bytes that the devices of a process's network namespace have sent."""
    total = 0
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if (name.strip() == "lo") == is_loopback:
            total += int(numbers.split()[8])
    return total


def pss_bytes(process: psutil.Process) -> int:
    """Memory of a process, shared pages by their share; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def enter_own_network() -> bool:
    """Move this process into a network namespace in which it is alone with its children; whether that is possible."""
    new_user, new_network = 0x10000000, 0x40000000
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(new_network if os.geteuid() == 0 else new_user | new_network) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        get_flags, set_flags, is_up = 0x8913, 0x8914, 1
        request = struct.pack("16sH14s", b"lo", 0, b"")
        flags = struct.unpack("16sH14s", fcntl.ioctl(any_socket, get_flags, request))[1]
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14s", b"lo", flags | is_up, b""))
    return True


# a run


class Run:
    """One run of a system."""

    def __init__(
        self,
        system: str,
        task: Task,
        setting: Setting,
        num_peers: int,
        durations: Durations,
        namespaces: list[str] | None,
    ) -> None:
        self._system = system
        self._task = task
        self._setting = setting
        self._num_peers = num_peers
        self._durations = durations
        self._namespaces = namespaces
        self._task_path = str(task.write())
        self._first: Process | None = None
        self._initial_peers: list[str] = []
        self._processes: list[Process] = []
        self._lived_until: dict[int, float] = {}

    def figures(self, *, counts_bytes: bool) -> Row:
        """Make the run; returns its figures."""
        try:
            return self._figures(counts_bytes=counts_bytes)
        finally:
            for process in self._all():
                process.kill()

    def _all(self) -> list[Process]:
        return [*self._processes, *([self._first] if self._first is not None else [])]

    def _start(self, rank: int) -> Process:
        paces = self._setting.paces_s
        pace_s = paces[1 % len(paces)] if rank == self._num_peers else paces[rank % len(paces)]  # the newcomer's last
        host = address_of(rank + 1) if self._namespaces is not None else LOOPBACK
        role = Role(self._task_path, rank, host, self._initial_peers, pace_s)
        namespace = self._namespaces[rank + 1] if self._namespaces is not None else None
        process = Process(self._system, role, self._task.folder, namespace)
        if rank < 0:
            self._first = process
        else:
            self._processes.append(process)
        return process

    def _trainers(self) -> list[Trainer]:
        return [Trainer(one.rank, self._task.batch, one.pace_s, one.started, one.events()) for one in self._processes]

    def _wait_until(self, is_so: Callable[[], bool], timeout_s: float, what: str, living: Sequence[Process]) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            for process in living:
                process.check()
            if time.monotonic() > deadline:
                raise RunFailed(f"{what} took more than {timeout_s:g} s")
            time.sleep(READ_S)

    def _pass(self, seconds: float, living: Sequence[Process]) -> Window:
        begin = time.monotonic()
        while (now := time.monotonic()) < begin + seconds:
            for process in living:
                process.check()
            time.sleep(min(POLL_S * 10, begin + seconds - now))
        return Window(begin, time.monotonic())

    def _figures(self, *, counts_bytes: bool) -> Row:
        first = self._start(-1)
        self._wait_until(lambda: self._addresses(first) != [], START_S, "starting the first peer", [first])
        self._initial_peers = self._addresses(first)
        for rank in range(self._num_peers):
            self._start(rank)
        started = min(process.started for process in self._processes)
        living = list(self._processes)
        try:
            self._wait_until(self._have_all_contributed, START_S, "the first contribution of each trainer", living)
        except RunFailed as error:
            ranks = [trainer.rank for trainer in self._trainers() if trainer.first_contribution() is None]
            raise RunFailed(f"{error}; without one: {ranks}") from error
        settled = max(Steps(self._trainers()).at, default=0) + SETTLED_STEPS
        self._wait_until(
            lambda: max(Steps(self._trainers()).at, default=0) >= settled,
            SETTLED_STEPS * STEP_S, f"{SETTLED_STEPS} more steps", living,
        )  # fmt: skip

        is_wan = self._namespaces is not None
        before = Usage.now(living, counts_bytes=counts_bytes, is_wan=is_wan)
        steady = self._pass(self._durations.steady_s, living)
        after = Usage.now(living, counts_bytes=counts_bytes, is_wan=is_wan)
        memory = [sum(map(pss_bytes, process.alive())) for process in living]

        victim = living.pop(1)
        victim.kill()
        killed_at = self._lived_until[victim.rank] = time.monotonic()
        after_kill = self._pass(self._durations.after_kill_s, living)

        newcomer = self._start(self._num_peers)
        with_newcomer = self._pass(self._durations.newcomer_s, [*living, newcomer])
        living.append(newcomer)

        exit_s, left = self._end(living, first)
        self._lived_until |= {process.rank: with_newcomer.end for process in living}

        trainers = {trainer.rank: trainer for trainer in self._trainers()}
        steps = Steps(trainers.values())
        began_with = [trainer for rank, trainer in trainers.items() if rank < self._num_peers]
        survivors = [trainer for trainer in began_with if trainer.rank != victim.rank]
        num_steady = len(steps.within(steady))
        sent = (
            after.bytes_sent - before.bytes_sent
            if before.bytes_sent is not None and after.bytes_sent is not None
            else None
        )
        cpu_s = after.cpu_s - before.cpu_s
        return {
            **steady_figures(began_with, steps, steady, self._task.target),
            **heldout_losses(self._task, steps),
            "seconds_to_first_step": min(steps.at.values()) - started,
            **after_kill_figures(survivors, steady, Window(killed_at, after_kill.end)),
            **newcomer_figures(trainers[newcomer.rank], survivors, after_kill, with_newcomer),
            "partial_or_failed_rounds": partial_or_failed(
                list(trainers.values()), steps, self._lived_until, Window(steady.begin, with_newcomer.end)
            ),
            "bytes_per_peer": round(sent / self._num_peers / num_steady) if sent is not None and num_steady else None,
            "cores_per_peer": cpu_s / steady.seconds / self._num_peers,
            "pss_mb_per_peer": statistics.median(memory) / MB,
            "exit_s": exit_s,
            "left_after_exit": left,
            "others_cores": max(0.0, (after.machine_cpu_s - before.machine_cpu_s - cpu_s) / steady.seconds),
        }  # fmt: skip

    def _addresses(self, first: Process) -> list[str]:
        return next((event["addresses"] for event in first.events() if event["kind"] == "addresses"), [])

    def _have_all_contributed(self) -> bool:
        trainers = self._trainers()
        return all(any(event["contributed"] for event in trainer.of("step")) for trainer in trainers)

    def _end(self, living: Sequence[Process], first: Process) -> tuple[float | None, int]:
        """Send the signals; returns the seconds until nothing is left, and what is left after ``LEFT_S``."""
        everything = [*living, first]
        began = time.monotonic()
        for number, process in enumerate(everything):
            if number % 2 == 0:
                process.signal_group(signal.SIGINT)
            else:
                process.signal_main(signal.SIGTERM)
        left, exit_s = None, None
        while exit_s is None and (passed_s := time.monotonic() - began) < EXIT_S:
            num = sum(len(process.alive()) for process in everything)
            if num == 0:
                exit_s = passed_s
            if left is None and (passed_s >= LEFT_S or num == 0):
                left = num
            time.sleep(POLL_S)
        assert left is not None
        return exit_s, left


def heldout_losses(task: Task, steps: Steps) -> dict[str, float | None]:
    """The loss at each mark, from the parameters that are kept on both sides of it."""
    model = new_model(task.folder)
    model.eval()
    heldout = torch.load(Path(task.folder) / "heldout.pt")
    kept: dict[int, torch.Tensor | Path] = {0: model_parameters(model)}
    kept |= {
        number: kept_path(task.folder, number) for number in steps.samples if kept_path(task.folder, number).exists()
    }
    used = {number: steps.used_until(number) for number in kept}
    losses: dict[int, float] = {}
    result: dict[str, float | None] = {}
    for mark in MARKS:
        below = max((number for number in kept if used[number] <= mark), key=lambda number: used[number])
        above = min((number for number in kept if used[number] >= mark), key=lambda number: used[number], default=None)
        if above is None:
            break
        for number in {below, above} - losses.keys():
            losses[number] = loss_with(model, kept[number], heldout)
        result[f"heldout_loss_at_{mark}"] = at_samples({below: losses[below], above: losses[above]}, steps, mark)
    return result


def model_parameters(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return torch.nn.utils.parameters_to_vector(model.parameters()).clone()


def loss_with(model: torch.nn.Module, parameters: torch.Tensor | Path, heldout: dict[str, torch.Tensor]) -> float:
    vector = torch.load(parameters) if isinstance(parameters, Path) else parameters
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(vector, model.parameters())
        return float(loss_of(model, {name: values.long() for name, values in heldout.items()}))


# all runs


def prepare(folder: Path, setting: Setting, num_peers: int) -> int:
    """Write the model, the data of all trainers, and the held-out data; returns the number of parameters."""
    recipe = AlbertRecipe(batch_size=BATCH, num_heldout=NUM_HELDOUT, **setting.model)
    documents = load_documents(recipe.text)
    tokenizer = train_tokenizer(documents, recipe.vocab_size)
    samples = make_samples(documents, tokenizer, recipe)
    model = build_model(recipe, len(tokenizer), samples.vocabulary)
    (folder / "model.json").write_text(json.dumps(model.config.to_dict()))
    torch.save(model.state_dict(), folder / "initial.pt")
    for rank in range(num_peers + 1):
        batches = Batches(samples, recipe, f"trainer {rank}", is_padded=True)
        all_of_it = [next(batches) for _ in range(NUM_BATCHES)]
        joined = {name: torch.cat([batch[name] for batch in all_of_it]).int() for name in all_of_it[0]}
        torch.save(joined, folder / f"batches-{rank}.pt")
    torch.save({name: values.int() for name, values in heldout_batch(samples, recipe).items()}, folder / "heldout.pt")
    return sum(parameter.numel() for parameter in model.parameters())


@contextlib.contextmanager
def network(setting: Setting, num_peers: int) -> Iterator[list[str] | None]:
    """The namespaces of the first peer, the trainers and the newcomer; None without an emulated network."""
    if setting.line is None:
        yield None
        return
    with star(num_peers + 2, setting.line) as names:
        yield names


def row_of(
    system: str, mode: str, target: int, setting: Setting, options: argparse.Namespace, shown: Shown, inputs: Path,
    num_params: int, *, counts_bytes: bool,
) -> Row:  # fmt: skip
    """Make the runs of one row."""
    rows: list[Row] = []
    reasons: list[str] = []
    for number in range(options.runs):
        name = f"{system}-{mode}-{target}-{number + 1}"
        shown.begin(f"{system}, {mode}, target {target}: run {number + 1} of {options.runs}")
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            if options.folder is not None:
                folder = options.folder / name
                folder.mkdir()
            for path in inputs.iterdir():
                (folder / path.name).symlink_to(path)
            task = Task(
                str(folder), mode, target, BATCH, setting.learning_rate, setting.line is not None,
                keeper=options.peers - 1, kept_steps=max(1, KEPT_SAMPLES // target),
            )  # fmt: skip
            namespaces = stack.enter_context(network(setting, options.peers))
            durations = WAN if setting.line is not None else QUICK if options.quick else FULL
            one = Run(system, task, setting, options.peers, durations, namespaces)
            try:
                rows.append(one.figures(counts_bytes=counts_bytes))
            except RunFailed as error:
                reasons.append(str(error))
                print(f"{name} failed: {error}", file=sys.stderr)
    row: Row = {"system": system, "mode": mode, "target": target, "peers": options.peers, "params": num_params}
    row |= {"link": options.link, "runs": options.runs}
    found, spread = medians(rows)
    losses = {key.removeprefix("heldout_loss_at_"): found.pop(key) for key in list(found) if "heldout_loss_at_" in key}
    if rows:
        row |= found | {"heldout_loss_at_samples": losses, "spread": spread}
    if reasons:
        row |= {"failed_runs": len(reasons), "reasons": reasons}
    return row


def show(rows: Sequence[Row]) -> None:
    """Print the rows as the columns of a table."""
    table = Table(box=SIMPLE)
    table.add_column("")
    for row in rows:
        table.add_column(f"{row['system']}\n{row['mode']}\n{row['target']}", justify="right")
    hidden = {"system", "mode", "target", "spread", "reasons"}
    for name in dict.fromkeys(name for row in rows for name in row if name not in hidden):
        table.add_row(name, *(_text(row.get(name)) for row in rows))
    Console(width=max(100, 30 + 14 * len(rows))).print(table)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {one:.3f}" for key, one in value.items() if one is not None)
    return f"{value:.4g}" if isinstance(value, float) else str(value if value is not None else "")


def names_of(known: Sequence[str], kind: str) -> Callable[[str], list[str]]:
    """A parser of names, separated by commas."""

    def read(text: str) -> list[str]:
        names = list(dict.fromkeys(text.split(",")))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"no {kind} {unknown[0]!r}; there are {', '.join(known)}")
        return names

    return read


def targets_of(text: str) -> list[int]:
    """Targets, separated by commas."""
    targets = positive_ints(text)
    if min(targets) < BATCH:
        raise argparse.ArgumentTypeError(f"{text!r}: a target is at least one batch, {BATCH} samples")
    return targets


def peers_of(text: str) -> int:
    """The number of trainers at the start."""
    number = positive_int(text)
    if number < 3:
        raise argparse.ArgumentTypeError(f"{text!r}: at least 3, so that two are left after the kill")
    return number


def empty_folder(text: str) -> Path:
    """A folder that can be made, or is empty."""
    path = Path(text).absolute()
    try:
        path.mkdir(exist_ok=True)
        is_empty = not any(path.iterdir())
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error.strerror}") from error
    if not is_empty:
        raise argparse.ArgumentTypeError(f"{text!r} is not empty; name a new folder")
    return path


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--systems", type=names_of(SYSTEMS, "system"), default=SYSTEMS)
    parser.add_argument("--modes", type=names_of(MODES, "mode"), default=MODES)
    parser.add_argument("--peers", type=peers_of, default=4, help="trainers at the start (default: 4)")
    parser.add_argument("--target", type=targets_of, help="several (default: 256,64; with --link wan: 64)")
    parser.add_argument("--runs", type=positive_int, help="of each row (default: 3; with --quick: 1)")
    parser.add_argument("--quick", action="store_true", help="one short run of each row (with --link wan as long)")
    parser.add_argument("--link", choices=["wan"], help="emulated slow lines; as root")
    parser.add_argument("--folder", type=empty_folder, metavar="DIR", help="keep events and logs of all runs there")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    if sys.platform != "linux":
        parser.error("it needs Linux, to count the memory and the processes of a trainer")
    if "hivemind" in options.systems and importlib.util.find_spec("hivemind") is None:
        parser.error("hivemind is not installed: pip install -r benchmarks/requirements.txt, or --systems manyhands")
    if options.link is not None and (reason := why_not()) is not None:
        parser.error(reason)
    setting = SETTINGS[options.link]
    options.target = options.target or setting.targets
    options.runs = options.runs or (1 if options.quick else 3)
    if (cores := os.cpu_count() or 1) < options.peers + 1:
        print(
            f"{cores} cores for {options.peers + 1} processes: start-up takes longer than on a core each, and waits "
            "in step() have the time that a process waits for a core; paced batches leave the cores idle otherwise",
            file=sys.stderr,
        )
    counts_bytes = setting.line is not None or enter_own_network()
    cases = [
        (target, mode, system) for target in options.target for mode in options.modes for system in options.systems
    ]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as inputs, progress_of(len(cases) * options.runs) as shown:
        num_params = prepare(Path(inputs), setting, options.peers)
        for target, mode, system in cases:
            rows.append(
                row_of(
                    system, mode, target, setting, options, shown, Path(inputs), num_params, counts_bytes=counts_bytes
                )
            )
            write_json(options.json, rows)
    show(rows)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job ignores it, and so would trainers
    run(main)
