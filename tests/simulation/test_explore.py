"""A few seeds of each scenario, and the runner that ``make sim`` starts."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from manyhands.testing import Host, World, at
from tests.simulation import explore
from tests.simulation.explore import Outcome, run_seed
from tests.simulation.scenarios import SCENARIOS, Scenario
from tests.simulation.seed_processes import SeedProcesses
from tests.sweeps import few_of

NUM_SEEDS = {name: 8 if name == "rpc" else 1 for name in SCENARIOS}
"""`make sim` runs hundreds."""
REPLAYED = ("dht", "training")
"""A scenario without torch and one with it, both short: seed 1 of each runs twice, with torch in `make test-long`.
`make sim` replays the others."""
SLOW = ("averages", "local", "rounds", "routers", "state")
"""Their own files of tests have faults too, and these scenarios take seconds for a seed."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("manyhands", "asyncio")]
    levels = [logger.level for logger in loggers]
    explore.quieten()
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name in SLOW)) for name in SCENARIOS if name not in REPLAYED],
)
def test_scenarios_hold(name: str) -> None:
    outcomes = [run_seed(name, seed) for seed in range(1, 1 + NUM_SEEDS[name])]
    failed = [outcome.report() for outcome in outcomes if outcome.error]
    assert not failed, "\n" + "\n".join(failed)


@pytest.mark.parametrize(
    "name", [*few_of(REPLAYED, 1, pytest.mark.long), *few_of(sorted(set(SCENARIOS) - set(REPLAYED)), 0)]
)
def test_a_seed_replays_event_by_event(name: str, tmp_path: Path) -> None:
    first, replayed = run_seed(name, 1), run_seed(name, 1, tmp_path / "log")
    assert not first.error, first.report()
    assert replayed.digest == first.digest
    events = [line for line in (tmp_path / "log").read_text().splitlines() if not re.match(r"\S+ log: ", line)]
    assert len([line for line in events if re.match(r"\d+\.\d{6} ", line)]) == replayed.num_events


FAILED_ONCE = (1520, 117, 18, 1904, 1643, 625, 629)


@pytest.mark.parametrize(("name", "seed"), few_of([("rounds", seed) for seed in FAILED_ONCE]))
def test_scenarios_hold_for_seeds_that_failed_once(name: str, seed: int) -> None:
    """In these, peers that a fault had hit avoided each other in turn, for longer each time."""
    outcome = run_seed(name, seed)
    assert not outcome.error, outcome.report()


def breaking(seed: int) -> Scenario:
    """A world in which seeds above 1 break an invariant."""
    world = World(seed)
    good = [True]

    async def program(host: Host) -> None:
        for _ in range(10):
            await asyncio.sleep(world.rng("steps").random())
            world.trace.add(world.loop.time(), f"step of {host.name}")
        good[0] = seed < 2
        await asyncio.sleep(1.0)

    world.start("a", program)
    world.schedule(at(0.5).clock("a", 3))
    world.invariant("all is good", lambda: good[0])
    return Scenario(world, 20.0, lambda: None)


@pytest.fixture
def with_breaking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(SCENARIOS, "breaking", breaking)
    monkeypatch.setattr(explore, "LOG_DIR", tmp_path)
    return tmp_path


def test_a_failing_seed_says_how_to_replay_it(with_breaking: Path) -> None:
    outcome = run_seed("breaking", 2)
    report = outcome.report()
    assert "InvariantBroken: all is good does not hold after" in report
    assert "faults: at(0.5).clock('a', 3)" in report
    assert "replay: make sim SCENARIO=breaking SEED=2" in report
    assert not run_seed("breaking", 1).error


def test_a_replay_writes_the_same_events_to_a_file(with_breaking: Path) -> None:
    digest = run_seed("breaking", 2).digest
    console = Console(record=True, width=500)
    outcome = explore.replay("breaking", 2, console)
    assert outcome.digest == digest != run_seed("breaking", 3).digest
    lines = (with_breaking / "breaking-2.log").read_text().splitlines()
    assert len(lines) == outcome.num_events == 11
    assert "0.500000 at(0.5).clock('a', 3)" in lines
    text = console.export_text()
    assert digest in text
    assert lines[-1] in text
    assert "make sim SCENARIO=breaking SEED=2" in text


def spinning(seed: int) -> Scenario:
    """A world in which a peer of some seeds never gives the loop to anybody again, or ends its process."""
    world = World(seed)

    async def program(host: Host) -> None:
        await asyncio.sleep(1.0)
        world.trace.add(world.loop.time(), "awake")
        while seed == 1:
            pass
        if seed == 3:
            os._exit(7)

    world.start("a", program)
    return Scenario(world, 20.0, lambda: None)


def run_spinning(name: str, seed: int) -> Outcome:
    """In a process of its own."""
    SCENARIOS[name] = spinning
    return run_seed(name, seed)


@pytest.mark.long
def test_a_seed_that_spins_or_crashes_is_reported_and_the_next_ones_run() -> None:
    with SeedProcesses(run_spinning, explore.lost, num_processes=2, bound_s=6.0) as processes:
        outcomes = sorted(processes.results([("spin", seed) for seed in range(6)]), key=lambda outcome: outcome.seed)
    assert [outcome.seed for outcome in outcomes if not outcome.error] == [0, 2, 4, 5]
    spun, crashed = outcomes[1], outcomes[3]
    assert spun.error.startswith("it ran for more than 6 s of real time:")
    assert re.search(r'test_explore.py", line \d+ in program', spun.error)
    assert "replay: make sim SCENARIO=spin SEED=1" in spun.report()
    assert crashed.error == "its process ended with status 7"


@pytest.mark.long
def test_a_replay_that_spins_ends_with_its_stack_and_its_log(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from rich.console import Console
from tests.simulation import explore
from tests.simulation.test_explore import SCENARIOS, spinning
SCENARIOS["spin"] = spinning
explore.LOG_DIR = Path({str(tmp_path)!r})
explore.replay("spin", 1, Console(), 1.0)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60.0, check=False)
    assert result.returncode == 1
    assert re.search(r'test_explore.py", line \d+ in program', result.stderr)
    assert "1.000000 awake" in (tmp_path / "spin-1.log").read_text()


@pytest.mark.long
def test_the_explorer_runs_several_seeds_and_counts_failures(capsys: pytest.CaptureFixture[str]) -> None:
    assert explore.main(["--scenario", "rpc", "--seeds", "3", "--first", "1000"]) == 0
    assert "rpc: 3 seeds, 0 failed" in capsys.readouterr().out
