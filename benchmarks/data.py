"""How fast text becomes prepared data, and how fast a trainer reads it, beside the steps that it makes.

    python benchmarks/data.py [--mb 200] [--json FILE]

On generated text, with a tokenizer that was trained on a part of it (that time does not count):

- ``prepare_mb_per_s`` of text, and ``prepare_peak_mb`` of memory in all processes together (files that the system can
  drop are not counted; Linux only);
- ``first_sample_s`` from a process that has imported Python's own modules until it has a sample of the folder, and
  ``resident_mb_per_gb``: memory that it keeps when it draws from 1 GB of samples;
- ``loader_samples_per_s`` by one thread, masked and as tensors; ``step_samples_per_s``: of the small ALBERT, forward
  and backward, on the same samples by one thread; ``loader_x_step`` is their ratio.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from _command_line import Parser, json_path, positive, positive_int
from _memory import own_bytes

MB = 1e6
BLOCK_MB = 2.0
TOKENIZER_MB = 2.0
NUM_WORDS = 20_000
POLL_S = 0.1
SECONDS = 5.0
SAMPLES = "data/albert_tokenized_wikitext"

READ = """
import json, sys, time
started = time.perf_counter()
import os
from pathlib import Path
import numpy as np
from manyhands.recipes.albert.dataset import open_prepared
from manyhands.recipes.albert.sample_files import SampleFiles
folder = Path(sys.argv[1])
prepared = open_prepared(folder / "albert_tokenized_wikitext", folder / "tokenizer")
prepared.training[len(prepared.training) // 2]
seconds = time.perf_counter() - started
sys.path.insert(0, sys.argv[2])
if sys.platform != "linux":
    sys.exit(print(json.dumps([seconds, None])))
from _memory import own_bytes
paths = sorted((folder / "albert_tokenized_wikitext" / "train").glob("*.arrow"))
size = sum(path.stat().st_size for path in paths)
before = own_bytes(os.getpid())
samples = SampleFiles(paths * max(1, round(1e9 / size)))  # the same files, as often as they make 1 GB
order = np.random.default_rng(0).permutation(np.arange(len(samples), dtype=np.uint32))
for index in order[:: max(1, len(order) // 20_000)]:
    samples[int(index)]
print(json.dumps([seconds, (own_bytes(os.getpid()) - before) / 1e6]))
"""


def generate(path: Path, mb: float) -> None:
    """Paragraphs of made-up words, the frequent ones more often, as in a language."""
    rng = random.Random(0)
    syllables = [first + vowel + last for first in "bdfgklmnprst" for vowel in "aeiou" for last in ("", "n", "r", "s")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(NUM_WORDS)]
    weights = [1 / (rank + 3) for rank in range(NUM_WORDS)]
    block, size = [], 0.0
    while size < min(mb, BLOCK_MB) * MB:
        sentences = [
            " ".join(rng.choices(words, weights, k=rng.randint(5, 35))) + "." for _ in range(rng.randint(3, 9))
        ]
        block.append(" ".join(sentence.capitalize() for sentence in sentences))
        size += len(block[-1])
    with path.open("w") as file:
        written = number = 0
        while written < mb * MB:
            for paragraph in block:
                number += 1  # no paragraph comes twice: the second one would be left out
                written += file.write(f"This is number {number}. {paragraph}\n\n")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "manyhands", "data", "prepare", *arguments]


def watched(arguments: list[str], folder: Path) -> tuple[float, float | None]:
    """Seconds that a program takes, and the most memory that it and its processes have had together, in MB."""
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen(arguments, cwd=folder, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        total = 0
        with contextlib.suppress(OSError, KeyError, psutil.Error):  # one of them has ended
            for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
                total += own_bytes(one.pid) if sys.platform == "linux" else 0
        peak = max(peak, total)
        time.sleep(POLL_S)
    if process.returncode:
        sys.exit(f"the data could not be prepared: exit code {process.returncode}")
    return time.perf_counter() - started, peak / MB if peak else None


def measure_steps(folder: Path, seconds: float) -> tuple[float, float]:
    """Samples per second of the loader alone, and of the small ALBERT alone."""
    import torch

    from manyhands.recipes.albert.batches import Batches
    from manyhands.recipes.albert.config import AlbertRecipe
    from manyhands.recipes.albert.dataset import open_prepared
    from manyhands.recipes.albert.model import build_model, loss_of
    from manyhands.recipes.albert.samples import Samples

    torch.set_num_threads(1)
    prepared = open_prepared(folder / "albert_tokenized_wikitext", folder / "tokenizer")
    vocabulary = prepared.vocabulary
    assert vocabulary is not None
    recipe = AlbertRecipe(seq_length=prepared.seq_length, vocab_size=vocabulary.size)
    samples = Samples(training=prepared.training, heldout=prepared.heldout(1), vocabulary=vocabulary)
    batches = Batches(samples, recipe, "benchmark")
    model = build_model(recipe, vocabulary.size, vocabulary)

    def rate(step: Any) -> float:
        step()  # the first one allocates
        number, started = 0, time.perf_counter()
        while (passed := time.perf_counter() - started) < seconds or number == 0:
            step()
            number += recipe.batch_size
        return number / passed

    loader = rate(lambda: next(batches))
    kept = [next(batches) for _ in range(8)]
    step = rate(lambda: loss_of(model, random.choice(kept)).backward())  # type: ignore[no-untyped-call]
    return loader, step


def measure(mb: float, num_proc: int, seconds: float, folder: Path) -> dict[str, float | None]:
    generate(folder / "part.txt", min(mb, TOKENIZER_MB))
    generate(folder / "text.txt", mb)
    part = ["--text", "part.txt", "--train-tokenizer", "--output", "part", "--num-proc", str(num_proc)]
    watched(command(*part), folder)
    whole = ["--text", "text.txt", "--tokenizer", "part/tokenizer", "--num-proc", str(num_proc)]
    prepare_s, peak_mb = watched(command(*whole), folder)
    print(f"prepared {mb:g} MB in {prepare_s:.1f} s", file=sys.stderr)
    arguments = [sys.executable, "-c", READ, str(folder / "data"), str(Path(__file__).parent)]
    first_s, resident_mb = json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)
    size_gb = sum(path.stat().st_size for path in (folder / SAMPLES).rglob("*.arrow")) / 1e9
    loader, step = measure_steps(folder / "data", seconds)
    return {
        "text_mb": mb,
        "samples_gb": round(size_gb, 4),
        "prepare_mb_per_s": round((folder / "text.txt").stat().st_size / MB / prepare_s, 3),
        "prepare_peak_mb": round(peak_mb) if peak_mb is not None else None,
        "first_sample_s": round(first_s, 3),
        "resident_mb_per_gb": round(resident_mb, 2) if resident_mb is not None else None,
        "loader_samples_per_s": round(loader, 1),
        "step_samples_per_s": round(step, 2),
        "loader_x_step": round(loader / step, 1),
    }


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--mb", type=positive, default=200.0, help="text to prepare")
    parser.add_argument("--num-proc", type=positive_int, default=2)
    parser.add_argument("--seconds", type=positive, default=SECONDS, help="for the loader, and for the steps")
    parser.add_argument("--json", type=json_path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments.mb, arguments.num_proc, arguments.seconds, Path(folder))
    print(json.dumps(result))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
