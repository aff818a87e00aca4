"""Faults and networks drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from manyhands.testing import Fault, World, at, between

MAX_SKEW_S = 25.0  # of one host: two of them differ by less than the minute that is promised

Draw = Callable[[random.Random, Sequence[str], float, float], list[Fault]]


def _kill(rng: random.Random, names: Sequence[str], start: float, stop: float) -> list[Fault]:
    name = rng.choice(names[1:])  # the first welcomes those who come back
    return [at(start).kill(name), at(stop).restart(name)]


def _crash(rng: random.Random, names: Sequence[str], start: float, stop: float) -> list[Fault]:
    name = rng.choice(names[1:])
    return [at(start).crash(name), at(stop).restart(name)]


def _freeze(rng: random.Random, names: Sequence[str], start: float, stop: float) -> list[Fault]:
    return [between(start, stop).freeze(rng.choice(names))]


def _partition(rng: random.Random, names: Sequence[str], start: float, stop: float) -> list[Fault]:
    some = set(rng.sample(names, rng.randint(1, len(names) - 1)))
    return [between(start, stop).partition(some, set(names) - some)]


def _cut(rng: random.Random, names: Sequence[str], start: float, stop: float) -> list[Fault]:
    return [between(start, stop).cut(*rng.sample(names, 2))]


def _reset(rng: random.Random, names: Sequence[str], start: float, stop: float) -> list[Fault]:
    return [at(start).reset(*rng.sample(names, 2))]


def _half_open(rng: random.Random, names: Sequence[str], start: float, stop: float) -> list[Fault]:
    return [at(start).half_open(*rng.sample(names, 2))]


def _clock(rng: random.Random, names: Sequence[str], start: float, stop: float) -> list[Fault]:
    skew_s = rng.uniform(-MAX_SKEW_S, MAX_SKEW_S)
    return [rng.choice([at(start), between(start, stop)]).clock(rng.choice(names), round(skew_s, 3))]


KINDS: dict[str, Draw] = {
    "kill": _kill,
    "crash": _crash,
    "freeze": _freeze,
    "partition": _partition,
    "cut": _cut,
    "reset": _reset,
    "half_open": _half_open,
    "clock": _clock,
}


def faults(
    rng: random.Random,
    names: Sequence[str],
    *,
    start_s: float,
    stop_s: float,
    longest_s: float,
    num_faults: int,
) -> list[Fault]:
    """So many faults of any kind, all over by ``stop_s``; at most one kill or crash, so that none hits a dead host."""
    drawn: list[Fault] = []
    kinds = list(KINDS)
    for _ in range(num_faults):
        kind = rng.choice(kinds)
        if kind in ("kill", "crash"):
            kinds = [other for other in kinds if other not in ("kill", "crash")]
        start = round(rng.uniform(start_s, stop_s - 1.0), 3)
        stop = round(min(start + rng.uniform(0.5, longest_s), stop_s), 3)
        drawn += KINDS[kind](rng, names, start, stop)
        if kind == "clock":
            kinds.remove("clock")
    return drawn


def weather(world: World, names: Sequence[str], *, limit_bandwidth: bool = False) -> None:
    """Give the world's network delays, losses and bandwidths, before its hosts talk."""
    rng = world.rng("weather")
    link = world.network.default_link
    link.latency_s = rng.choice([0.001, 0.02, 0.1])
    link.jitter_s = rng.choice([0.0, 0.005, 0.05])
    link.loss = rng.choice([0.0, 0.0, 0.02])
    if limit_bandwidth:
        for name in names:
            world.host(name)
            up_mbit_s = rng.choice([5.0, 50.0, 500.0])
            world.network.set_bandwidth(name, up_mbit_s=up_mbit_s, down_mbit_s=rng.choice([1.0, 4.0]) * up_mbit_s)
