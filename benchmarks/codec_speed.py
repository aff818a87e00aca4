"""Speed of the all-reduce codecs on one core, their bits per value, and their accuracy.

    python benchmarks/codec_speed.py [--numel 10000000] [--slice 884736] [--repeats 5] [--json FILE]

The values are N(0,1) in float32, encoded and decoded in slices, as in averaging. By default a slice has 3.4 MiB, a
multiple of all rows and blocks; with much smaller ones, the overhead of torch's calls is as large as the work. One
thread does everything, and its CPU time is counted, so that other load disturbs less. It still does through the caches,
so compare with memcpy in the same run. The figures:

  encode_gb_per_s      10^9 bytes of float32 (not of encoded bytes) in each second; the best of the repeats
  decode_gb_per_s      the same
  bits_per_value       including scales
  mean_squared_error   of the decoded values

memcpy is a copy from one tensor to another.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
from _command_line import Parser, json_path, positive_int, progress_of, run, write_json
from rich.console import Console
from rich.table import Table

from manyhands.averaging.codecs import CODECS, Codec, prepare_kernels

Row = dict[str, Any]

SLICE_NUMEL = 216 * 4096


class Subject:
    """One codec with its buffers."""

    def __init__(self, codec: Codec | None, values_N: torch.Tensor, slice_numel: int) -> None:
        self._codec = codec
        self._values = torch.split(values_N, slice_numel)
        self._decoded_N = torch.empty_like(values_N)
        self._decoded = torch.split(self._decoded_N, slice_numel)
        sizes = [codec.num_bytes(part.numel()) if codec else 4 * part.numel() for part in self._values]
        self._encoded = torch.split(torch.empty(sum(sizes), dtype=torch.uint8), sizes)
        self._values_N = values_N

    def encode(self) -> None:
        """Encode all slices, one after the other."""
        for values, encoded in zip(self._values, self._encoded, strict=True):
            if self._codec is None:
                encoded.copy_(values.view(torch.uint8))
            else:
                self._codec.encode(values, encoded)

    def decode(self) -> None:
        """Decode all slices, one after the other."""
        for encoded, decoded in zip(self._encoded, self._decoded, strict=True):
            if self._codec is None:
                decoded.view(torch.uint8).copy_(encoded)
            else:
                self._codec.decode(encoded, decoded)

    def bits_per_value(self) -> float:
        return 8 * sum(part.numel() for part in self._encoded) / self._values_N.numel()

    def mean_squared_error(self) -> float:
        squares = sum(
            float((decoded - values).double().square().sum())
            for decoded, values in zip(self._decoded, self._values, strict=True)
        )
        return squares / self._values_N.numel()


def best_s(work: Callable[[], None], repeats: int) -> float:
    """CPU seconds of the fastest run, after one warm-up run."""
    work()
    taken = []
    for _ in range(repeats):
        began = time.thread_time()
        work()
        taken.append(time.thread_time() - began)
    return min(taken)


def measure(name: str, codec: Codec | None, values_N: torch.Tensor, slice_numel: int, repeats: int) -> Row:
    subject = Subject(codec, values_N, slice_numel)
    gigabytes = 4 * values_N.numel() / 1e9

    encode_s, decode_s = best_s(subject.encode, repeats), best_s(subject.decode, repeats)
    return {
        "codec": name,
        "encode_gb_per_s": round(gigabytes / encode_s, 2),
        "decode_gb_per_s": round(gigabytes / decode_s, 2),
        "bits_per_value": round(subject.bits_per_value(), 4),
        "mean_squared_error": subject.mean_squared_error(),
    }


def show(results: list[Row]) -> None:
    """Print the figures as a table."""
    table = Table(title="codecs on one core, GB of float32 per second")
    for head in ("codec", "encode", "decode", "bits", "squared error"):
        table.add_column(head, justify="left" if head == "codec" else "right")
    for result in results:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else value for value in result.values()))
    Console().print(table)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--numel", type=positive_int, default=10_000_000, help="values (default: 10000000)")
    parser.add_argument("--slice", type=positive_int, default=SLICE_NUMEL, help=f"values (default: {SLICE_NUMEL})")
    parser.add_argument("--repeats", type=positive_int, default=5, help="default: 5")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the figures there, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    prepare_kernels(arguments.numel, "auto")
    values_N = torch.randn(arguments.numel, generator=torch.Generator().manual_seed(1))
    results = []
    subjects: dict[str, Codec | None] = {"memcpy": None, **CODECS}
    with progress_of(len(subjects)) as steps:
        for name, codec in subjects.items():
            steps.begin(name)
            results.append(measure(name, codec, values_N, arguments.slice, arguments.repeats))
    show(results)
    for result in results:
        print(json.dumps(result))
    write_json(arguments.json, results)


if __name__ == "__main__":
    run(main)
