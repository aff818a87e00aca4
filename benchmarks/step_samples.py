"""Samples of a global step relative to its target: peers go on computing until they see that it is reached.

    python benchmarks/step_samples.py [--json FILE]

Four peers train a tiny model in the deterministic world (virtual time, so the machine's speed does not matter), each
with its own batches. Prints the median samples of a step over the target: for a step that takes 5 s, for one that takes
1.3 s, and for peers of unequal speeds. Then it prints how long step() waits, by round-trip time, where four peers with
batches of 0.5 s make a step of ten batches each.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from _command_line import Parser, json_path, run

from tests.simulation.test_waiting import samples_of_steps, waits

CASES = {
    "a step each 5 s": (256, 16, [1.25] * 4),
    "a step each 1.3 s": (320, 16, [0.26] * 4),
    "unequal peers": (256, 16, [0.6, 0.9, 1.2, 2.4]),
}
"""Target, samples of a batch, and duration of a batch on each peer."""


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--json", type=json_path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    results: dict[str, dict[str, float]] = {}
    for name, (target, batch, batches_s) in CASES.items():
        sizes = samples_of_steps(target, batch, batches_s, latency_s=0.02)
        median = statistics.median(sizes)
        results[name] = {"target": target, "median_samples": median, "ratio": round(median / target, 3)}
        print(json.dumps({name: results[name]}))
    for round_trip_ms in (40, 200, 400):
        wait_s = round(statistics.median(waits(round_trip_ms / 2000)), 3)
        name = f"wait at {round_trip_ms} ms"
        results[name] = {"seconds": wait_s}
        print(json.dumps({name: results[name]}))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    run(main)
