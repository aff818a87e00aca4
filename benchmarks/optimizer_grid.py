"""Steps of a run in a grid of groups, with failing peers: the optimizer in virtual time.

    python benchmarks/optimizer_grid.py [--peers 256] [--max-group-size 16] [--steps 20] [--p-fail 0.01] [--json FILE]

Every peer is real except for its network and clock: DHT, progress records, matchmaking, the rounds of the grid, and an
AdamW update of 32 parameters. Round trips are 40 ms, a batch takes 2 s, a step eight batches of each peer. In the time
of a step each peer fails with probability p: half of these peers are killed and started again 3 s later, half are
frozen for 16 s. It prints

* disagreement: the root mean square distance between the parameters of the peers that made a step, as a fraction of
  their size (every eighth step averages them), by step, and at most; told: the value that the peers report themselves;
* steps_made_of_due: the share of peers that made each step themselves, of all peers, including those that had just
  failed; reloads: how often a peer that had not failed missed a step and loaded the state of the others (also in the
  first two steps, in which peers still join and the grid is laid out: these do not count in the other figures of this
  line);
* matchmaking: the time from a peer's call for a round until its group has formed; wait: how long a training loop blocks
  in a step, including both rounds and peers that still compute their batch;
* short: how often a peer had fewer rounds than the step has, and why.

benchmarks/grid_swarm.py runs the averaging alone. With 256 peers each step takes about half a minute of CPU time.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the simulated worlds of the tests

import torch

from tests.simulation.grid_runs import START_PERIOD_S, STEP_S, grid_run, reasons_counted

ROUNDS_S = 2.0
"""Approximate duration of a step besides its batches."""
JOIN_S = 8.0
FIRST_STEPS = 2
"""Steps in which peers still join and the grid is laid out; other figures leave them out."""


def measure(num_peers: int, max_group_size: int, num_steps: int, p_fail: float, seed: int) -> dict[str, object]:
    """Run one swarm; returns the figures."""
    end_s = JOIN_S + num_peers * START_PERIOD_S + num_steps * (STEP_S + ROUNDS_S)
    world, run = grid_run(seed, num_peers, max_group_size, p_fail)
    gc.collect()
    gc.freeze()
    began = time.process_time()
    with reasons_counted(run):
        world.run(end_s)
    last_step = max(run.held, default=0)
    steps = [step for step in sorted(run.held) if FIRST_STEPS < step < last_step]
    apart = [run.disagreement(step) for step in steps]
    made = sum(len(run.held[step]) for step in steps)
    return {
        "peers": num_peers,
        "max_group_size": max_group_size,
        "p_fail": p_fail,
        "seed": seed,
        "steps": last_step,
        "grids": dict(run.grids),
        "killed": run.killed,
        "frozen": run.frozen,
        "disagreement": {step: round(run.disagreement(step), 6) for step in sorted(run.held)},
        "disagreement_max": round(max(apart), 6) if apart else None,
        "told_median": round(statistics.median(run.told), 6) if run.told else None,
        "steps_made_of_due": round(made / (num_peers * len(steps)), 4) if steps else None,
        "reloads": sum(num for step, num in run.reloads.items() if step > FIRST_STEPS),
        "reloads_at_first": sum(num for step, num in run.reloads.items() if step <= FIRST_STEPS),
        "samples_dropped_share": round(run.dropped / run.computed, 5) if run.computed else None,
        "rounds": len(run.matchmaking_s),
        **percentiles("matchmaking", run.matchmaking_s),
        **percentiles("wait", run.waits_s),
        "short": dict(run.reasons.most_common(8)),
        "virtual_s": round(end_s, 1),
        "cpu_s": round(time.process_time() - began, 1),
    }


def percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """The median, the 99th percentile and the maximum."""
    ordered = sorted(seconds) or [0.0]
    return {
        f"{name}_p50_s": round(ordered[len(ordered) // 2], 2),
        f"{name}_p99_s": round(ordered[len(ordered) * 99 // 100], 2),
        f"{name}_max_s": round(ordered[-1], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=256)
    parser.add_argument("--max-group-size", type=int, default=16, help="more peers than this stand in a grid")
    parser.add_argument("--steps", type=int, default=20, help="about; the run has so much virtual time")
    parser.add_argument("--p-fail", type=float, default=0.01, help="of each peer in the time of each step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    arguments = parser.parse_args()
    if min(arguments.peers, arguments.max_group_size) < 2 or arguments.steps < 1 or not 0 <= arguments.p_fail < 1:
        parser.error("at least 2 peers, groups of 2, 1 step, and a probability below 1; for example --p-fail 0.01")
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    result = measure(arguments.peers, arguments.max_group_size, arguments.steps, arguments.p_fail, arguments.seed)
    print(json.dumps(result))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([result], indent=2) + "\n")


if __name__ == "__main__":
    main()
