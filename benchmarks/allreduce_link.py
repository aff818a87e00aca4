"""Link utilization of an all-reduce over emulated slow, long links. Needs Linux and root.

    python benchmarks/allreduce_link.py --peers 4 --mb 64 --mbit-s 100 --delay-ms 50 --loss 0,0.1 [--json FILE]

Each peer is a process in a network namespace of its own (benchmarks/_star.py). The delay is one-way between two peers,
the loss in percent of all packets of 1500 bytes, the rate that of each peer in both directions. Medians over the rounds
after the first. JSON: a list of `{peers, mb, mbit_s, delay_ms, loss_percent, codec, seconds, mb_per_s, link_share,
rounds_s}`; link_share is the bytes that all peers must send, without headers, over what their lines carry in these
seconds; rounds_s are the seconds of all rounds, including the first.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from _allreduce_manyhands import System
from _command_line import Parser, json_path, positive, positive_int, progress_of, run, skip, write_json
from _star import Line, address_of, enter, star, why_not
from _worker import Worker

from manyhands.averaging.codecs import plan_of
from manyhands.averaging.codecs.plan import codec_named

MB = 10**6
FLOAT_BYTES = 4
BITS = 8
TIMEOUT_S = 320.0
CODECS = ["none", "fp16", "int8"]
MAX_ERROR = 2e-2


class Side:
    """One peer, in its own process and namespace."""

    def __init__(self, namespace: str, rank: int, num_peers: int, numel: int, codecs: list[str]) -> None:
        enter(namespace)
        torch.set_num_threads(1)
        self._rank, self._num_peers = rank, num_peers
        self._base_N = torch.randn(numel, generator=torch.Generator().manual_seed(1))
        self._system = System(rank, num_peers, numel, codecs, "", host=address_of(rank))

    def contact(self) -> list[str]:
        return self._system.contact()

    def join(self, contacts: list[list[str]]) -> None:
        self._system.join(contacts)

    def round(self, codec: str, number: int) -> float:
        """Run one round; returns its seconds."""
        self._system.fill(codec, self._base_N, self._rank + 1.0 + number)
        return self._system.reduce(codec)[0]

    def error(self, codec: str, number: int) -> float:
        """Error of the result, relative to the mean."""
        mean = self._base_N * ((self._num_peers + 1) / 2 + number)
        return float((self._system.result(codec) - mean).norm() / mean.norm())

    def close(self) -> None:
        self._system.close()


def sent_bytes(codec: str, num_peers: int, numel: int) -> float:
    """Bytes that all peers send in a round: parts of vectors to the reducers, and each mean to all others."""
    plan = plan_of([(1, numel)], codec_named(codec))
    return 2 * (num_peers - 1) * plan.num_bytes(0, numel)


def measure(options: argparse.Namespace, loss_percent: float) -> list[dict[str, Any]]:
    """One row for each codec."""
    numel = round(options.mb * MB / FLOAT_BYTES)
    mbit_s = list(itertools.islice(itertools.cycle(options.mbit_s), options.peers))
    bytes_per_s = [rate * MB / BITS for rate in mbit_s]
    line = Line(bytes_per_s, options.delay_ms / 1000, loss_percent / 100)
    seconds: dict[str, list[float]] = {codec: [] for codec in options.codec}
    with contextlib.ExitStack() as stack, progress_of(1 + options.rounds * len(options.codec)) as steps:
        steps.begin(f"starting {options.peers} peers, {loss_percent:g}% loss")
        names = stack.enter_context(star(options.peers, line))
        pool = stack.enter_context(ThreadPoolExecutor(options.peers))
        workers = [
            stack.enter_context(Worker(Side, name, rank, options.peers, numel, options.codec))
            for rank, name in enumerate(names)
        ]

        def call(method: str, *arguments: Any) -> list[Any]:
            calls = [pool.submit(worker.call, method, *arguments, timeout_s=TIMEOUT_S) for worker in workers]
            return [one.result() for one in calls]

        call("join", call("contact"))
        for number in range(options.rounds):
            for codec in options.codec:
                steps.begin(f"{loss_percent:g}% loss, {codec}: round {number + 1} of {options.rounds}")
                slowest = max(call("round", codec, number))
                if not max(call("error", codec, number)) <= MAX_ERROR:
                    raise SystemExit("the result is wrong")
                seconds[codec].append(slowest)
    rows = []
    for codec, times in seconds.items():
        median = statistics.median(times[1:])
        share = sent_bytes(codec, options.peers, numel) / sum(bytes_per_s) / median
        rows.append(
            {
                "peers": options.peers,
                "mb": options.mb,
                "mbit_s": mbit_s[0] if len(set(mbit_s)) == 1 else mbit_s,
                "delay_ms": options.delay_ms,
                "loss_percent": loss_percent,
                "codec": codec,
                "seconds": round(median, 3),
                "mb_per_s": round(options.mb / median, 2),
                "link_share": round(share, 3),
                "rounds_s": [round(time, 2) for time in times],
            }
        )
    return rows


def percentages(text: str) -> list[float]:
    """Losses, separated by commas."""
    losses = [float(part) for part in text.split(",")]
    if not all(0 <= loss < 100 for loss in losses):
        raise argparse.ArgumentTypeError(f"{text!r}: a loss is from 0 to 100 percent")
    return losses


def rates(text: str) -> list[float]:
    """Megabits per second, separated by commas."""
    return [positive(part) for part in text.split(",")]


def codecs(text: str) -> list[str]:
    """Codecs, separated by commas."""
    names = text.split(",")
    if unknown := [name for name in names if name not in CODECS]:
        raise argparse.ArgumentTypeError(f"no codec {unknown[0]!r}; there are {', '.join(CODECS)}")
    return names


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--peers", type=positive_int, default=4)
    parser.add_argument("--mb", type=positive, default=64.0, help="of the float32 vector (default: 64)")
    help_text = "of each peer, both ways; several: of the peers in turn (default: 100)"
    parser.add_argument("--mbit-s", type=rates, default=[100.0], help=help_text)
    parser.add_argument("--delay-ms", type=positive, default=50.0, help="one way (default: 50)")
    parser.add_argument("--loss", type=percentages, default=[0.0, 0.1], help="percent, several (default: 0,0.1)")
    parser.add_argument("--codec", type=codecs, default=["none"], help="several of none, fp16, int8 (default: none)")
    parser.add_argument("--rounds", type=positive_int, default=4, help="the first does not count (default: 4)")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    if options.rounds < 2 or options.peers < 2:
        parser.error("at least 2 peers and 2 rounds are needed; the first round does not count")
    if (reason := why_not()) is not None:
        skip(reason)
    rows = []
    for loss in options.loss:
        rows += measure(options, loss)
        write_json(options.json, rows)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    run(main)
