"""Throughput and latency between two processes of this machine, over mutual TLS 1.3.

    python benchmarks/transport.py --systems manyhands,asyncio,grpc --seconds 5 --repeats 3 [--json FILE]

Each system is a server process and a client process on loopback. All systems take turns in each repeat, figure by
figure, so that other load on the machine affects them alike; the results are medians over the repeats.

  manyhands  two endpoints: a bulk stream in pieces of 4 MiB, received into existing memory; calls
  asyncio    bare asyncio TLS with a BufferedProtocol and a header of 128 bytes: the limit without any protocol
  grpc       grpc.aio, streaming messages of 1 MiB bytes without protobuf; unary calls. Skipped without grpcio

The figures:

  one_way_mib_per_s     client to server, on one connection, while nothing comes back
  duplex_mib_per_s      both directions at once on one connection: the sum of both; duplex_up_mib_per_s (client to
                        server) and duplex_down_mib_per_s are its parts
  cpu_s_per_gib         user and system time of both processes together, in the one-way transfer
  one_way_cores         cores that both had together in it: far below two on a busy machine of two cores, where only the
                        ratios and cpu_s_per_gib mean something
  rpc_p50_ms, _p99_ms   a call with 64 bytes in each direction, one after the other
  connections_per_s     dials one after the other, each with its mutual handshake and one response of the server;
                        connections_per_s_16_at_once: sixteen at the same time
  control_p50_ms_during_bulk, _p99_   the same calls, 100 per second, while a one-way transfer runs at full speed.
                        manyhands and asyncio: on a separate connection; grpc: on the same channel, as is usual

The times do not include connecting and a warm-up. First the payload is sent in both directions and compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any, TypeVar

from _certificates import make_credentials
from _command_line import Parser, json_path, positive, positive_int, progress_of, run, write_json
from _link import MIB, PATIENCE_S, Link, Plan, Received, make_payload, serve_link, use_link
from _worker import Worker
from rich.console import Console
from rich.table import Table

from manyhands.runtime import LoopThread

T = TypeVar("T")
Row = dict[str, Any]

KEY_TYPES = {"manyhands": None, "asyncio": "ed25519", "grpc": "p256"}  # the TLS of grpc has no Ed25519
PACKAGES = {"grpc": "grpcio"}
WARM_UP_S = 0.5
CONTROL_PERIOD_S = 0.01
AT_ONCE = 16


# runs in the processes of a system


class Side:
    """One side of one system, on a loop thread."""

    def __init__(self, system: str, credentials: Any) -> None:
        self._module = importlib.import_module(f"_system_{system}")
        self._credentials = [] if credentials is None else [credentials]
        self._payload = make_payload()
        self._thread = LoopThread(system)

    def cpu_s(self) -> float:
        """User and system time of this process, all threads."""
        return time.process_time()

    def _run(self, coro: Coroutine[Any, Any, T], timeout_s: float = PATIENCE_S) -> T:
        return self._thread.run(coro, timeout_s, "in a benchmark")


class ServerSide(Side):
    """Listens."""

    def start(self) -> str:
        return self._run(self._start())

    async def _start(self) -> str:
        self._results: asyncio.Queue[Received] = asyncio.Queue()
        self._server = self._module.Server(*self._credentials)
        self._pieces = self._server.cut(self._payload)
        contact: str = await self._server.start(self._serve)
        return contact

    async def _serve(self, link: Link, plan: Plan) -> None:
        await self._results.put(await serve_link(link, plan, self._payload, self._pieces))

    def received(self) -> Received:
        """Measurements of the link that the client closed last."""
        return self._run(asyncio.wait_for(self._results.get(), PATIENCE_S))

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._run(self._server.close(), 3.0)
        self._thread.close()


class ClientSide(Side):
    """Dials, and measures."""

    def start(self, contact: str) -> None:
        self._run(self._start(contact))

    async def _start(self, contact: str) -> None:
        self._client = self._module.Client(*self._credentials)
        self._pieces = self._client.cut(self._payload)
        await self._client.start(contact)

    def transfer(self, kind: str, warm_up_s: float, counted_s: float) -> Received:
        """Use one link; returns what came back."""
        plan = Plan(kind, warm_up_s, counted_s)
        return self._run(self._transfer(plan), plan.send_s + 3 * PATIENCE_S)

    async def _transfer(self, plan: Plan, alongside: Coroutine[Any, Any, None] | None = None) -> Received:
        link = await self._client.open_link(plan)
        return await use_link(link, plan, self._payload, self._pieces, alongside)

    def calls(self, counted_s: float) -> list[float]:
        """Make calls one after the other; returns the round trips in ms."""
        samples: list[float] = []
        self._run(self._calls(samples, counted_s / 10, 0.0))
        samples.clear()
        self._run(self._calls(samples, counted_s, 0.0), counted_s + PATIENCE_S)
        return samples

    def calls_during_bulk(self, warm_up_s: float, counted_s: float) -> list[float]:
        """Make calls during a one-way transfer; returns the round trips in ms."""
        samples: list[float] = []
        plan = Plan("up", warm_up_s, counted_s)

        async def call() -> None:
            await asyncio.sleep(warm_up_s)
            await self._calls(samples, counted_s, CONTROL_PERIOD_S)

        self._run(self._transfer(plan, call()), plan.send_s + 3 * PATIENCE_S)
        return samples

    async def _calls(self, samples: list[float], seconds: float, pause_s: float) -> None:
        until = time.perf_counter() + seconds
        while (start := time.perf_counter()) < until:
            await self._client.echo()
            samples.append(1e3 * (time.perf_counter() - start))
            if pause_s > 0:
                await asyncio.sleep(pause_s)

    def dials(self, counted_s: float, at_once: int) -> float:
        """Connections per second, counting only the time in which they are made."""
        return self._run(self._dials(counted_s, at_once), 3 * counted_s + 3 * PATIENCE_S)

    async def _dials(self, counted_s: float, at_once: int) -> float:
        num_dials, seconds = 0, 0.0
        until = time.perf_counter() + counted_s
        while num_dials == 0 or time.perf_counter() < until:
            dials = [self._client.prepare_dial() for _ in range(at_once)]
            start = time.perf_counter()
            await asyncio.gather(*(dial.open() for dial in dials))
            seconds += time.perf_counter() - start
            num_dials += at_once
            await asyncio.gather(*(dial.close() for dial in dials))
        return num_dials / seconds

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._run(self._client.close(), 3.0)
        self._thread.close()


# runs in the main process


class Measured:
    """The two processes of one system, with one method for each group of figures."""

    def __init__(self, stack: contextlib.ExitStack, system: str, seconds: float, warm_up_s: float) -> None:
        key_type = KEY_TYPES[system]
        server, client = (None, None) if key_type is None else make_credentials(key_type)
        self.system = system
        self._seconds = seconds
        self._warm_up_s = warm_up_s
        self._server = stack.enter_context(Worker(ServerSide, system, server))
        self._client = stack.enter_context(Worker(ClientSide, system, client))

    def start(self) -> None:
        self._client.call("start", self._server.call("start"))

    def check(self) -> Row:
        down = self._client.call("transfer", "check", 0.0, 0.0)
        up = self._server.call("received")
        if not (up.is_payload and down.is_payload):
            raise RuntimeError(f"{self.system} does not deliver what was sent: {asdict(up)} up, {asdict(down)} down")
        return {}

    def one_way(self) -> Row:
        cpu_before_s, start = self._cpu_s(), time.perf_counter()
        self._transfer("up")
        up = self._server.call("received")
        cpu_s, seconds = self._cpu_s() - cpu_before_s, time.perf_counter() - start
        return {
            "one_way_mib_per_s": up.mib_per_s,
            "cpu_s_per_gib": cpu_s * 1024 * MIB / up.num_bytes,
            "one_way_cores": cpu_s / seconds,
        }

    def duplex(self) -> Row:
        down = self._transfer("both").mib_per_s
        up = self._server.call("received").mib_per_s
        return {"duplex_mib_per_s": up + down, "duplex_up_mib_per_s": up, "duplex_down_mib_per_s": down}

    def calls(self) -> Row:
        return _percentiles(self._client.call("calls", min(self._seconds, 2.0)), "rpc_p{}_ms")

    def calls_during_bulk(self) -> Row:
        timeout_s = self._seconds + 5 * PATIENCE_S
        samples = self._client.call("calls_during_bulk", self._warm_up_s, self._seconds, timeout_s=timeout_s)
        self._server.call("received")
        return _percentiles(samples, "control_p{}_ms_during_bulk")

    def connections(self) -> Row:
        seconds = min(self._seconds, 2.0) / 2
        return {
            "connections_per_s": self._client.call("dials", seconds, 1),
            f"connections_per_s_{AT_ONCE}_at_once": self._client.call("dials", seconds, AT_ONCE),
        }

    def _transfer(self, kind: str) -> Received:
        timeout_s = self._seconds + 5 * PATIENCE_S
        received: Received = self._client.call("transfer", kind, self._warm_up_s, self._seconds, timeout_s=timeout_s)
        return received

    def _cpu_s(self) -> float:
        return float(self._server.call("cpu_s") + self._client.call("cpu_s"))


FIGURES = [Measured.one_way, Measured.duplex, Measured.calls, Measured.calls_during_bulk, Measured.connections]


def _percentiles(samples: list[float], name: str) -> Row:
    samples.sort()
    return {name.format(50): statistics.median(samples), name.format(99): samples[math.ceil(0.99 * len(samples)) - 1]}


def measure(systems: list[str], seconds: float, repeats: int) -> dict[str, list[Row]]:
    """The figures of each system, once for each repeat."""
    rows: dict[str, list[Row]] = {system: [{} for _ in range(repeats)] for system in systems}
    with contextlib.ExitStack() as stack, progress_of(len(systems) * (1 + repeats * len(FIGURES))) as steps:
        measured = [Measured(stack, system, seconds, min(WARM_UP_S, seconds)) for system in systems]
        for one in measured:
            steps.begin(f"{one.system}: starting, comparing what arrives with what was sent")
            one.start()
            one.check()
        for repeat in range(repeats):
            for figure in FIGURES:
                for one in measured:
                    steps.begin(f"{one.system}: {figure.__name__.replace('_', ' ')}, {repeat + 1} of {repeats}")
                    rows[one.system][repeat] |= figure(one)
    return rows


def medians(rows: dict[str, list[Row]]) -> list[Row]:
    """One row for each system."""
    return [
        {"system": system} | {name: round(statistics.median(row[name] for row in of), 3) for name in of[0]}
        for system, of in rows.items()
    ]


def show(rows: dict[str, list[Row]]) -> None:
    """Print the figures as a table, with the ratios of manyhands to bare asyncio."""
    results = medians(rows)
    table = Table(title="loopback, medians")
    table.add_column("", no_wrap=True)
    for result in results:
        table.add_column(result["system"], justify="right")
    is_compared = {"manyhands", "asyncio"} <= rows.keys()
    if is_compared:
        table.add_column("manyhands / asyncio", justify="right")
    for name in results[0]:
        if name == "system":
            continue
        cells = [f"{result[name]:.4g}" for result in results]
        if is_compared and ("mib_per" in name or "gib" in name):  # within each repeat, where both met the same machine
            pairs = zip(rows["manyhands"], rows["asyncio"], strict=True)
            ratios = [ours[name] / bare[name] for ours, bare in pairs if bare[name]]  # too short to take CPU time: 0
            cells.append(f"{statistics.median(ratios):.2f}" if ratios else "-")
        table.add_row(name, *cells)
    Console().print(table)


def systems_of(text: str) -> list[str]:
    """Names of systems, separated by commas."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in KEY_TYPES:
            raise argparse.ArgumentTypeError(f"no system {name!r}; there are {', '.join(KEY_TYPES)}")
    return names


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--systems", type=systems_of, default=list(KEY_TYPES), help="names, separated by commas")
    parser.add_argument("--seconds", type=positive, default=5.0, help="counted in each transfer (default: 5)")
    parser.add_argument("--repeats", type=positive_int, default=3, help="default: 3")
    parser.add_argument("--quick", action="store_true", help="the same as --seconds 0.3 --repeats 1: a try, no figures")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the figures there, too")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.repeats = 0.3, 1
    systems = []
    for system in arguments.systems:
        if importlib.util.find_spec(system) is None:
            package = PACKAGES[system]
            print(f"{system} is skipped: {package} is not installed (pip install {package})", file=sys.stderr)
        else:
            systems.append(system)
    if not systems:
        sys.exit(2)
    rows = measure(systems, arguments.seconds, arguments.repeats)
    show(rows)
    results = medians(rows)
    for result in results:
        print(json.dumps(result))
    write_json(arguments.json, results)


if __name__ == "__main__":
    run(main)
