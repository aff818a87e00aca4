"""The deterministic world keeps its own promises."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from manyhands.base.errors import ConfigError
from manyhands.testing import Deadlock, Host, InvariantBroken, VirtualLoop, VirtualTimeout, World, at, between, every

TRACES_ELSEWHERE = """
import os
elsewhere = [object() for _ in range(1000 * int(os.environ["PYTHONHASHSEED"]))]  # so all else has other addresses
from tests.simulation.explore import quieten, run_seed
quieten()
for name, seed in [("rpc", 1), ("rpc", 2), ("dht", 1), ("training", 1)]:
    print(name, run_seed(name, seed).digest)

from tests.simulation import test_firewalled
swarms = []

class Kept(test_firewalled.Swarm):
    def __post_init__(self):
        super().__post_init__()
        swarms.append(self)

test_firewalled.Swarm = Kept
test_firewalled.test_a_late_helper_is_given_the_state_by_firewalled_peers()
print("firewalled", swarms[0].world.trace.digest())
"""


async def sleep_for_ever() -> None:
    while True:
        await asyncio.sleep(1.0)


async def wait_for_nothing() -> None:
    await asyncio.Event().wait()


def test_virtual_time_jumps_over_sleeps() -> None:
    async def main() -> float:
        await asyncio.sleep(86_400.0)
        return asyncio.get_running_loop().time()

    assert VirtualLoop().run(main(), limit_s=100_000.0) == 86_400.0


def test_a_deadlock_names_the_line_that_waits() -> None:
    with pytest.raises(Deadlock, match=r"main at test_world\.py:\d+"):
        VirtualLoop().run(wait_for_nothing())


def test_a_world_that_goes_on_for_ever_ends() -> None:
    with pytest.raises(VirtualTimeout, match=r"not done after 50 virtual seconds; waiting: main at test_world\.py:\d+"):
        VirtualLoop().run(sleep_for_ever(), limit_s=50.0)


def test_executor_jobs_take_the_modelled_time() -> None:
    async def main() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(None, lambda: 7)
        return result, loop.time()

    assert VirtualLoop(executor_cost_s=lambda job: 2.5).run(main()) == (7, 2.5)


def ticking_world(seed: int = 0) -> tuple[World, list[tuple[str, float]]]:
    """Three hosts that say their name and the time once a second."""
    world = World(seed)
    ticks: list[tuple[str, float]] = []

    async def tick(host: Host) -> None:
        while True:
            ticks.append((host.name, asyncio.get_running_loop().time()))
            await asyncio.sleep(1.0)

    for name in ("a", "b", "c"):
        world.start(name, tick)
    return world, ticks


def times_of(ticks: list[tuple[str, float]], name: str) -> list[float]:
    return [time for who, time in ticks if who == name]


def test_a_killed_host_is_silent_until_it_is_restarted() -> None:
    world, ticks = ticking_world()
    world.schedule(at(2.5).kill("b"), at(5.25).restart("b"))
    world.run(8.0)
    assert times_of(ticks, "b") == [0.0, 1.0, 2.0, 5.25, 6.25, 7.25]
    assert len(times_of(ticks, "a")) == 8 or len(times_of(ticks, "a")) == 9


def test_the_clean_up_of_a_killed_host_never_runs() -> None:
    world = World(0)
    cleaned: list[str] = []

    async def tidy(host: Host) -> None:
        try:
            await sleep_for_ever()
        finally:
            cleaned.append(host.name)

    world.start("a", tidy)
    world.schedule(at(1.5).kill("a"))

    async def story() -> list[str]:
        await asyncio.sleep(10.0)
        return list(cleaned)

    assert world.story(story()) == []


def test_a_frozen_host_catches_up_when_it_thaws() -> None:
    world, ticks = ticking_world()
    world.schedule(between(1.5, 4.25).freeze("c"))
    world.run(6.0)
    assert times_of(ticks, "c")[:4] == [0.0, 1.0, 4.25, 5.25]


def test_a_timer_that_is_cancelled_before_its_turn_after_a_freeze_does_not_run() -> None:
    world = World(0)
    fired: list[float] = []

    async def wait(host: Host) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_at(2.0, lambda: fired.append(loop.time()))
        loop.call_at(1.5, timer.cancel)  # both become due in the freeze
        await asyncio.sleep(10.0)

    world.start("a", wait)
    world.schedule(between(1.0, 5.0).freeze("a"))
    world.run(9.0)
    assert fired == []


def test_an_invariant_is_checked_after_each_fault_and_named() -> None:
    world, _ = ticking_world()
    world.invariant("b lives", lambda: world.host("b").is_alive)
    world.schedule(at(3).kill("b"))
    with pytest.raises(InvariantBroken, match=r"b lives does not hold after “at\(3\)\.kill\('b'\)”, at 3\.0+ s"):
        world.run(10.0)


def test_an_exception_of_a_program_ends_the_world() -> None:
    async def fail(host: Host) -> None:
        await asyncio.sleep(1.0)
        raise ZeroDivisionError

    world = World(0)
    world.start("a", fail)
    with pytest.raises(ZeroDivisionError):
        world.run(5.0)


def test_faults_read_as_they_were_written() -> None:
    faults = [
        at(12.5).kill("c"),
        between(3, 9).partition({"b", "a"}, {"c"}),
        every(30).reset("a", "b"),
        at(4).clock("a", -60),
    ]
    assert [str(fault) for fault in faults] == [
        "at(12.5).kill('c')",
        "between(3, 9).partition({'a', 'b'}, {'c'})",
        "every(30).reset('a', 'b')",
        "at(4).clock('a', -60)",
    ]


def test_faults_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="the second time must be later"):
        between(9, 3)
    with pytest.raises(ConfigError, match=r"cannot be undone; write at\(1\) instead"):
        between(1, 2).kill("a")
    with pytest.raises(ConfigError, match="is not a virtual time"):
        at(-1)
    world, _ = ticking_world()
    world.schedule(at(1).kill("d"))
    with pytest.raises(ConfigError, match="no host is called 'd'; the hosts are: a, b, c"):
        world.run(5.0)


def test_the_wall_clocks_of_hosts_differ_as_told() -> None:
    world, _ = ticking_world()
    world.schedule(between(1, 2).clock("a", 60.0))
    seen: list[float] = []

    def look() -> None:
        seen.append(world.host("a").wall_clock() - world.host("b").wall_clock())

    for time in (0.5, 1.5, 2.5):
        world.schedule(at(time).call(look))
    world.run(3.0)
    assert seen == [0.0, 60.0, 0.0]


@pytest.mark.long
def test_the_same_seed_gives_the_same_trace_in_every_process() -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", TRACES_ELSEWHERE],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("1", "77")
    ]
    outputs = {run.communicate()[0] for run in runs}
    assert all(run.returncode == 0 for run in runs)
    assert len(outputs) == 1
    assert len(set(outputs.pop().split())) == 9, "four names and five digests"
