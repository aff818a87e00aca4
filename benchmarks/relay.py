"""What a relay costs: the throughput of one bulk stream through it, and its memory for many control connections.

    python benchmarks/relay.py --json FILE [--mb 400] [--turns 7] [--connections 200]

Relay, callers and targets are endpoints in three processes that are connected over the loopback interface. Callers and
targets are in client mode, and believe that their router is symmetric, so that they stay relayed.

Bulk: one caller sends ``--mb`` to one target, in turns directly and through the relay. JSON: ``{mb, turns,
direct_mb_per_s, relayed_mb_per_s, relayed_to_direct, relay_cpu_s_per_gb, direct_cpu_s_per_gb}``, medians of the turns.
``relay_cpu_s_per_gb`` are the CPU seconds of the relay's process for each GB (10^9 bytes) that it forwards,
``direct_cpu_s_per_gb`` those of caller and target together without a relay. CPU seconds hardly depend on what else the
machine does; the throughput does.

Control: ``--connections`` control connections of 20 callers to their targets. JSON: ``{connections, idle_mb,
relayed_mb, kb_per_connection}``: the memory (PSS, 10^6 bytes) of a relay without clients; above that, once all are open
and have carried a call; that for each connection, those of the clients to the relay included. All callers share one IP
address here, so the limits for one address are lifted.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from _command_line import Parser, json_path, positive_int, progress_of, run, skip, write_json
from _worker import Worker

from manyhands.base.address import Address
from manyhands.base.identity import Identity, PeerId
from manyhands.rpc import Endpoint, Method, RpcConfig, relayed_streams
from manyhands.rpc.ways import DIRECT, relayed_by
from manyhands.runtime import LoopThread
from manyhands.transport import Stream, TlsTransport
from manyhands.transport.admission import ListenLimits

LISTEN = Address.parse("/ip4/127.0.0.1/tcp/0")
KIND = "bench"
RELAY_MBIT_S = 1e6
PIECE_BYTES = 1 << 20
TIMEOUT_S = 120.0
SETTLE_S = 2.0
NUM_CALLERS = 20
MB = 10**6


class Empty(msgspec.Struct):
    """The request and the response of a call that does nothing."""


NOTHING = Method("bench.nothing", Empty, Empty)


class Ends:
    """Some endpoints in one process: the relay, the callers or the targets."""

    def __init__(self) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        relayed_streams.MAX_OF_ONE_SOURCE = relayed_streams.MAX_STREAMS
        self._runtime = LoopThread("manyhands bench")
        self._endpoints: list[Endpoint] = []

    def listen(self, relay_mbit_s: float | None = None) -> tuple[PeerId, str]:
        """Add an endpoint that can be dialled; returns its id and its address."""
        return self._runtime.run(self._listen(RpcConfig(relay_mbit_s=relay_mbit_s)), TIMEOUT_S, "listening")

    async def _listen(self, config: RpcConfig) -> tuple[PeerId, str]:
        transport = TlsTransport(Identity.generate(), ListenLimits(max_streams_per_host=4096))
        endpoint = self._added(Endpoint(transport, config=config))
        await endpoint.listen([LISTEN])
        return endpoint.peer_id, str(endpoint.addresses[0])

    def join(self, num: int, relay: str) -> list[PeerId]:
        """Add endpoints in client mode, and connect them to the relay; returns their ids."""
        return self._runtime.run(self._join(num, Address.parse(relay)), TIMEOUT_S, "connecting to the relay")

    async def _join(self, num: int, relay: Address) -> list[PeerId]:
        seers = [Identity.generate().peer_id for _ in range(4)]
        clients = []
        for number in range(num):
            client = self._added(Endpoint(TlsTransport(Identity.generate()), client_mode=True))
            for seer in seers:
                client.outside.note(seer, ("203.0.113.1", 5000 + number), ("192.168.0.2", 4000))
            await client.connect(relay)
            clients.append(client.peer_id)
        return clients

    def _added(self, endpoint: Endpoint) -> Endpoint:
        endpoint.handle(NOTHING, lambda remote, request: Empty())
        endpoint.accept_bulk(KIND, self._swallow)
        self._endpoints.append(endpoint)
        return endpoint

    async def _swallow(self, remote: PeerId, header: bytes, stream: Stream) -> None:
        piece = memoryview(bytearray(PIECE_BYTES))
        for _ in range(int(header)):
            await stream.receive_into(piece)
        await stream.send(b"!")
        await stream.wait_closed()

    def call(self, targets: list[PeerId], relay: PeerId) -> None:
        """Have each endpoint call all targets through the relay."""
        self._runtime.run(self._call_all(targets, relay), TIMEOUT_S, "calling through the relay")

    async def _call_all(self, targets: list[PeerId], relay: PeerId) -> None:
        for target in targets:
            await asyncio.gather(*(one.call(target, NOTHING, Empty(), TIMEOUT_S) for one in self._endpoints))
        for client in self._endpoints:
            assert all(client.way_to(target) == relayed_by(relay) for target in targets)

    def send(self, target: PeerId, address: str, num_mb: int) -> float:
        """Have the first endpoint send to a target, at an address or through the relay; returns the seconds."""
        return self._runtime.run(self._send(target, address, num_mb), TIMEOUT_S, "sending")

    async def _send(self, target: PeerId, address: str, num_mb: int) -> float:
        client = self._endpoints[0]
        if address:
            await client.connect(Address.parse(address))
        assert (client.way_to(target) == DIRECT) is bool(address)
        num_pieces = num_mb * MB // PIECE_BYTES
        piece = random.Random(1).randbytes(PIECE_BYTES)
        stream = await client.open_bulk(target, KIND, str(num_pieces).encode(), TIMEOUT_S)
        try:
            began = time.perf_counter()
            for _ in range(num_pieces):
                await stream.send(piece)
            await stream.receive_into(memoryview(bytearray(1)))
            return time.perf_counter() - began
        finally:
            client.release(stream)

    def cpu_s(self) -> float:
        """CPU seconds of this process so far."""
        return time.process_time()

    def pss_mb(self) -> float:
        """Memory of this process; what it shares with others counts in parts."""
        gc.collect()
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / MB

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._runtime.run(self._close(), TIMEOUT_S, "closing")
        self._runtime.close()

    async def _close(self) -> None:
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))


def measure_bulk(num_mb: int, num_turns: int) -> dict[str, Any]:
    """One stream, directly and through a relay."""
    with Worker(Ends) as relay, Worker(Ends) as caller, Worker(Ends) as target:
        relay_id, address = relay.call("listen", RELAY_MBIT_S)
        caller.call("join", 1, address)
        [hidden] = target.call("join", 1, address)
        caller.call("call", [hidden], relay_id)
        direct = target.call("listen")
        turns = []
        for _ in range(num_turns):
            before = [one.call("cpu_s") for one in (relay, caller, target)]
            direct_s = caller.call("send", *direct, num_mb, timeout_s=TIMEOUT_S)
            between = [one.call("cpu_s") for one in (relay, caller, target)]
            relayed_s = caller.call("send", hidden, "", num_mb, timeout_s=TIMEOUT_S)
            relay_cpu_s = relay.call("cpu_s") - between[0]
            ends_cpu_s = sum(between[1:]) - sum(before[1:])
            turns.append((num_mb / direct_s, num_mb / relayed_s, direct_s / relayed_s, relay_cpu_s, ends_cpu_s))
    direct_rate, relayed_rate, ratio, relay_cpu_s, ends_cpu_s = (statistics.median(c) for c in zip(*turns, strict=True))
    return {
        "mb": num_mb, "turns": num_turns,
        "direct_mb_per_s": round(direct_rate), "relayed_mb_per_s": round(relayed_rate),
        "relayed_to_direct": round(ratio, 2),
        "relay_cpu_s_per_gb": round(1000 * relay_cpu_s / num_mb, 2),
        "direct_cpu_s_per_gb": round(1000 * ends_cpu_s / num_mb, 2),
    }  # fmt: skip


def measure_control(num_connections: int) -> dict[str, Any]:
    """Many control connections through one relay."""
    with Worker(Ends) as relay, Worker(Ends) as callers, Worker(Ends) as targets:
        relay_id, address = relay.call("listen")
        relay.call("pss_mb")
        time.sleep(SETTLE_S)
        idle_mb = relay.call("pss_mb")
        callers.call("join", NUM_CALLERS, address, timeout_s=TIMEOUT_S)
        peer_ids = targets.call("join", num_connections // NUM_CALLERS, address, timeout_s=TIMEOUT_S)
        callers.call("call", peer_ids, relay_id, timeout_s=TIMEOUT_S)
        time.sleep(SETTLE_S)
        relayed_mb = relay.call("pss_mb") - idle_mb
    num = NUM_CALLERS * len(peer_ids)
    return {
        "connections": num, "idle_mb": round(idle_mb, 1), "relayed_mb": round(relayed_mb, 1),
        "kb_per_connection": round(1000 * relayed_mb / num),
    }  # fmt: skip


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--mb", type=positive_int, default=400, help="10^6 bytes that are sent in each turn")
    parser.add_argument("--turns", type=positive_int, default=7)
    parser.add_argument("--connections", type=positive_int, default=200, help=f"a multiple of {NUM_CALLERS}")
    parser.add_argument("--json", type=json_path, help="write the figures here as well")
    options = parser.parse_args()
    if options.connections % NUM_CALLERS:
        parser.error(f"--connections {options.connections} is not a multiple of {NUM_CALLERS}")
    if sys.platform != "linux":
        skip("the memory of a process is read from /proc, which Linux alone has")
    with progress_of(2) as steps:
        steps.begin("one stream")
        results = [measure_bulk(options.mb, options.turns)]
        steps.begin(f"{options.connections} control connections")
        results.append(measure_control(options.connections))
    for result in results:
        print("  ".join(f"{name} {value}" for name, value in result.items()))
    write_json(options.json, results)


if __name__ == "__main__":
    run(main)
