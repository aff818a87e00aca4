"""Slowdown of a training loop while the peer of the same process transfers data.

    python benchmarks/gil.py [--seconds 3] [--repeats 3] [--json FILE]

The main thread trains; the network thread of its peer exchanges data with a peer in another process on one bulk stream,
paced at the same rate in both directions. Both processes share this machine's cores: on a machine with few of them,
part of the slowdown comes from the other process instead of the GIL. The host of a GPU does not have this part.

Two loops, each on one core:

  large  matrix products of 1024 x 1024 float32: most of the time is spent inside of torch, without the GIL
  tiny   additions of 64 float32: most of the time is spent in Python, as when a GPU waits for kernel launches. A step
         is 1000 of them

The figures, medians over the repeats:

  mb_per_s_wanted       in each direction, in 10^6 bytes; 0 is a connected peer that sends only heartbeats
  mb_per_s_reached      the slower of the two directions
  steps_per_s           of the loop
  speed_kept            steps_per_s over that of the same loop at 0 MB/s in the same repeat
  cpu_s_per_s           CPU seconds of this process in each second, all threads
  network_cpu_s_per_s   the part of it outside of the main thread
  core_wait_s_per_s     share of the time in which the main thread was ready, but no core was free. Linux only
  speed_kept_less_core_wait   speed_kept without that time: the cost of the GIL, on a busy machine too
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from _command_line import Parser, json_path, positive, positive_int, progress_of, run, write_json
from _worker import Worker
from rich.console import Console
from rich.table import Table

from manyhands import Peer
from manyhands.base.errors import PeerLost
from manyhands.base.identity import PeerId
from manyhands.transport import Stream

Row = dict[str, Any]
Step = Callable[[], object]

KIND = "benchmark"
LISTEN = ("/ip4/127.0.0.1/tcp/0",)
PIECE_BYTES = 1 << 20
MB = 1e6
SETTLE_S = 0.3  # from the start of a flow to the first counted step
PATIENCE_S = 10.0
SCHEDSTAT = Path("/proc/thread-self/schedstat")  # running, waiting for a core, time slices
HEADS = ["loop", "MB/s", "reached", "steps/s", "CPU", "network CPU", "core wait", "kept", "kept less wait"]


class Flow:
    """Sends at a rate on a bulk stream, and receives what arrives. Its counts may be read from any thread."""

    def __init__(self, stream: Stream, bytes_per_s: float) -> None:
        self.num_sent = 0
        self.num_received = 0
        self._stream = stream
        self._bytes_per_s = bytes_per_s

    async def run(self) -> None:
        """Run until the stream is closed at either end."""
        receiving = asyncio.ensure_future(self._receive())
        try:
            await self._send()
        finally:
            self._stream.abort()
            await receiving

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        piece = memoryview(bytes(PIECE_BYTES))
        start = loop.time()
        with contextlib.suppress(PeerLost):
            while True:
                await self._stream.send(piece)
                self.num_sent += PIECE_BYTES
                await asyncio.sleep(max(0.0, start + self.num_sent / self._bytes_per_s - loop.time()))

    async def _receive(self) -> None:
        piece = memoryview(bytearray(PIECE_BYTES))
        with contextlib.suppress(PeerLost):
            while True:
                await self._stream.receive_into(piece)
                self.num_received += PIECE_BYTES


class OtherSide:
    """The peer in the other process: it answers each stream with a flow of the same rate."""

    def __init__(self, addresses: list[str]) -> None:
        self._peer = Peer(addresses, listen=LISTEN)
        self._peer.run(self._accept(), PATIENCE_S, "setting up")

    async def _accept(self) -> None:
        async def answer(_: PeerId, header: bytes, stream: Stream) -> None:
            await Flow(stream, msgspec.json.decode(header, type=float)).run()

        self._peer.endpoint.accept_bulk(KIND, answer)

    def peer_id(self) -> PeerId:
        return self._peer.peer_id

    def close(self) -> None:
        self._peer.close()


class Link:
    """Starts and ends flows between this process's peer and the other one."""

    def __init__(self, peer: Peer, other: PeerId) -> None:
        self._peer = peer
        self._other = other

    @contextlib.contextmanager
    def flow(self, mb_per_s: float) -> Any:
        """Run a flow at this rate in both directions during the block; None at 0."""
        if mb_per_s == 0:
            yield None
            return
        flow, task = self._peer.run(self._start(mb_per_s * MB), PATIENCE_S, "starting a flow")
        try:
            yield flow
        finally:
            self._peer.run(self._end(task), PATIENCE_S, "ending a flow")

    async def _start(self, bytes_per_s: float) -> tuple[Flow, asyncio.Task[None]]:
        endpoint = self._peer.endpoint
        stream = await endpoint.open_bulk(self._other, KIND, msgspec.json.encode(bytes_per_s))
        flow = Flow(stream, bytes_per_s)

        async def run_and_release() -> None:
            try:
                await flow.run()
            finally:
                endpoint.release(stream)

        return flow, asyncio.ensure_future(run_and_release())

    async def _end(self, task: asyncio.Task[None]) -> None:
        if task.done():
            task.result()
            raise RuntimeError("the flow ended by itself")
        task.cancel()
        await asyncio.wait([task])


def large() -> Step:
    """One matrix product."""
    import torch

    left, right, product = torch.rand(1024, 1024), torch.rand(1024, 1024), torch.empty(1024, 1024)
    return lambda: torch.matmul(left, right, out=product)


def tiny() -> Step:
    """A thousand small additions."""
    import torch

    total, one = torch.zeros(64), torch.ones(64)

    def step() -> None:
        for _ in range(1000):
            total.add_(one)

    return step


LOOPS = {"large": large, "tiny": tiny}


def core_wait_s() -> float | None:
    """Time for which this thread was ready while no core was free; None where unknown."""
    try:
        return int(SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return None


def train(step: Step, flow: Flow | None, seconds: float) -> Row:
    """Run steps for ``seconds``, and measure the flow meanwhile."""
    until = time.perf_counter() + SETTLE_S
    while time.perf_counter() < until:
        step()
    moved = (flow.num_sent, flow.num_received) if flow is not None else (0, 0)
    waited_s = core_wait_s()
    cpu_s, main_cpu_s, start = time.process_time(), time.thread_time(), time.perf_counter()
    num_steps = 0
    while (passed_s := time.perf_counter() - start) < seconds:
        step()
        num_steps += 1
    cpu_s, main_cpu_s = time.process_time() - cpu_s, time.thread_time() - main_cpu_s
    moved = (flow.num_sent - moved[0], flow.num_received - moved[1]) if flow is not None else (0, 0)
    wait_share = (core_wait_s() - waited_s) / passed_s if waited_s is not None else None
    return {
        "mb_per_s_reached": min(moved) / MB / passed_s,
        "steps_per_s": num_steps / passed_s,
        "cpu_s_per_s": cpu_s / passed_s,
        "network_cpu_s_per_s": max(0.0, cpu_s - main_cpu_s) / passed_s,
        "core_wait_s_per_s": wait_share,
        "speed_kept": 1.0,
        "speed_kept_less_core_wait": None if wait_share is None else 1.0,
    }


def compared(row: Row, idle: Row) -> Row:
    """The row with its speed relative to that of an idle peer."""
    kept = row["steps_per_s"] / idle["steps_per_s"]
    if (wait_share := row["core_wait_s_per_s"]) is None:
        return row | {"speed_kept": kept}
    less_wait = kept * (1 - idle["core_wait_s_per_s"]) / (1 - wait_share)
    return row | {"speed_kept": kept, "speed_kept_less_core_wait": less_wait}


def median(values: list[float | None]) -> float | None:
    """The median, or None where the machine does not report the value."""
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 3) if known else None


def measure(rates: list[float], seconds: float, repeats: int) -> list[Row]:
    """One row for each loop and rate."""
    import torch  # here, so that the other process need not import it

    torch.set_num_threads(1)
    rows: dict[tuple[str, float], list[Row]] = {(loop, rate): [] for loop in LOOPS for rate in rates}
    with (
        Peer(listen=LISTEN) as peer,
        Worker(OtherSide, [str(address) for address in peer.addresses]) as other,
        progress_of(repeats * len(rows)) as steps,
    ):
        link = Link(peer, other.call("peer_id"))
        for repeat in range(repeats):
            for loop, make_step in LOOPS.items():
                step = make_step()
                for rate in rates:
                    steps.begin(f"{loop} loop at {rate:g} MB/s, {repeat + 1} of {repeats}")
                    with link.flow(rate) as flow:
                        row = train(step, flow, seconds)
                    idle = rows[loop, rates[0]][repeat] if rate != rates[0] else row
                    rows[loop, rate].append(compared(row, idle))
    return [
        {"loop": loop, "mb_per_s_wanted": rate} | {name: median([row[name] for row in of]) for name in of[0]}
        for (loop, rate), of in rows.items()
    ]


def show(results: list[Row]) -> None:
    """Print the figures as a table."""
    table = Table(title="a training loop beside the network thread, medians")
    for head in HEADS:
        table.add_column(head, justify="left" if head == "loop" else "right")
    for result in results:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value or "") for value in result.values()))
    Console().print(table)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--rates", type=positive, nargs="+", default=[20.0, 100.0], metavar="MB_PER_S",
                        help="each way (default: 20 100); 0 is measured always")  # fmt: skip
    parser.add_argument("--seconds", type=positive, default=3.0, help="of each loop at each rate (default: 3)")
    parser.add_argument("--repeats", type=positive_int, default=3, help="default: 3")
    parser.add_argument("--quick", action="store_true", help="the same as --seconds 0.3 --repeats 1: a try, no figures")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the figures there, too")
    arguments: argparse.Namespace = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.repeats = 0.3, 1
    results = measure([0.0, *dict.fromkeys(arguments.rates)], arguments.seconds, arguments.repeats)
    show(results)
    for result in results:
        print(json.dumps(result))
    write_json(arguments.json, results)


if __name__ == "__main__":
    run(main)
