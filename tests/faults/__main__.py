"""Kills and stops real processes in each phase of a round: ``make test-faults``.

    python -m tests.faults                 # all cases
    python -m tests.faults --case half     # those with this in their name
    python -m tests.faults --case leaks    # 200 rounds that fail in one process: what they leave behind

Each case is a round of four processes on loopback, of which one sends itself SIGKILL or SIGSTOP. All others must hold
the same mean, in the bound that docs/explanation/rounds.md promises: of this round, or of the next if the leader died.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.faults import leaks
from tests.faults.member import PHASES, Report, identity_of, run

NUM_MEMBERS = 4
ROLES = {"leader": 0, "reducer": 1}
START_S = 60.0
END_S = 45.0
KILL_BOUND_S = {"before": 8.0, "joining": 8.0}
BOUND_S = 3.0
STOP_BOUND_S = 15.0
LEAKS = "leaks"
STOPPED_IN = ("first chunk sent", "half sent", "before commit")


@dataclass(frozen=True)
class Case:
    """A fault of one member."""

    phase: str
    role: str
    fault: signal.Signals

    def __str__(self) -> str:
        return f"{self.fault.name} {self.role}, {self.phase}"

    @property
    def bound_s(self) -> float:
        """From the fault to the last commit; generous, since the machine may be busy."""
        return STOP_BOUND_S if self.fault == signal.SIGSTOP else KILL_BOUND_S.get(self.phase, BOUND_S)


@dataclass(frozen=True)
class Outcome:
    """What came of a case; ``problem`` is empty if it is as promised."""

    case: Case
    seconds: float
    problem: str


def cases() -> list[Case]:
    """One kill for each phase and role, and some stops."""
    kills = [Case(phase, role, signal.SIGKILL) for phase in PHASES for role in ROLES]
    return kills + [Case(phase, role, signal.SIGSTOP) for phase in STOPPED_IN for role in ROLES]


def run_case(context: Any, case: Case) -> Outcome:
    """Run one round; no process outlives it."""
    numbers = sorted(range(NUM_MEMBERS), key=lambda number: identity_of(number).peer_id)
    victim = numbers[ROLES[case.role]]
    pipes: dict[int, Connection] = {}
    processes = []
    try:
        for number in numbers:
            pipes[number], other_end = context.Pipe()
            fault = case.fault if number == victim else None
            process = context.Process(target=run, args=(number, case.phase, fault, other_end), daemon=True)
            process.start()
            other_end.close()
            processes.append(process)
        return _observe(case, victim, pipes)
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        for pipe in pipes.values():
            pipe.close()


def _observe(case: Case, victim: int, pipes: dict[int, Connection]) -> Outcome:
    addresses = {}
    for pipe in pipes.values():
        if not pipe.poll(START_S):
            return Outcome(case, 0.0, "a process did not start")
        peer_id, where = pipe.recv()
        addresses[peer_id] = where
    for pipe in pipes.values():
        pipe.send(addresses)
    fault_s = pipes[victim].recv() if pipes[victim].poll(END_S) else None
    if not isinstance(fault_s, float):
        return Outcome(case, 0.0, "the phase was never reached")
    waiting = {pipe: number for number, pipe in pipes.items() if number != victim}
    reports: list[Report] = []
    while waiting:
        ready = wait(list(waiting), timeout=END_S)
        if not ready:
            return Outcome(case, END_S, f"{len(waiting)} members hang")
        for end in ready:
            assert isinstance(end, Connection)
            reports.append(end.recv())
            del waiting[end]
    seconds = max(report.time for report in reports) - fault_s
    if aborted := [report.reason for report in reports if not report.digest]:
        return Outcome(case, seconds, f"{len(aborted)} do not hold the mean: {aborted[0]}")
    if len({report.digest for report in reports}) > 1:
        return Outcome(case, seconds, "they hold different means")
    if case.role != "leader" and any(report.num_attempts > 1 for report in reports):
        return Outcome(case, seconds, "the death of a member aborted the round")
    return Outcome(case, seconds, f"later than {case.bound_s:g} s" if seconds > case.bound_s else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if all is as promised."""
    parser = argparse.ArgumentParser(prog="make test-faults", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--case", default="", help="only cases with this in their name")
    name = parser.parse_args(arguments).case
    chosen = [case for case in cases() if name in str(case)]
    console = Console()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.member"])
    outcomes = []
    for number, case in enumerate(chosen, 1):
        outcome = run_case(context, case)
        outcomes.append(outcome)
        console.print(f"{number}/{len(chosen)} {case}: {outcome.seconds:.2f} s {outcome.problem or 'ok'}", markup=False)
    if outcomes:
        _show(outcomes, console)
    problem = _look_for_leaks(console) if name in LEAKS else ""
    return int(any(outcome.problem for outcome in outcomes) or bool(problem) or not (outcomes or name in LEAKS))


def _look_for_leaks(console: Console) -> str:
    """What rounds that fail leave behind, in words; empty if nothing."""
    logging.getLogger("manyhands").setLevel(logging.ERROR)  # whoever breaks off is told of by all others
    console.print("Looking for what failed rounds leave behind, for some minutes")
    before, after, num_rounds = asyncio.run(leaks.measure())
    problem = leaks.problem_of(before, after)
    num_failed = leaks.NUM_SWARMS * leaks.NUM_ROUNDS
    console.print(f"{num_failed} failed rounds of {num_rounds} in one process: {problem or 'no leak'}", markup=False)
    console.print(f"before: {before}; after: {after}", markup=False)
    return problem


def _show(outcomes: Sequence[Outcome], console: Console) -> None:
    table = Table("fault", "member", "phase", "seconds to the commit of all others", "")
    for outcome in outcomes:
        case = outcome.case
        table.add_row(case.fault.name, case.role, case.phase, f"{outcome.seconds:.2f}", outcome.problem or "ok")
    console.print(table)
    killed = [
        outcome.seconds
        for outcome in outcomes
        if outcome.case.fault == signal.SIGKILL and outcome.case.phase not in KILL_BOUND_S and not outcome.problem
    ]
    if killed:
        console.print(f"from a death in a formed group to the last commit: p50 {statistics.median(killed):.2f} s")
    console.print(f"{sum(not outcome.problem for outcome in outcomes)} of {len(outcomes)} as promised")


if __name__ == "__main__":
    sys.exit(main())
