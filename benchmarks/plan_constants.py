"""The measured constants of `manyhands plan`. With root on Linux, all of them.

    python benchmarks/plan_constants.py [--only codecs,cpu,sparse,update,waits,fixed,line] [--record]

``--record`` writes those that were measured into src/manyhands/planning/measured.json; the others stay as they are.
:class:`manyhands.planning.measured.Constants` says what each one means.

  codecs  bits_per_value: of ten million values N(0, 1); by calculation, so the same on each machine
  cpu     round_ns_per_value: user and system time of four peers over loopback, 64 MB each (benchmarks/allreduce.py)
  sparse  round_ns_per_value.sparse and contribution_ns_per_value: encoding, and decoding, as in codec_speed.py
  update  update_ns_per_value: CPU time of the training thread in global steps of a peer alone with AdamW, from the
          difference between models of 1 and 9 million parameters; without the AdamW of plain torch it would be less
  waits   round_trips: slope of the wait in a step over the round-trip time, in virtual time (tests/simulation)
  fixed   fixed_s: median step of four real peers over loopback with a tiny model, minus their batches
  line    line_share: slope of the seconds of a round over those that its bytes need on the line, from `none` and `int8`
          on four emulated lines of 50 Mbit/s, 25 ms one way (benchmarks/allreduce_link.py); needs Linux and root
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the simulated worlds of the tests

import allreduce
import allreduce_link
import codec_speed
import msgspec
import plan_check
import torch
from _command_line import Parser, progress_of, run
from _star import why_not

import manyhands
from manyhands.averaging.codecs import Codec, prepare_kernels
from manyhands.averaging.codecs.plan import CODECS
from manyhands.averaging.codecs.sparse import SPARSE, Sparse
from manyhands.planning.measured import PATH, Measured
from tests.simulation.test_waiting import waits

SCRIPT = "benchmarks/plan_constants.py"
Values = dict[str, tuple[float, str]]
"""Value and unit of constants, by name."""
NANO = 1e-9
FLOAT_BYTES = 4
CODEC_NUMEL = 10_000_000
ROUND_MB = 64.0
SIZES = 1_000_000, 9_000_000
NUM_STEPS = 6
RTTS_S = 0.04, 0.4


def codecs() -> Values:
    num_bits = {name: 8 * codec.num_bytes(CODEC_NUMEL) / CODEC_NUMEL for name, codec in _all_codecs().items()}
    return {f"bits_per_value.{name}": (bits, "bits") for name, bits in num_bits.items()}


def _all_codecs() -> dict[str, Codec]:
    return {**CODECS, SPARSE: Sparse()}


def cpu() -> Values:
    rows = allreduce.measure({"manyhands": [*CODECS]}, plan_check.PEERS, ROUND_MB, NUM_STEPS)
    return {f"round_ns_per_value.{row['codec']}": (row["cpu_s_per_gb"] * FLOAT_BYTES, "ns") for row in rows}


def sparse() -> Values:
    torch.set_num_threads(1)
    values_N = torch.randn(CODEC_NUMEL, generator=torch.Generator().manual_seed(1))
    row = codec_speed.measure(SPARSE, Sparse(), values_N, codec_speed.SLICE_NUMEL, 5)
    return {
        "round_ns_per_value.sparse": (FLOAT_BYTES / row["encode_gb_per_s"], "ns"),
        "contribution_ns_per_value": (FLOAT_BYTES / row["decode_gb_per_s"], "ns"),
    }


def update() -> Values:
    few, many = (_update_s(numel) for numel in SIZES)
    return {"update_ns_per_value": ((many - few) / (SIZES[1] - SIZES[0]) / NANO, "ns")}


def _update_s(numel: int) -> float:
    """CPU seconds of the training thread in a global step alone, the median."""
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(numel // 1000, 1000))
    gradient = torch.randn(parameter.shape)
    taken: list[float] = []
    with manyhands.Peer(listen=["/ip4/127.0.0.1/tcp/0"]) as peer:
        optimizer = manyhands.Optimizer(
            torch.optim.AdamW([parameter], lr=1e-3), peer=peer, run_id="alone", target_batch_size=1,
            batch_size_per_step=1,
        )  # fmt: skip
        while len(taken) < 2 + NUM_STEPS:
            parameter.grad = gradient
            before, began = optimizer.global_step, time.thread_time()
            optimizer.step()
            if optimizer.global_step > before:
                taken.append(time.thread_time() - began)
    return statistics.median(taken[2:])


def trips() -> Values:
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    short_s, long_s = (statistics.mean(waits(rtt_s / 2)) for rtt_s in RTTS_S)
    return {"round_trips": ((long_s - short_s) / (RTTS_S[1] - RTTS_S[0]), "round trips")}


def fixed() -> Values:
    tiny = plan_check.SetUp("synchronous", "none", 1000, batch_s=0.25, num_batches=4, mbit=None)
    seen = plan_check.trained(tiny, 15)
    return {"fixed_s": (statistics.median(seen.steps_s) - seen.batch_s * tiny.num_batches, "s")}


def line() -> Values:
    options = argparse.Namespace(
        peers=plan_check.PEERS, mb=32.0, mbit_s=[50.0], delay_ms=25.0, rounds=5, codec=["none", "int8"]
    )
    rows = allreduce_link.measure(options, 0.0)
    needed_s = [row["link_share"] * row["seconds"] for row in rows]
    slope = (rows[0]["seconds"] - rows[1]["seconds"]) / (needed_s[0] - needed_s[1])
    return {"line_share": (1 / slope, "share")}


PARTS: dict[str, Callable[[], Values]] = {
    "codecs": codecs, "cpu": cpu, "sparse": sparse, "update": update, "waits": trips, "fixed": fixed, "line": line
}  # fmt: skip


def machine() -> str:
    """The processor, and its number of cores."""
    names = [row.partition(":")[2].strip() for row in _cpu_info() if row.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(names) or 1} cores, {platform.system()}"


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def record(values: Values) -> None:
    """Write constants into the file of the package; those that were not measured stay."""
    kept = msgspec.json.decode(PATH.read_bytes(), type=list[Measured]) if PATH.exists() else []
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    new = [
        Measured(name, float(f"{value:.4g}"), unit, SCRIPT, machine(), today) for name, (value, unit) in values.items()
    ]
    rows = [one for one in kept if one.name not in values] + new
    rows.sort(key=lambda one: one.name)
    PATH.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n")


def parts(text: str) -> list[str]:
    """Parts, separated by commas."""
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return names


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--only", type=parts, default=list(PARTS), metavar="PARTS", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--record", action="store_true", help="write them into the package")
    options = parser.parse_args()
    prepare_kernels(CODEC_NUMEL, "auto")
    with progress_of(len(options.only)) as steps:
        for name in options.only:
            steps.begin(name)
            if name == "line" and (reason := why_not()) is not None:
                print(f"skipped: {reason}", flush=True)
                continue
            values = PARTS[name]()
            for constant, (value, unit) in values.items():
                print(json.dumps({"name": constant, "value": value, "unit": unit}), flush=True)
            if options.record:
                record(values)


if __name__ == "__main__":
    run(main)
