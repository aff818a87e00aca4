"""Spread of the peers of a swarm that averages in a grid, over many steps with failures.

    python benchmarks/grid_swarm.py [--peers 256] [--max-group-size 16] [--steps 50] [--p-fail 0.01] [--json FILE]

Runs the averaging layer of the library (presence, matchmaking, all-reduce, verdicts) in virtual time, without a DHT:
records are visible to all peers 20 ms after they are stored. Before each step each value of each peer drifts by a
number drawn from N(0, 1). In each step a peer fails with probability p: half of these peers skip the step, half are
killed in its middle and started again 3 s later. The spread is the root mean square distance of all values from their
mean after each step, including those of failed peers. The exit code is 1 if the spread exceeds the bound of
docs/explanation/averaging.md after any step. Takes about five minutes of CPU time.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the simulated worlds of the tests

from tests.simulation.grids import FIRST_STEPS, grid_world


def measure(num_peers: int, max_group_size: int, num_steps: int, p_fail: float, seed: int) -> dict[str, object]:
    world, swarm, seconds = grid_world(seed, num_peers, max_group_size, num_steps, p_fail)
    began = time.process_time()
    world.run(seconds)
    step_s = sorted(swarm.step_s)
    bounds = swarm.bounds(num_peers)
    beyond = [step for step, spread in enumerate(swarm.spreads) if step >= FIRST_STEPS and spread > bounds[step]]
    return {
        "peers": num_peers,
        "max_group_size": max_group_size,
        "steps": num_steps,
        "p_fail": p_fail,
        "seed": seed,
        "spread_median": round(statistics.median(swarm.spreads), 4),
        "spread_max": round(max(swarm.spreads), 4),
        "spread_last_10_max": round(max(swarm.spreads[-10:]), 4),
        "spread_of_bound_max": round(
            max((a / b for a, b in zip(swarm.spreads[FIRST_STEPS:], bounds[FIRST_STEPS:], strict=True)), default=0.0), 3
        ),
        "steps_beyond_the_bound": beyond,
        "mean_moved_max": round(max(abs(a - b) for a, b in zip(swarm.means, swarm.before_means, strict=True)), 4),
        "failed": sum(swarm.failures),
        "steps_cut_short": sum(swarm.partial),
        "largest_group": max(swarm.group_sizes),
        "step_p50_s": round(step_s[len(step_s) // 2], 2),
        "step_max_s": round(step_s[-1], 2),
        "cpu_s": round(time.process_time() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=256)
    parser.add_argument("--max-group-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--p-fail", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if min(arguments.peers, arguments.max_group_size) < 2 or arguments.steps < 1 or not 0 <= arguments.p_fail < 1:
        parser.error("at least 2 peers, groups of 2, 1 step, and a probability below 1; for example --p-fail 0.01")
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    result = measure(arguments.peers, arguments.max_group_size, arguments.steps, arguments.p_fail, arguments.seed)
    print(json.dumps(result))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([result], indent=2) + "\n")
    if result["steps_beyond_the_bound"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
