"""Peers in processes of their own, of which one freezes, or has a wrong clock, or is slow, or that all come at once.

    python -m tests.faults.steps                 # all cases; `make test-step-faults`
    python -m tests.faults.steps --case clock    # those with this in their name

After each fault the loss goes on falling, nobody waits for long, and the peer takes part again. The same cases in
virtual time, and more of them: ``tests/simulation/test_step_faults.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

import manyhands
from manyhands.averaging import AveragingConfig
from manyhands.optim import ProgressConfig
from manyhands.peer import Presence
from tests.process.commands import Command
from tests.smaller import make_smaller, smaller
from tests.trainers import BATCH_SIZE, FAST, LISTEN, Trainer, in_threads, new_model

CHILD = "import sys; from tests.faults.steps import run; run(*sys.argv[1:])"
CASE_LIMIT_S = 240.0
WAIT_LIMIT_S = 75.0
"""A round and its verdict take at most so long."""
BATCH_S = 0.1
TARGET = 240
HOUR_S = 3600.0
WRONG_S = 12.0
FROZEN_S = 30.0
NUM_CROWD, NUM_PROCESSES = 20, 4
SLOW_BATCH_S = 4.0
PATIENT = AveragingConfig(matchmaking_time_s=10.0, averaging_timeout_s=40.0)


def quadratic(model: torch.nn.Module) -> torch.Tensor:
    return sum((parameter - 1).square().mean() for parameter in model.parameters())  # type: ignore[return-value]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def train(trainer: Trainer, until: Callable[[], object], batch_s: float = BATCH_S) -> float:
    """Train until something holds; the longest call of ``step`` in seconds."""
    deadline, longest_s = time.monotonic() + CASE_LIMIT_S, 0.0
    while not until():
        assert time.monotonic() < deadline, f"it did not come about: {trainer.optimizer.statistics}"
        time.sleep(batch_s)
        quadratic(trainer.model).backward()
        began = time.monotonic()
        trainer.optimizer.step()
        longest_s = max(longest_s, time.monotonic() - began)
        trainer.optimizer.zero_grad()
        trainer.check_samples()
    return longest_s


def say(trainer: Trainer) -> None:
    """One line of facts for the process that started this one."""
    optimizer, counts = trainer.optimizer, trainer.optimizer.statistics
    members = len(optimizer.last_round.members) if optimizer.last_round is not None else 1
    facts = {"step": optimizer.global_step, "members": members, "loaded": counts.states_loaded,
             "used": counts.samples_used, "committed": counts.rounds_committed}  # fmt: skip
    words = ["facts", *(f"{name}={value}" for name, value in facts.items())]
    sys.stdout.write(" ".join(words) + "\n")  # in one piece: other threads write too
    sys.stdout.flush()


def facts_of(command: Command) -> dict[str, int]:
    """The next line of facts."""
    words = command.wait_for("facts").split()[1:]
    return {name: int(value) for name, _, value in (word.partition("=") for word in words)}


# what the processes do


def live(*initial_peers: str) -> None:
    """Train for ever, and say how it goes."""
    with manyhands.Peer(initial_peers=initial_peers, listen=LISTEN) as peer:
        go_on(Trainer(peer, "faults", TARGET, make=sgd, progress=FAST))


def go_on(trainer: Trainer, batch_s: float = BATCH_S) -> None:
    while True:
        step = trainer.optimizer.global_step
        train(trainer, lambda step=step: trainer.optimizer.global_step > step, batch_s)  # type: ignore[misc]
        say(trainer)


def live_with_a_clock(folder: str, *initial_peers: str) -> None:
    """The clock is wrong by as many seconds as a file says."""
    defaults: Any = Presence.__init__.__kwdefaults__

    def clock() -> float:
        with contextlib.suppress(OSError, ValueError):
            return time.time() + float((Path(folder) / "wrong_s").read_text())
        return time.time()

    defaults["wall_clock"] = clock
    live(*initial_peers)


def live_slowly(*initial_peers: str) -> None:
    with manyhands.Peer(initial_peers=initial_peers, listen=LISTEN) as peer:
        trainer = Trainer(peer, "faults", 2 * BATCH_SIZE, make=sgd, averaging=PATIENT, progress=ProgressConfig())
        go_on(trainer, SLOW_BATCH_S)


def live_as_a_crowd(folder: str, *initial_peers: str) -> None:
    """Several peers, which join when a file is there."""
    torch.set_num_threads(1)
    num_peers = NUM_CROWD // NUM_PROCESSES
    print("ready", flush=True)
    while not (Path(folder) / "go").exists():
        time.sleep(0.01)

    def one() -> None:
        with manyhands.Peer(initial_peers=initial_peers, listen=LISTEN) as peer:
            go_on(Trainer(peer, "faults", TARGET, make=sgd, averaging=PATIENT, progress=ProgressConfig()), 0.2)

    in_threads([one] * num_peers, timeout_s=CASE_LIMIT_S)


PROGRAMS: dict[str, Callable[..., None]] = {
    "live": live, "clock": live_with_a_clock, "slow": live_slowly, "crowd": live_as_a_crowd,
}  # fmt: skip


def run(program: str, *arguments: str) -> None:
    """In a process of its own."""
    make_smaller(span_numel=1)  # all members reduce
    PROGRAMS[program](*arguments)


@contextlib.contextmanager
def started(program: str, *arguments: str) -> Any:
    command = Command(["-c", CHILD, program, *arguments], module=None)
    try:
        yield command
    finally:
        command.close()


@contextlib.contextmanager
def survivors(num_peers: int, target: int = TARGET, **options: Any) -> Any:
    """Trainers in this process."""
    with smaller(span_numel=1), contextlib.ExitStack() as stack:
        peers = [stack.enter_context(manyhands.Peer(listen=LISTEN))]
        for _ in range(num_peers - 1):
            peers.append(stack.enter_context(manyhands.Peer(initial_peers=peers[0].addresses, listen=LISTEN)))
        yield [Trainer(peer, "faults", target, make=sgd, **options) for peer in peers]


def beside(trainers: Sequence[Trainer], watch: Callable[[], None], batch_s: float = BATCH_S) -> None:
    """Train while a fault takes its course; then the loss must have fallen, and nobody may have waited for long."""
    is_over = threading.Event()
    waits_s: list[float] = []

    def watching() -> None:
        try:
            watch()
        finally:
            is_over.set()

    training = [lambda t=trainer: waits_s.append(train(t, is_over.is_set, batch_s)) for trainer in trainers]
    in_threads([watching, *training], timeout_s=CASE_LIMIT_S)
    assert max(waits_s) < WAIT_LIMIT_S, waits_s
    for trainer in trainers:
        counts = trainer.optimizer.statistics
        assert quadratic(trainer.model) < 0.8 * quadratic(new_model()), "it learns"
        assert counts.samples_dropped <= 0.05 * counts.samples_computed, counts


# the cases


def clock_jumps(wrong_s: float) -> None:
    """Its records count nowhere then; the others go on, and take it back when its clock is right."""
    with (
        tempfile.TemporaryDirectory() as folder,
        survivors(2) as trainers,
        started("clock", folder, *trainers[0].peer.addresses) as command,
    ):

        def watch() -> None:
            while facts_of(command)["members"] < 3:
                pass
            before = trainers[0].optimizer.global_step
            (Path(folder) / "wrong_s").write_text(str(wrong_s))
            time.sleep(WRONG_S)
            assert trainers[0].optimizer.global_step > before, "the others go on"
            (Path(folder) / "wrong_s").write_text("0")
            right_at = trainers[0].optimizer.global_step
            while (facts := facts_of(command))["members"] < 3 or facts["step"] <= right_at:
                pass

        beside(trainers, watch)
        assert all(trainer.optimizer.statistics.steps_alone == 0 for trainer in trainers[1:])


def frozen() -> None:
    """It notices that it is behind, loads the state, and goes on."""
    with survivors(2) as trainers, started("live", *trainers[0].peer.addresses) as command:

        def watch() -> None:
            while facts_of(command)["members"] < 3:
                pass
            before, process = trainers[0].optimizer.global_step, psutil.Process(command.pid)
            process.suspend()
            time.sleep(FROZEN_S)
            process.resume()
            thawed_at = trainers[0].optimizer.global_step
            assert thawed_at > before + 1, "the others go on"
            while (facts := facts_of(command))["loaded"] < 1 or facts["members"] < 3 or facts["step"] <= thawed_at:
                pass

        beside(trainers, watch)


def crowd() -> None:
    """All come at the same moment, to a run that one peer has begun."""
    with (
        tempfile.TemporaryDirectory() as folder,
        survivors(1, averaging=PATIENT, progress=ProgressConfig()) as trainers,
        contextlib.ExitStack() as stack,
    ):
        addresses = trainers[0].peer.addresses
        commands = [stack.enter_context(started("crowd", folder, *addresses)) for _ in range(NUM_PROCESSES)]

        def watch() -> None:
            for command in commands:
                command.wait_for("ready")
            (Path(folder) / "go").touch()
            for command in commands:
                while facts_of(command)["members"] < NUM_CROWD - 1:
                    pass
            last_step = trainers[0].optimizer.global_step + 5
            while facts_of(commands[0])["step"] < last_step:
                pass

        beside(trainers, watch, 0.2)


def fast_and_slow() -> None:
    """The fast one reaches the target before the first batch of the slow one, which takes part all the same."""
    with (
        survivors(1, 2 * BATCH_SIZE, averaging=PATIENT, progress=ProgressConfig()) as trainers,
        started("slow", *trainers[0].peer.addresses) as command,
    ):

        def watch() -> None:
            facts = facts_of(command)
            while facts["committed"] < 4:
                facts = facts_of(command)
            assert facts["used"] >= 3 * BATCH_SIZE, facts
            assert facts["loaded"] <= 2, facts

        beside(trainers, watch)


CASES: dict[str, Callable[[], None]] = {
    "a clock jumps forward by an hour": lambda: clock_jumps(HOUR_S),
    "a clock jumps back by an hour": lambda: clock_jumps(-HOUR_S),
    "a process is frozen for 30 s": frozen,
    "20 peers join at once": crowd,
    "a fast peer beside a slow one": fast_and_slow,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if all is as promised."""
    parser = argparse.ArgumentParser(
        prog="make test-step-faults", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--case", default="", help="only cases with this in their name")
    chosen = {name: case for name, case in CASES.items() if parser.parse_args(arguments).case in name}
    console, num_failed = Console(), 0
    for name, case in chosen.items():
        began, problem = time.monotonic(), "ok"
        try:
            case()
        except (AssertionError, manyhands.ManyhandsError, pytest.fail.Exception) as error:
            problem, num_failed = str(error) or "an assertion failed", num_failed + 1
        console.print(f"{name}: {time.monotonic() - began:.0f} s {problem}", markup=False)
    console.print(f"{len(chosen) - num_failed} of {len(chosen)} as promised")
    return int(num_failed > 0 or not chosen)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
