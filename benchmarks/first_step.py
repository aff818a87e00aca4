"""Time from the imports to the first global step of ALBERT trainers that start together.

    python benchmarks/first_step.py --peers 4 [--json FILE]

Each trainer is a process with one compute thread that joins through a coordinator. All begin at the same moment, after
the imports. ``imports_s`` and ``kernels_s`` are durations; the others are seconds since the imports: ``join_s`` until
the trainer is in the run with its text, tokenizer, model and batch size, ``first_batch_s`` until its first batch is
counted, ``first_step_s`` until its first global step. Medians over the trainers; ``last_step_s`` is that of the slowest
one.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

from manyhands import Peer

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PATIENCE_S = 120.0


def be_a_trainer(address: str, target_batch_size: int, *, is_verbose: bool) -> None:
    """Run one trainer: it reports when it is ready, begins on a signal, and prints its figures."""
    started = time.perf_counter()
    from manyhands.averaging.codecs import prepare_kernels
    from manyhands.recipes.albert.config import AlbertRecipe
    from manyhands.recipes.albert.settings import TrainingSettings
    from manyhands.recipes.albert.training import AlbertTrainer

    figures = {"imports_s": time.perf_counter() - started}
    logging.basicConfig(level="INFO" if is_verbose else "ERROR")
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.perf_counter()

    def timed_prepare(num_values: int, codec: str) -> None:
        before = time.perf_counter()
        prepare_kernels(num_values, codec)
        figures["kernels_s"] = time.perf_counter() - before

    def note(event: object) -> None:
        name = {"Joined": "join_s", "BatchDone": "first_batch_s", "StepDone": "first_step_s"}.get(type(event).__name__)
        if name is not None:
            figures.setdefault(name, time.perf_counter() - began)

    settings = TrainingSettings(max_steps=1, threads=1, device="cpu", linger_s=1.0)
    recipe = AlbertRecipe(target_batch_size=target_batch_size)
    timed = mock.patch("manyhands.optim.optimizer.prepare_kernels", timed_prepare)
    with Peer([address], listen=[LOOPBACK]) as peer, timed:
        AlbertTrainer(peer, "first-step", recipe, settings, note, is_batch_size_chosen=False).run()
    print(json.dumps(figures), flush=True)


def measure(num_peers: int, target_batch_size: int, *, is_verbose: bool) -> dict[str, float]:
    with Peer(listen=[LOOPBACK]) as coordinator:
        command = [sys.executable, __file__, "--trainer", coordinator.addresses[0], "--target", str(target_batch_size)]
        command += ["--verbose"] * is_verbose
        trainers = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(num_peers)
        ]
        try:
            for trainer in trainers:
                assert trainer.stdout is not None
                trainer.stdout.readline()
            for trainer in trainers:
                assert trainer.stdin is not None
                trainer.stdin.write("go\n")
                trainer.stdin.flush()
            outputs = [trainer.communicate(timeout=PATIENCE_S)[0] for trainer in trainers]
        finally:
            for trainer in trainers:
                trainer.kill()
                trainer.wait()
    figures = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    result = {name: statistics.median(one[name] for one in figures) for name in figures[0]}
    result["last_step_s"] = max(one["first_step_s"] for one in figures)
    return {name: round(seconds, 3) for name, seconds in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--target", type=int, default=256, help="samples of the global step, by all peers together")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--verbose", action="store_true", help="show the log lines of the trainers")
    parser.add_argument("--trainer", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trainer is not None:
        be_a_trainer(arguments.trainer, arguments.target, is_verbose=arguments.verbose)
        return
    result = measure(arguments.peers, arguments.target, is_verbose=arguments.verbose)
    print(json.dumps(result))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
