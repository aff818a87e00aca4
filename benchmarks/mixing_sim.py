"""Number of rounds until all peers of a large swarm hold the mean, by the way groups are chosen.

    python benchmarks/mixing_sim.py [--restarts 10] [--json FILE]

Each peer starts with a number drawn from N(0, 1). In each round each peer fails with probability p: it skips the round
and keeps its number, and the others of each group continue with their mean. The result is the number of rounds until
the variance over all peers, including failed ones, is below 1e-9 and below 1e-4, as a mean over the restarts.

Methods: ``grid`` is that of the library (manyhands.averaging.grid.seats) in the named grid. ``fixed_grid`` is the same
with constant first coordinates, as in the experiment of Ryabinin et al., Moshpit SGD, arXiv:2103.03239 (code:
yandex-research/moshpit-sgd, averaging_experiments). ``random`` draws new groups of the grid's side in each round.
``chosen`` is what the library would use for this number of peers: the named grid, or random groups if half of its cells
or more are empty.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import defaultdict
from pathlib import Path

from manyhands.averaging.grid.seats import Layout, group_of, next_cell, next_layout

CASES = [
    (1024, (32, 32)),
    (900, (32, 32)),
    (900, (30, 30)),
    (768, (32, 32)),
    (512, (32, 32)),
    (512, (8, 8, 8)),
    (300, (32, 32)),
    (256, (16, 16)),
]
FAILURES = [0.0, 0.001, 0.005, 0.01]
METHODS = ["grid", "fixed_grid", "random", "chosen"]
FINE, COARSE = 1e-9, 1e-4
MAX_ROUNDS = 50


class Drawn:
    """Random groups of about one size among the living peers, new in each round."""

    def __init__(self, size: int, rng: random.Random) -> None:
        self.size = size
        self.rng = rng

    def groups(self, alive: list[int], round_number: int) -> list[list[int]]:
        self.rng.shuffle(alive)
        num_groups = max(1, len(alive) // self.size)
        return [alive[number::num_groups] for number in range(num_groups)]


class Cells:
    """Groups that follow from the cells of the peers."""

    def __init__(self, layout: Layout, num_peers: int, rng: random.Random, *, is_fixed: bool = False) -> None:
        self.layout = layout
        self.cells = rng.sample(range(layout.num_cells), num_peers)
        self.is_fixed = is_fixed

    def groups(self, alive: list[int], round_number: int) -> list[list[int]]:
        members = defaultdict(list)
        for peer in alive:
            members[group_of(self.layout, self.cells[peer], round_number)].append(peer)
        if not self.is_fixed:
            self.cells = [next_cell(self.layout, cell, round_number) for cell in self.cells]
        return list(members.values())


def groups_by(method: str, num_peers: int, sides: tuple[int, ...], rng: random.Random) -> Cells | Drawn:
    if method == "random":
        return Drawn(sides[0], rng)
    layout = Layout(sides)
    if method == "chosen":
        layout = next_layout(layout, num_peers, max(sides))
    return Cells(layout, num_peers, rng, is_fixed=method == "fixed_grid")


def rounds_until(method: str, num_peers: int, sides: tuple[int, ...], p_fail: float, seed: int) -> tuple[int, int]:
    """Rounds until the variance is below the small and below the large bound."""
    rng = random.Random(seed)
    values = [rng.gauss(0.0, 1.0) for _ in range(num_peers)]
    chosen = groups_by(method, num_peers, sides, rng)
    first_round = rng.randrange(1000) * len(sides)
    coarse = MAX_ROUNDS
    for number in range(MAX_ROUNDS):
        alive = [peer for peer in range(num_peers) if rng.random() >= p_fail]
        for members in chosen.groups(alive, first_round + number):
            mean = statistics.fmean(values[peer] for peer in members)
            for peer in members:
                values[peer] = mean
        variance = statistics.pvariance(values)
        if variance < COARSE:
            coarse = min(coarse, number + 1)
        if variance < FINE:
            return number + 1, coarse
    return MAX_ROUNDS, coarse


def measure(method: str, num_peers: int, sides: tuple[int, ...], p_fail: float, num_restarts: int) -> dict[str, object]:
    results = [rounds_until(method, num_peers, sides, p_fail, seed) for seed in range(num_restarts)]
    return {
        "peers": num_peers,
        "grid": "x".join(map(str, sides)),
        "p_fail": p_fail,
        "method": method,
        "rounds_1e-9": round(statistics.fmean(fine for fine, _ in results), 2),
        "rounds_1e-4": round(statistics.fmean(coarse for _, coarse in results), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.restarts < 1:
        parser.error(f"--restarts {arguments.restarts} must be at least 1; for example 10")
    results = []
    for num_peers, sides in CASES:
        for p_fail in FAILURES:
            for method in METHODS:
                results.append(measure(method, num_peers, sides, p_fail, arguments.restarts))
                print(json.dumps(results[-1]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
