"""Speed of a simulated swarm in virtual time.

    python benchmarks/simulation.py --peers 16 --hours 1 [--json FILE]

Every peer is real except for its network and clock: DHT, matchmaking, averaging of a small vector, optimizer. A batch
takes about 5 s, and a global step about a minute, as is usual in a run of volunteers. All peers start within a few
seconds, and there are no faults. One process, one core; prints two CPU figures, since other load on the machine affects
only the wall time.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the simulated worlds of the tests

import torch._dynamo  # noqa: F401 (the first optimizer imports it, which takes a second and is no part of the run)

from manyhands.testing import World
from tests.simulation.worlds import Ledger, Trainer, start_training

BATCH_S = 5.0
BATCH_SIZE = 4
STEP_S = 60.0
START_PERIOD_S = 0.25


def measure(num_peers: int, hours: float, seed: int) -> dict[str, float]:
    """Run one swarm; returns the figures."""
    world = World(seed)
    world.network.default_link.latency_s = 0.02
    world.network.default_link.jitter_s = 0.005
    names = [f"p{number}" for number in range(num_peers)]
    target_batch_size = round(num_peers * BATCH_SIZE * STEP_S / BATCH_S)
    trainers, ledger = start_training(world, names, BATCH_S, BATCH_SIZE, target_batch_size, START_PERIOD_S)
    virtual_s = 3600.0 * hours
    gc.collect()
    gc.freeze()
    started, started_cpu = time.perf_counter(), time.process_time()
    world.run(virtual_s)
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    return {
        "peers": num_peers,
        "virtual_s": virtual_s,
        "wall_s": round(wall_s, 1),
        "cpu_s": round(cpu_s, 1),
        "events": world.trace.num_events,
        "messages_per_peer_and_s": round(world.trace.num_events / num_peers / virtual_s, 2),
        "us_per_event": round(1e6 * cpu_s / world.trace.num_events, 1),
        "callbacks_per_event": round(world.loop.num_callbacks / world.trace.num_events, 2),
        **outcome_of(trainers, ledger),
    }


def outcome_of(trainers: Mapping[str, Trainer], ledger: Ledger) -> dict[str, float]:
    """The result of the swarm."""
    statistics = [trainer.optimizer.statistics for trainer in trainers.values()]
    return {
        "rounds_committed": ledger.num_rounds,
        "global_step": max(trainer.optimizer.global_step for trainer in trainers.values()),
        "attempts_aborted": sum(one.rounds_aborted for one in statistics),
        "samples_dropped": sum(one.samples_dropped for one in statistics),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[16])
    parser.add_argument("--hours", type=float, default=0.05, help="virtual hours")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    results = []
    for num_peers in options.peers:
        results.append(measure(num_peers, options.hours, options.seed))
        print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
