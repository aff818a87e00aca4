"""The cost of training ALBERT together, compared with plain torch on the same machine.

    python benchmarks/albert.py [--seconds 30] [--large] [--json FILE]

Every trainer is a process with one compute thread, and trains the recipe of ``manyhands train``: batches of 8 samples,
256 samples a global step. The figures:

  plain_samples_per_s   forward, backward and LAMB in plain torch, without a network
  run_of_one            samples per second of a run of one trainer, over those of plain torch
  run_of_three          samples per second of three trainers in one run, over those of three processes of plain torch
                        that compute at the same time: each is compared with its share of the cores
  join_s                from the imports until a trainer is in the run, with text, tokenizer and model; the slowest one
  first_contribution_s  from the imports until its first batch is counted; the slowest one
  peak_mb               own memory of a trainer at its peak, the largest one; Linux only

Plain torch is measured before and after the trainers and averaged, as the speed of a machine drifts. With ``--large``
the model is that of ``albert-large-v2`` with samples of 128 tokens, two peers and batches of 2; the figures are
``large_peak_mb`` over two global steps with the held-out evaluations before and after them, and ``large_step_s``, the
time between these steps.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _command_line import Parser, json_path, positive, progress_of, run
from _memory import peak_own_bytes, start_peak
from _worker import Worker

import manyhands

LISTEN = ["/ip4/127.0.0.1/tcp/0"]
SMALL = {"batch_size": 8}
LARGE = {"batch_size": 2, "seq_length": 128, "target_batch_size": 8, "num_heldout": 16}
LARGE_STEPS = 2
PERIOD_S = 0.05
TIMEOUT_S = 900.0
MEGA = 1_000_000


class Plain:
    """The recipe's model in plain torch."""

    def __init__(self) -> None:
        import torch

        from manyhands.recipes.albert.batches import Batches
        from manyhands.recipes.albert.config import AlbertRecipe
        from manyhands.recipes.albert.data.corpus import load_documents
        from manyhands.recipes.albert.data.samples import make_samples
        from manyhands.recipes.albert.data.tokenizer import train_tokenizer
        from manyhands.recipes.albert.model import build_model, loss_of
        from manyhands.recipes.albert.optimizer import build_optimizer

        torch.set_num_threads(1)
        recipe = AlbertRecipe(batch_size=SMALL["batch_size"])
        documents = load_documents(recipe.text)
        tokenizer = train_tokenizer(documents, recipe.vocab_size)
        model = build_model(recipe, len(tokenizer))
        optimizer = build_optimizer(model, recipe)
        batches = Batches(make_samples(documents, tokenizer, recipe), recipe, "plain")
        num_batches = recipe.target_batch_size // recipe.batch_size

        def compute(number: int) -> int:
            (loss_of(model, next(batches)) / num_batches).backward()  # type: ignore[no-untyped-call]
            if number % num_batches == num_batches - 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            return recipe.batch_size

        self._compute = compute

    def rate(self, seconds: float) -> float:
        """Samples per second, measured for ``seconds``."""
        began, number, samples = time.perf_counter(), 0, 0
        while (passed_s := time.perf_counter() - began) < seconds:
            samples += self._compute(number)
            number += 1
        return samples / passed_s

    def close(self) -> None:
        """Does nothing."""


class Trainer:
    """One trainer of the recipe, as in ``manyhands train``; starts to train at once in the background."""

    def __init__(self, address: str, folder: str, settings: dict[str, Any], max_steps: int | None) -> None:
        from manyhands.recipes.albert.config import AlbertRecipe
        from manyhands.recipes.albert.settings import TrainingSettings
        from manyhands.recipes.albert.training import AlbertTrainer

        self._imported = time.perf_counter()
        self._seen: dict[str, list[float]] = {}
        self._samples = 0
        self._problem = ""
        self._stop_file = Path(folder) / "stop"
        if sys.platform == "linux":
            start_peak(os.getpid())
        self._peer = manyhands.Peer([address], listen=LISTEN)
        training = TrainingSettings(
            max_steps=max_steps, stop_file=self._stop_file, threads=1, device="cpu", linger_s=10.0
        )

        def train() -> None:
            try:
                AlbertTrainer(self._peer, "albert-benchmark", AlbertRecipe(**settings), training, self._note).run()
            except Exception as error:  # raised by the next call
                self._problem = f"the trainer failed: {error!r}"
                raise

        self._thread = threading.Thread(target=train, daemon=True)
        self._thread.start()

    def _note(self, event: Any) -> None:
        self._seen.setdefault(type(event).__name__, []).append(time.perf_counter() - self._imported)
        self._samples = event.counts.samples_computed if hasattr(event, "counts") else 0

    def begun(self) -> dict[str, float]:
        """Wait for the first global step; returns seconds since the imports."""
        self._wait_until(lambda: "StepDone" in self._seen)
        return {"join_s": self._seen["Joined"][0], "first_contribution_s": self._seen["BatchDone"][0]}

    def rate(self, seconds: float) -> float:
        """Samples per second between two batches about ``seconds`` apart, including rounds."""
        self._to_next_batch()
        began, before = time.perf_counter(), self._samples
        time.sleep(seconds)
        self._to_next_batch()
        return (self._samples - before) / (time.perf_counter() - began)

    def ended(self) -> dict[str, Any]:
        """Wait for the end, which is set by ``max_steps`` or the stop file."""
        self._wait_until(lambda: not self._thread.is_alive())
        peak = peak_own_bytes(os.getpid()) / MEGA if sys.platform == "linux" else None
        return {"peak_mb": peak, "steps_s": self._seen.get("StepDone", []), "is_finished": "Finished" in self._seen}

    def _to_next_batch(self) -> None:
        num_batches = len(self._seen["BatchDone"])
        self._wait_until(lambda: len(self._seen["BatchDone"]) > num_batches)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_so():
            if self._problem or time.monotonic() > deadline:
                raise RuntimeError(self._problem or "the trainer takes too long")
            time.sleep(PERIOD_S / 10)

    def close(self) -> None:
        self._peer.close()


@contextmanager
def workers(make: Callable[[], Worker], count: int) -> Iterator[Callable[..., list[Any]]]:
    """Start several processes; yields a function that calls a method of all of them at once."""
    made = [make() for _ in range(count)]
    with ThreadPoolExecutor(count) as threads:

        def call(method: str, *arguments: Any) -> list[Any]:
            return list(threads.map(lambda worker: worker.call(method, *arguments, timeout_s=TIMEOUT_S), made))

        try:
            yield call
        finally:
            for worker in made:
                worker.close()


def speeds(num_trainers: int, seconds: float, address: str) -> tuple[float, float, list[dict[str, Any]]]:
    """Mean speeds of a process with plain torch and with a trainer, and the trainers' results."""
    with workers(lambda: Worker(Plain), num_trainers) as plain, tempfile.TemporaryDirectory() as folder:
        before = plain("rate", seconds)
        with workers(lambda: Worker(Trainer, address, folder, SMALL, None), num_trainers) as trainers:
            begun = trainers("begun")
            ours = trainers("rate", seconds)
            (Path(folder) / "stop").write_text("0")
            ended = trainers("ended")
        after = plain("rate", seconds)
    return mean([*before, *after]), mean(ours), [one | other for one, other in zip(begun, ended, strict=True)]


def measure_small(seconds: float) -> dict[str, Any]:
    """The figures of the default recipe."""
    result: dict[str, Any] = {}
    with progress_of(2) as steps:
        for name, count in (("run_of_one", 1), ("run_of_three", 3)):
            steps.begin(f"{count} beside plain torch")
            with manyhands.Peer(listen=LISTEN) as coordinator:
                plain, ours, figures = speeds(count, seconds, coordinator.addresses[0])
            result.setdefault("plain_samples_per_s", plain)
            result[name] = ours / plain
    result |= {name: max(one[name] for one in figures) for name in ("join_s", "first_contribution_s")}
    if sys.platform == "linux":
        result["peak_mb"] = max(one["peak_mb"] for one in figures)
    return result


def measure_large() -> dict[str, Any]:
    """The figures of the large model."""
    from manyhands.recipes.albert.presets import model_settings

    settings = model_settings("albert-large-v2") | LARGE
    with progress_of(1) as steps, manyhands.Peer(listen=LISTEN) as coordinator:
        steps.begin("albert-large-v2 on two peers")
        with tempfile.TemporaryDirectory() as folder:
            address = coordinator.addresses[0]
            with workers(lambda: Worker(Trainer, address, folder, settings, LARGE_STEPS), 2) as trainers:
                ended = trainers("ended")
    assert all(one["is_finished"] for one in ended)
    times = ended[0]["steps_s"]
    result = {"large_step_s": times[-1] - times[-2]}
    if sys.platform == "linux":
        result["large_peak_mb"] = max(one["peak_mb"] for one in ended)
    return result


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--seconds", type=positive, default=30.0, help="of each measurement")
    parser.add_argument("--large", action="store_true", help="the model of albert-large-v2 instead; takes minutes")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the figures to a file")
    options = parser.parse_args()
    result = measure_large() if options.large else measure_small(options.seconds)
    result = {name: round(value, 3) for name, value in result.items()}
    for name, value in result.items():
        print(f"{name:21} {value}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    run(main)
