"""Runs scenarios with many seeds, and replays one with its event log.

    python -m tests.simulation.explore --seeds 200            # 200 seeds of each scenario
    python -m tests.simulation.explore --scenario dht --first 1000 --seeds 50
    python -m tests.simulation.explore --scenario dht --seed 7   # replays one; the log goes to build/sim/dht-7.log

``make sim`` is the short way.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from manyhands.testing import World
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.seed_processes import Job, SeedProcesses

LOG_DIR = Path("build/sim")
MAX_WORKERS = os.cpu_count() or 1
SHOWN_LINES = 30
SEED_TIMEOUT_S = 300.0
"""Of real time: seeds take seconds."""
MAX_SEED_TIMEOUT_S = 86_400.0


@dataclass(frozen=True)
class Outcome:
    """How one seed of one scenario went.

    Attributes:
        error: why it failed; empty if it did not.
        digest: of the trace: equal for equal seeds; empty if its process did not come to the end of it.
    """

    scenario: str
    seed: int
    error: str
    schedule: str
    digest: str
    num_events: int
    virtual_s: float
    wall_s: float

    def replay_command(self) -> str:
        """What shows this again, with its event log."""
        return f"make sim SCENARIO={self.scenario} SEED={self.seed}"

    def report(self) -> str:
        """What went wrong, and how to see it again."""
        when = f" at {self.virtual_s:.3f} virtual seconds" if self.digest else ""
        faults = f"  faults: {self.schedule}\n" if self.digest else ""
        return (
            f"scenario {self.scenario}, seed {self.seed}: failed{when}\n"
            f"  {self.error}\n{faults}  replay: {self.replay_command()}"
        )


def run_seed(name: str, seed: int, log: Path | None = None) -> Outcome:
    """Run one scenario with one seed; every event goes to ``log``."""
    started = time.perf_counter()
    scenario = SCENARIOS[name](seed)
    world = scenario.world
    error = ""
    with contextlib.ExitStack() as stack:
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            world.trace.log = stack.enter_context(log.open("w", buffering=1))
            world.trace.flush_at = 1  # they are there also if the seed spins, and its process is ended
            stack.callback(world.trace.close_log)
            stack.enter_context(_library_log(world))
        try:
            scenario.run()
        except Exception as failure:  # noqa: BLE001 (this is what the runner reports)
            error = f"{type(failure).__name__}: {failure}"
    return Outcome(
        name, seed, error, world.schedule_text(), world.trace.digest(), world.trace.num_events, world.loop.now,
        time.perf_counter() - started,
    )  # fmt: skip


@contextlib.contextmanager
def _library_log(world: World) -> Iterator[None]:
    """Put what the library logs among the events."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if world.trace.log is not None:
                world.trace.flush()
                world.trace.log.write(f"{world.loop.now:.6f} log: {self.format(record)}\n")

    logger, handler = logging.getLogger("manyhands"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def explore(
    names: Sequence[str], seeds: Iterable[int], num_workers: int, console: Console, seed_timeout_s: float
) -> list[Outcome]:
    """Run seeds of scenarios, and print each failure when it happens; Ctrl-C returns what there is so far."""
    jobs = [(name, seed) for seed in seeds for name in names]
    done: list[Outcome] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console) as progress,
        SeedProcesses(_run_quietly, lost, num_processes=num_workers, bound_s=seed_timeout_s) as processes,
    ):
        bar = progress.add_task("seeds", total=len(jobs))

        def note(outcome: Outcome) -> None:
            done.append(outcome)
            num_failed = sum(bool(one.error) for one in done)
            progress.update(bar, advance=1, description=f"{num_failed} failed" if num_failed else "seeds")
            if outcome.error:
                progress.console.print(outcome.report(), markup=False, highlight=False, soft_wrap=True)

        try:
            for outcome in processes.results(jobs):
                note(outcome)
        except KeyboardInterrupt:
            progress.console.print("stopping; the seeds that run now are finished first")
            for outcome in processes.results([]):
                note(outcome)
    return done


def _run_quietly(name: str, seed: int) -> Outcome:
    quieten()
    return run_seed(name, seed)


def lost(job: Job, reason: str, wall_s: float) -> Outcome:
    """Of a seed whose process ended, or was ended since the seed spun."""
    name, seed = job
    return Outcome(name, seed, reason, schedule="", digest="", num_events=0, virtual_s=0.0, wall_s=wall_s)


def quieten() -> None:
    """What the library says about faults is not wanted here."""
    for name in ("manyhands", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def replay(name: str, seed: int, console: Console, seed_timeout_s: float = SEED_TIMEOUT_S) -> Outcome:
    """Run one seed, write its events to a file, and show the last of them.

    If it spins, this process shows where, and ends with status 1.
    """
    log = LOG_DIR / f"{name}-{seed}.log"
    faulthandler.dump_traceback_later(seed_timeout_s, exit=True, file=sys.__stderr__)
    try:
        outcome = run_seed(name, seed, log)
    finally:
        faulthandler.cancel_dump_traceback_later()
    if outcome.error:
        with log.open() as file:
            tail = list(file)[-SHOWN_LINES:]
        console.print("".join(tail), markup=False, highlight=False, soft_wrap=True)
        console.print(outcome.report(), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{outcome.num_events} events, all in {log}; trace {outcome.digest}", soft_wrap=True)
    return outcome


def summarize(done: Sequence[Outcome], console: Console) -> None:
    """One line for each scenario."""
    for name in SCENARIOS:
        mine = [outcome for outcome in done if outcome.scenario == name]
        if mine:
            wall_s = sum(outcome.wall_s for outcome in mine)
            console.print(
                f"{name}: {len(mine)} seeds, {sum(bool(o.error) for o in mine)} failed, "
                f"{wall_s / len(mine):.2f} s each, the slowest {max(o.wall_s for o in mine):.2f} s; "
                f"{sum(o.virtual_s for o in mine) / max(wall_s, 1e-9):.0f} virtual seconds in one"
            )
    if failed := [outcome for outcome in done if outcome.error]:
        console.print("replay: " + "; ".join(outcome.replay_command() for outcome in failed[:5]), soft_wrap=True)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= MAX_SEED_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most {MAX_SEED_TIMEOUT_S:g}")
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if all seeds held."""
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--scenario", choices=[*SCENARIOS, "all"], default="all")
    parser.add_argument("--seeds", type=int, default=200, help="how many, of each scenario")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay this one, with its event log")
    parser.add_argument("--workers", type=int, choices=range(1, MAX_WORKERS + 1), default=min(2, MAX_WORKERS))
    parser.add_argument(
        "--seed-timeout", type=_seconds, metavar="SECONDS", default=SEED_TIMEOUT_S,
        help=f"real time for one seed (default {SEED_TIMEOUT_S:g}); one that takes longer has failed",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    names = list(SCENARIOS) if options.scenario == "all" else [options.scenario]
    console = Console()
    if options.seed is not None:
        quieten()
        return int(any(replay(name, options.seed, console, options.seed_timeout).error for name in names))
    seeds = range(options.first, options.first + options.seeds)
    done = explore(names, seeds, options.workers, console, options.seed_timeout)
    summarize(done, console)
    return int(len(done) < len(names) * options.seeds or any(outcome.error for outcome in done))


if __name__ == "__main__":
    sys.exit(main())
