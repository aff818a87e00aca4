"""Samples of a global step relative to its target: peers go on computing until they see that it is reached.

    python benchmarks/step_samples.py [--json FILE]

Four peers train a tiny model in the deterministic world (virtual time, so the machine's speed does not matter), each
with its own batches. Prints the median samples of a step over the target: for a step that takes 5 s, for one that takes
1.3 s, and for peers of unequal speeds. Then it prints how long step() waits, by round-trip time, where four peers with
batches of 0.5 s make a step of ten batches each.

Then four peers with ``delay="gradients"`` that compute their target in 4 s: how long a step takes, and its samples over
the target, by how long the step before it takes in the background.

At last four peers, two of them half as fast, with batches of 8 samples: the samples that they use, as a share of what
they would compute if they never waited. ``bound`` is that share if a step took no time beyond its batches: all begin
together, and the step is due when the batches that have ended reach the target. With ``delay="gradients"`` nobody
waits, so the bound is 1.
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

from tests.simulation.swarm_of_trainers import Member, Swarm, together
from tests.simulation.test_delay import TARGET as DELAYED_TARGET
from tests.simulation.test_delay import delayed_steps, quadratic, sgd
from tests.simulation.test_drop_in import new_model
from tests.simulation.test_waiting import samples_of_steps, waits

CASES = {
    "a step each 5 s": (256, 16, [1.25] * 4),
    "a step each 1.3 s": (320, 16, [0.26] * 4),
    "unequal peers": (256, 16, [0.6, 0.9, 1.2, 2.4]),
}
"""Target, samples of a batch, and duration of a batch on each peer."""

BATCH, PACES_S = 8, [0.4, 0.4, 0.8, 0.8]
NUM_STEPS = 30


def share_of_ideal(target: int, latency_s: float, delay: str | None = None) -> tuple[float, float]:
    """What peers use as a share of what they would compute if they never waited, and a median step over its target."""
    times: list[float] = []
    sizes: list[float] = []

    def train(member: Member) -> None:
        together(len(PACES_S), member)
        while member.optimizer.global_step < NUM_STEPS:
            before = member.optimizer.global_step
            member.step(quadratic(member.model), batch_s=PACES_S[int(member.name[1:])])
            manifest = member.optimizer.last_round
            if member.name == "p0" and member.optimizer.global_step > before >= 3 and manifest is not None:
                times.append(member.peer.time())
                sizes.append(sum(manifest.weights))

    swarm = Swarm()
    swarm.world.network.default_link.latency_s = latency_s
    for number in range(len(PACES_S)):
        swarm.start(
            f"p{number}", new_model, sgd, train, target_batch_size=target, batch_size_per_step=BATCH, delay=delay
        )
    swarm.run()
    speed = sum(BATCH / batch_s for batch_s in PACES_S)
    return sum(sizes[1:]) / (times[-1] - times[0]) / speed, statistics.median(sizes) / target


def bound(target: int) -> float:
    """The largest share of the ideal for steps that are due with the first batch that reaches the target."""
    ends = sorted({round(count * batch_s, 6) for batch_s in PACES_S for count in range(1, target)})
    took_s = next(end for end in ends if sum(BATCH * int(end / batch_s + 1e-9) for batch_s in PACES_S) >= target)
    return (
        sum(BATCH * int(took_s / batch_s + 1e-9) for batch_s in PACES_S) / took_s / sum(BATCH / one for one in PACES_S)
    )


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
    for background_s in (0.5, 3.0, 6.0, 12.0):
        steps = delayed_steps(background_s)
        name = f"delayed, {background_s:g} s in the background"
        seconds, samples = (statistics.median(column) for column in zip(*steps, strict=True))
        results[name] = {"seconds": round(seconds, 2), "ratio": round(samples / DELAYED_TARGET, 3)}
        print(json.dumps({name: results[name]}))
    for target in (256, 64):
        share, size = share_of_ideal(target, latency_s=0.0005)
        name = f"share of the ideal at target {target}"
        results[name] = {"share": round(share, 3), "bound": round(bound(target), 3), "ratio": round(size, 3)}
        print(json.dumps({name: results[name]}))
        share, size = share_of_ideal(target, latency_s=0.0005, delay="gradients")
        name = f"share of the ideal at target {target}, delayed"
        results[name] = {"share": round(share, 3), "bound": 1.0, "ratio": round(size, 3)}
        print(json.dumps({name: results[name]}))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    run(main)
