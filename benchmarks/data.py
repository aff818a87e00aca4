"""Speed of data preparation, and of reading prepared data compared with training steps.

    python benchmarks/data.py [--mb 200] [--gb 1] [--json FILE]

On generated text, with a tokenizer that was trained on a part of it (not included in the times):

- ``prepare_mb_per_s`` of text, and ``prepare_peak_mb`` of memory in all processes together (without files that the
  system can drop; Linux only);
- ``first_sample_s`` from a process that has imported Python's own modules until it has a sample of a folder of ``--gb``
  GB, and ``resident_mb_per_gb``: memory that it keeps when it draws samples from all of it;
- ``first_served_sample_s``: the same from ``manyhands data serve`` on this machine, with the same samples in 8 shards,
  and ``stream_mb_per_s``: all of them fetched, verified and opened one by one, without training;
- ``loader_samples_per_s`` of one thread, masked and as tensors; ``step_samples_per_s``: of the small ALBERT, forward
  and backward, on the same samples with one thread; ``loader_x_step`` is their ratio.

The folder and the shards repeat the samples of the prepared text until they are large enough: reading and fetching do
not depend on the content. They were just written, so the system has them in its cache.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
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
NUM_SHARDS = 8

READ = """
import json, sys, time
started = time.perf_counter()
import os
from pathlib import Path
import numpy as np
from manyhands.recipes.albert.data.dataset import open_prepared
from manyhands.recipes.albert.data.sample_files import SampleFiles
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
repeats = max(1, round(1e9 / size))  # a smaller folder is opened as often as it makes 1 GB
samples = SampleFiles(paths * repeats)
order = np.random.default_rng(0).permutation(np.arange(len(samples), dtype=np.uint32))
for index in order[:: max(1, len(order) // 20_000)]:
    samples[int(index)]
print(json.dumps([seconds, (own_bytes(os.getpid()) - before) / 1e6 / (size * repeats / 1e9)]))
"""

FETCH = """
import json, sys, time
started = time.perf_counter()
from pathlib import Path
from manyhands.recipes.albert.data.shard_stream import HostedData, ShardStream
stream = ShardStream(HostedData([sys.argv[1]], Path(sys.argv[2]), 10**15), "benchmark")
stream.samples[len(stream.samples) // 2]
first = time.perf_counter() - started
for _ in stream.index.train[1:]:
    stream.advance()
seconds = time.perf_counter() - started
stream.close()
print(json.dumps([first, sum(shard.num_bytes for shard in stream.index.train) / 1e6 / seconds]))
"""


def generate(path: Path, mb: float) -> None:
    """Write paragraphs of made-up words with a frequency distribution like that of a language."""
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
                number += 1  # a repeated paragraph would be left out
                written += file.write(f"This is number {number}. {paragraph}\n\n")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "manyhands", "data", "prepare", *arguments]


def watched(arguments: list[str], folder: Path) -> tuple[float, float | None]:
    """Seconds that a program takes, and the peak memory of it and its processes together, in MB."""
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


def enlarge(small: Path, large: Path, gb: float) -> None:
    """Prepared data, and shards of it, that repeat the same samples."""
    import msgspec

    from manyhands.recipes.albert.data.dataset import ABOUT, SAMPLES, TOKENIZER, TRAINING, DatasetInfo, open_prepared
    from manyhands.recipes.albert.data.sample_files import SampleFiles, SampleWriter
    from manyhands.recipes.albert.data.shards import write_shards
    from manyhands.recipes.albert.data.tokenizer_file import FILE

    paths = sorted((small / SAMPLES / TRAINING).glob("*.arrow"))
    size = sum(path.stat().st_size for path in paths)
    samples = SampleFiles(paths * max(1, round(gb * 1e9 / size)))
    shutil.copytree(small / TOKENIZER, large / TOKENIZER)
    shutil.copytree(small / SAMPLES, large / SAMPLES)
    for path in (large / SAMPLES / TRAINING).glob("*.arrow"):
        path.unlink()
    with SampleWriter(large / SAMPLES / TRAINING / "data.arrow") as writer:
        for batch in samples.batches(0, len(samples)):
            writer.add(batch)
    state_path = large / SAMPLES / TRAINING / "state.json"
    state = json.loads(state_path.read_text()) | {"_data_files": [{"filename": "data.arrow"}]}
    state_path.write_text(json.dumps(state))
    about = msgspec.json.decode((small / ABOUT).read_bytes(), type=DatasetInfo)
    about = msgspec.structs.replace(about, num_samples=about.num_samples | {TRAINING: len(samples)})
    (large / ABOUT).write_bytes(msgspec.json.encode(about))
    prepared = open_prepared(large / SAMPLES, large / TOKENIZER)
    tokenizer = (large / TOKENIZER / FILE).read_text()
    write_shards(large / "shards", about, tokenizer, prepared.training, prepared.validation, NUM_SHARDS)


def printed_by(program: str, *arguments: str) -> Any:
    """The JSON output of a program that runs in a separate process."""
    found = subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True)
    return json.loads(found.stdout)


def measure_serving(shards: Path, cache: Path) -> tuple[float, float]:
    """Seconds to the first sample, and megabytes per second of all shards."""
    arguments = [sys.executable, "-u", "-m", "manyhands", "data", "serve", str(shards), "--listen", "127.0.0.1:0"]
    server = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = next(line.split()[-1] for line in server.stdout if "--dataset-url" in line)
        first_s, mb_per_s = printed_by(FETCH, url, str(cache))
    finally:
        server.terminate()
        server.communicate()
    return first_s, mb_per_s


def measure_steps(folder: Path, seconds: float) -> tuple[float, float]:
    """Samples per second of the loader alone, and of the small ALBERT alone."""
    import torch

    from manyhands.recipes.albert.batches import Batches
    from manyhands.recipes.albert.config import AlbertRecipe
    from manyhands.recipes.albert.data.dataset import open_prepared
    from manyhands.recipes.albert.data.samples import Samples
    from manyhands.recipes.albert.model import build_model, loss_of

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


def measure(mb: float, gb: float, num_proc: int, seconds: float, folder: Path) -> dict[str, float | None]:
    generate(folder / "part.txt", min(mb, TOKENIZER_MB))
    generate(folder / "text.txt", mb)
    part = ["--text", "part.txt", "--train-tokenizer", "--output", "part", "--num-proc", str(num_proc)]
    watched(command(*part), folder)
    whole = ["--text", "text.txt", "--tokenizer", "part/tokenizer", "--num-proc", str(num_proc)]
    prepare_s, peak_mb = watched(command(*whole), folder)
    print(f"prepared {mb:g} MB in {prepare_s:.1f} s", file=sys.stderr)
    enlarge(folder / "data", folder / "large", gb)
    first_s, resident_mb = printed_by(READ, str(folder / "large"), str(Path(__file__).parent))
    served_s, stream_mb_per_s = measure_serving(folder / "large" / "shards", folder / "cache")
    size_gb = sum(path.stat().st_size for path in (folder / "large" / "shards").glob("train*")) / 1e9
    loader, step = measure_steps(folder / "data", seconds)
    return {
        "text_mb": mb,
        "samples_gb": round(size_gb, 4),
        "prepare_mb_per_s": round((folder / "text.txt").stat().st_size / MB / prepare_s, 3),
        "prepare_peak_mb": round(peak_mb) if peak_mb is not None else None,
        "first_sample_s": round(first_s, 3),
        "first_served_sample_s": round(served_s, 3),
        "stream_mb_per_s": round(stream_mb_per_s, 1),
        "resident_mb_per_gb": round(resident_mb, 2) if resident_mb is not None else None,
        "loader_samples_per_s": round(loader, 1),
        "step_samples_per_s": round(step, 2),
        "loader_x_step": round(loader / step, 1),
    }


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--mb", type=positive, default=200.0, help="text to prepare")
    parser.add_argument("--gb", type=positive, default=1.0, help="samples to read and to serve")
    parser.add_argument("--num-proc", type=positive_int, default=2)
    parser.add_argument("--seconds", type=positive, default=SECONDS, help="for the loader, and for the steps")
    parser.add_argument("--json", type=json_path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments.mb, arguments.gb, arguments.num_proc, arguments.seconds, Path(folder))
    print(json.dumps(result))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
