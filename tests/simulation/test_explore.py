"""A few hundred seeds of each scenario, and the runner that ``make sim`` starts."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from manyhands.testing import Host, World, at
from tests.simulation import explore
from tests.simulation.explore import run_seed
from tests.simulation.scenarios import SCENARIOS, Scenario

NUM_SEEDS = {"rpc": 220, "rounds": 16, "averages": 20, "dht": 30, "training": 30}
GROUP = 20
"""Seeds in one test: of the order of seconds each."""

GROUPS = [(name, first) for name, count in NUM_SEEDS.items() for first in range(0, count, GROUP)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("manyhands", "asyncio")]
    levels = [logger.level for logger in loggers]
    explore.quieten()
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize(("name", "first"), GROUPS)
def test_seeds_hold(name: str, first: int) -> None:
    outcomes = [run_seed(name, seed) for seed in range(first, min(first + GROUP, NUM_SEEDS[name]))]
    failed = [outcome.report() for outcome in outcomes if outcome.error]
    assert not failed, "\n" + "\n".join(failed)


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


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_a_real_scenario_is_replayed_event_by_event(name: str, tmp_path: Path) -> None:
    first = run_seed(name, 1)
    second = run_seed(name, 1, tmp_path / "log")
    assert first.digest == second.digest
    events = [line for line in (tmp_path / "log").read_text().splitlines() if not re.match(r"\S+ log: ", line)]
    assert len([line for line in events if re.match(r"\d+\.\d{6} ", line)]) == second.num_events


def test_many_seeds_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert explore.main(["--scenario", "rpc", "--seeds", "3", "--first", "1000"]) == 0
    assert "rpc: 3 seeds, 0 failed" in capsys.readouterr().out
