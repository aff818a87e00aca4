"""Averages a large vector over slow lines with a short round trip: which attempts commit, and how long each takes.

    python benchmarks/slow_lines.py --peers 4 --mb 200 --mbit-s 20 --codec auto --rounds 4 [--json FILE]

Linux, as root: each peer is a process in a network namespace of its own (benchmarks/_star.py). Each peer calls
`Averager.step` so many times, with the default times of a round; each call makes one attempt or more until its own time
is over. JSON: a list of one `{peers, mb, mbit_s, codec, steps: [{committed, seconds, mb_sent, mean, reason}]}`, as the
first peer saw it.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from _command_line import Parser, json_path, positive, positive_int, progress_of, run, skip, write_json
from _star import Line, address_of, enter, star, why_not
from _worker import Worker

import manyhands
from manyhands.averaging.config import AUTO, CODEC_NAMES, AveragingConfig

MB = 10**6
FLOAT_BYTES = 4
BITS = 8
DELAY_S = 0.0005
TIMEOUT_S = 180.0
ROW_NUMEL = 1000
"""The vector is a matrix with rows of this length: small tensors are never encoded."""


class Side:
    """One peer, in its own process and namespace."""

    def __init__(self, namespace: str, rank: int, numel: int, codec: str) -> None:
        enter(namespace)
        torch.set_num_threads(1)
        self._rank = rank
        self._codec = codec
        self._values = torch.empty(numel // ROW_NUMEL, ROW_NUMEL)
        self._listen = [f"/ip4/{address_of(rank)}/tcp/0"]

    def join(self, initial_peers: list[str]) -> list[str]:
        """Start this peer; returns its addresses."""
        self._peer = manyhands.Peer(listen=self._listen, initial_peers=initial_peers)
        self._averager = manyhands.Averager(
            [self._values], peer=self._peer, run_id="slow-lines", averaging=AveragingConfig(codec=self._codec)
        )
        return [str(address) for address in self._peer.addresses]

    def step(self, timeout_s: float) -> dict[str, Any]:
        """Average once."""
        self._values.fill_(self._rank + 1.0)
        began = time.monotonic()
        result = self._averager.step(timeout_s=timeout_s)
        return {
            "committed": result.committed,
            "seconds": round(time.monotonic() - began, 1),
            "mb_sent": round(result.num_bytes_sent / MB, 1),
            "mean": float(self._values[0, 0]),
            "reason": result.reason,
        }

    def close(self) -> None:
        self._averager.close()
        self._peer.close()


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The steps, as the first peer saw them."""
    numel = round(options.mb * MB / FLOAT_BYTES)
    line = Line([options.mbit_s * MB / BITS], DELAY_S, 0.0)
    steps = []
    with contextlib.ExitStack() as stack, progress_of(1 + options.rounds) as progress:
        progress.begin(f"starting {options.peers} peers")
        names = stack.enter_context(star(options.peers, line))
        pool = stack.enter_context(ThreadPoolExecutor(options.peers))
        workers = [
            stack.enter_context(Worker(Side, name, rank, numel, options.codec)) for rank, name in enumerate(names)
        ]
        initial_peers: list[str] = []
        for worker in workers:
            addresses = worker.call("join", initial_peers)
            initial_peers = initial_peers or addresses
        mean = sum(range(options.peers + 1)) / options.peers
        for number in range(options.rounds):
            progress.begin(f"step {number + 1} of {options.rounds}")
            calls = [pool.submit(worker.call, "step", TIMEOUT_S, timeout_s=2 * TIMEOUT_S) for worker in workers]
            results = [call.result() for call in calls]
            for result in results:
                if result["committed"] and abs(result["mean"] - mean) > 0.02 * mean:
                    raise SystemExit(f"the result is wrong: {result['mean']} in place of {mean}")
            steps.append(results[0])
    return steps


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--peers", type=positive_int, default=4)
    parser.add_argument("--mb", type=positive, default=200.0, help="of the float32 vector (default: 200)")
    parser.add_argument("--mbit-s", type=positive, default=20.0, help="of each peer, both ways (default: 20)")
    parser.add_argument("--codec", choices=[AUTO, *CODEC_NAMES], default=AUTO)
    parser.add_argument("--rounds", type=positive_int, default=4, help="steps (default: 4)")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    if (why := why_not()) is not None:
        skip(why)
    steps = measure(options)
    for number, step in enumerate(steps, 1):
        outcome = "committed" if step["committed"] else step["reason"]
        print(f"step {number}: {step['seconds']:6.1f} s, {step['mb_sent']:6.1f} MB sent: {outcome}")
    row = {"peers": options.peers, "mb": options.mb, "mbit_s": options.mbit_s, "codec": options.codec}
    write_json(options.json, [{**row, "steps": steps}])


if __name__ == "__main__":
    run(main)
