"""One public peer and many clients behind routers that keep ports, in virtual time: how the work is shared.

    python benchmarks/clients_sim.py --clients 16,80 [--most 64] [--steps 16] [--mbit-s 100]
        [--codec int8] [--json FILE]

All peers have lines of ``--mbit-s`` and train a layer of a million parameters, with batches of 2 s and a target that
most reach in their second one. Every one is real except for its network and clock; the clients meet each other through
the public peer. With ``--most`` other numbers of clients may reduce (``MAX_REDUCING_CLIENTS``). JSON: a list of
``{clients, most, step_s, public_vectors, busiest_vectors, median_vectors, shared_from, contributors, cpu_s}``:

  step_s           median duration of the last four steps
  public_vectors   what the public peer sends in each of the last four steps, in vectors
  busiest_vectors  the same of the client that sends most
  median_vectors   the same of the median client
  shared_from      first step that has cost the public peer less than half of what it sends if it reduces for all
  contributors     peers whose samples were in the last step
  cpu_s            CPU time of the row

Takes eight minutes of CPU time for 80 clients.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the simulated worlds of the tests

import torch
from _command_line import Parser, json_path, positive, positive_int, positive_ints, progress_of, run, write_json

from manyhands.averaging import AveragingConfig
from manyhands.averaging.matchmaking import admission
from tests.simulation.swarm_of_trainers import Member, Swarm, together
from tests.smaller import smaller

WIDTH = 1000
VECTOR_BYTES = {"int8": WIDTH * WIDTH + WIDTH, "none": 4 * (WIDTH * WIDTH + WIDTH)}
"""Roughly, by codec."""
BATCH_S = 2.0
BATCH_SIZE = 4
BATCHES = 1.75  # with 2, a single peer that is out of step has all others compute a third one
LAST_STEPS = 4


def measure(num_clients: int, most: int, num_steps: int, mbit_s: float, codec: str) -> dict[str, Any]:
    """Run one swarm; returns its row."""
    swarm = Swarm(1)
    names = ["public", *(f"client {number}" for number in range(num_clients))]
    sent: dict[str, list[int]] = {name: [] for name in names}
    stepped_at: list[float] = []
    contributors: list[int] = []

    def train(member: Member) -> None:
        together(len(names), member)
        while member.optimizer.global_step < num_steps:
            before = member.optimizer.global_step
            member.step(member.model(torch.ones(BATCH_SIZE, WIDTH)).square().mean(), BATCH_S, batch_size=BATCH_SIZE)
            if member.optimizer.global_step > before:
                sent[member.name].append(member.peer.presence.endpoint.bytes_sent)
                if member.name == "public":
                    stepped_at.append(member.peer.time())
        last = member.optimizer.last_round
        contributors.append(len(last.contributors()) if last is not None else 0)
        member.optimizer.wait_for_others()

    began = time.process_time()
    for number, name in enumerate(names):
        swarm.start_behind(
            "port-preserving" if number else "none", name, WIDTH, train, mbit_s=mbit_s, begins_s=0.1 * number,
            target_batch_size=int(BATCHES * BATCH_SIZE * len(names)), averaging=AveragingConfig(codec=codec),
        )  # fmt: skip
    with smaller(span_numel=64, reducing_clients=most):
        swarm.run(36000.0)
    vectors = {
        name: round((told[-1] - told[-1 - LAST_STEPS]) / LAST_STEPS / VECTOR_BYTES[codec], 1)
        for name, told in sent.items()
    }
    public = vectors.pop("public")
    steps = [
        (after - before) / VECTOR_BYTES[codec]
        for before, after in zip(sent["public"], sent["public"][1:], strict=False)
    ]
    return {
        "clients": num_clients,
        "most": most,
        "step_s": round(statistics.median(b - a for a, b in itertools.pairwise(stepped_at[-1 - LAST_STEPS :])), 1),
        "public_vectors": public,
        "busiest_vectors": max(vectors.values()),
        "median_vectors": statistics.median(vectors.values()),
        "shared_from": next((step for step, one in enumerate(steps, 2) if one < num_clients / 2), None),
        "contributors": min(contributors),
        "cpu_s": round(time.process_time() - began, 1),
    }


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--clients", type=positive_ints, default=[16, 80], help="several (default: 16,80)")
    parser.add_argument(
        "--most", type=positive_ints, default=[admission.MAX_REDUCING_CLIENTS], help="several (default: 64)"
    )
    parser.add_argument("--steps", type=positive_int, default=16, help="of each swarm (default: 16)")
    parser.add_argument("--mbit-s", type=positive, default=100.0, help="of each line, in each direction (default: 100)")
    parser.add_argument("--codec", choices=sorted(VECTOR_BYTES), default="int8", help="of the values (default: int8)")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    if options.steps <= LAST_STEPS:
        parser.error(f"--steps {options.steps}: at least {LAST_STEPS + 1}")
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    rows: list[dict[str, Any]] = []
    cases = [(clients, most) for clients in options.clients for most in options.most]
    with progress_of(len(cases)) as steps:
        for clients, most in cases:
            steps.begin(f"{clients} clients, of which {most} may reduce")
            rows.append(measure(clients, most, options.steps, options.mbit_s, options.codec))
            print(rows[-1], flush=True)
            write_json(options.json, rows)


if __name__ == "__main__":
    run(main)
