"""Seconds until a newcomer on a slow line first contributes, while the run goes on.

    python benchmarks/newcomer.py [--steps 0.5,1,2,5] [--codecs int8,fp16,none] [--json FILE]

Two trainers make a step of AdamW (amsgrad) each 4 s of virtual time. The line of the newcomer takes so many steps for
the state, which has four times the bytes of the parameters. Three ways to catch up:

  replay      make the missed steps from the averages that the donors keep, as the library does
  again       load the state again, as often as it is out of date
  difference  load only the chunks that have changed: with an optimizer that changes each value all of them, so the
              figures are those of `again`; the share of chunks that a step has changed is `changed_chunks`

`null` in place of a number: not within 240 s. Takes about five minutes.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from unittest import mock

import torch
from _command_line import Parser, json_path, run, write_json

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the simulated worlds of the tests

from manyhands.averaging.state import content as state_module
from manyhands.averaging.state.content import sealed
from manyhands.optim.step.replica import Replica
from tests.simulation.newcomers import STATE_BYTES, STEP_S, adamw, joined, new_model

UNTIL_S = 252.0


def seconds(codec: str, num_steps: float, *, can_replay: bool) -> tuple[float | None, int]:
    """Seconds until the first contribution, and states that were loaded."""
    with mock.patch.object(Replica, "can_replay", can_replay):
        run_ = joined(codec, num_steps, UNTIL_S)
    at_s = run_.contributed_at_s
    states_loaded = run_.swarm.members["late"].optimizer.statistics.states_loaded
    return (round(at_s, 1) if at_s is not None else None), states_loaded


def changed_chunks() -> float:
    """The share of a state's chunks that a step changes."""
    model = new_model()
    replica, digests = Replica(adamw(model), None), []
    with mock.patch.object(state_module, "CHUNK_BYTES", 4096):
        for _ in range(2):
            model(torch.randn(4, 150)).square().mean().backward()
            replica.optimizer.step()
            digests.append(sealed(replica.capture()).digests)
    before, after = digests
    return sum(one != other for one, other in zip(before, after, strict=True)) / len(before)


def numbers(text: str) -> list[float]:
    """Numbers, separated by commas."""
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=numbers, default=[0.5, 1, 2, 5], help="default: 0.5,1,2,5")
    parser.add_argument("--codecs", type=lambda text: text.split(","), default=["int8", "fp16", "none"])
    parser.add_argument("--json", type=json_path, metavar="FILE")
    options = parser.parse_args()
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    results = []
    print(f"a step changes {100 * changed_chunks():.0f}% of the chunks of the state")
    for codec in options.codecs:
        for num_steps in options.steps:
            replay_s, num_replay = seconds(codec, num_steps, can_replay=True)
            again_s, num_again = seconds(codec, num_steps, can_replay=False)
            row = {
                "codec": codec,
                "steps_per_state": num_steps,
                "kbyte_s": round(STATE_BYTES / num_steps / STEP_S / 1000, 1),
                "replay_s": replay_s,
                "replay_states": num_replay,
                "again_s": again_s,
                "again_states": num_again,
            }
            print(row, flush=True)
            results.append(row)
            write_json(options.json, results)


if __name__ == "__main__":
    run(main)
