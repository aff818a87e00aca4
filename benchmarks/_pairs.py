"""Peers behind routers that reach each other: pairs of them, and a whole swarm on slow lines (benchmarks/reach.py)."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch
from _routers import Host, internet
from _star import enter
from _trainer import RELAY_MBIT_S, Trainer, wait_for
from _worker import Worker

import manyhands
from manyhands.averaging import AveragingConfig
from manyhands.averaging.round import times
from manyhands.base.address import Address
from manyhands.base.identity import PeerId
from manyhands.rpc import Method, RpcConfig
from manyhands.rpc.ways import PUNCHED
from manyhands.transport import Stream

KINDS = {
    "public": Host(),
    "firewall": Host(has_firewall=True),
    "IPv6 with a firewall": Host(has_router=True, is_symmetric=True, has_ip6=True),
    "port-preserving": Host(has_router=True),
    "symmetric": Host(has_router=True, is_symmetric=True),
    "only port 443 out": Host(has_firewall=True, only_to=443),
}
"""What stands between a peer and the internet. In the third one IPv4 passes a symmetric router."""

RELAY_PORT = 443
PORT = 31337
BYTES = 8 << 20
"""Sent to measure the throughput of a pair."""

SETTLE_S = 4.0
"""By then a pair that can be connected without a relay is."""

COLUMNS = 1000
WARM_UP_ROUNDS = 2
"""In these the peers get to know each other."""

TIMEOUT_S = 20.0
FIRST_TIMEOUT_S = 90.0
START_TIMEOUT_S = 240.0
"""To import everything in three processes at once on a busy machine."""


class Empty(msgspec.Struct):
    """The request and the response of a call that does nothing."""


NOTHING = Method("bench.nothing", Empty, Empty)


class End:
    """A peer in its own process and namespace: one of a pair, or their relay."""

    def __init__(self, namespace: str) -> None:
        enter(namespace)
        self._peer: manyhands.Peer | None = None

    def start(self, initial_peers: list[str], port: int, is_client: bool, relays: bool) -> tuple[list[str], str]:
        """Join; returns the addresses and the id."""
        config = RpcConfig(relay_mbit_s=RELAY_MBIT_S if relays else None)
        listen = {} if is_client else {"listen": [str(port)]}
        self._peer = manyhands.Peer(initial_peers, client_mode=is_client, rpc_config=config, **listen)  # type: ignore[arg-type]
        self._peer.run(self._serve(), TIMEOUT_S, "serving")
        return self._peer.addresses, str(self._peer.peer_id)

    async def _serve(self) -> None:
        assert self._peer is not None
        self._peer.endpoint.handle(NOTHING, lambda remote, request: Empty())
        self._peer.endpoint.accept_bulk("bench", self._swallow)

    async def _swallow(self, remote: PeerId, header: bytes, stream: Stream) -> None:
        await stream.receive_into(memoryview(bytearray(BYTES)))
        await stream.send(b"!")
        await stream.wait_closed()

    def meet(self, peer_id: str, addresses: list[str]) -> dict[str, Any]:
        """Call the other peer, wait for the best way to it, and send it some MB."""
        assert self._peer is not None
        return self._peer.run(self._meet(PeerId(peer_id), addresses), 4 * TIMEOUT_S, "meeting the other peer")

    async def _meet(self, other: PeerId, addresses: list[str]) -> dict[str, Any]:
        assert self._peer is not None
        endpoint = self._peer.endpoint
        loop = asyncio.get_running_loop()
        endpoint.learn(other, [Address.parse(text) for text in addresses])
        began = loop.time()
        row: dict[str, Any] = {"way": "none", "connect_ms": None, "punched_ms": None, "mb_per_s": None}
        try:
            await endpoint.call(other, NOTHING, Empty(), TIMEOUT_S)
        except manyhands.ManyhandsError as error:
            row["why"] = str(error)
            return row
        row["connect_ms"] = round(1000 * (loop.time() - began))
        while loop.time() < began + SETTLE_S and endpoint.way_to(other) != PUNCHED:  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0.005)
        way = endpoint.way_to(other)
        assert way is not None
        row["way"] = way.kind
        if way == PUNCHED:
            row["punched_ms"] = round(1000 * (loop.time() - began))
        data = random.Random(1).randbytes(BYTES)
        stream = await endpoint.open_bulk(other, "bench", b"", TIMEOUT_S)
        sent_at = loop.time()
        await stream.send(data)
        await stream.receive_into(memoryview(bytearray(1)))
        row["mb_per_s"] = round(BYTES / (loop.time() - sent_at) / 1e6, 1)
        endpoint.release(stream)
        return row

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()


def measure_pair(one: str, other: str) -> dict[str, Any]:
    """One row: a peer behind ``one`` calls a peer behind ``other``, or the other one it if only ``one`` is public."""
    if one == "public":
        one, other = other, one
    hosts = [Host(), KINDS[one], KINDS[other]]
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(internet(hosts))
        relay, caller, target = (stack.enter_context(Worker(End, name)) for name in names)
        addresses, _ = relay.call("start", [], RELAY_PORT, False, True)
        target_addresses, target_id = target.call("start", addresses, PORT, other != "public", False)
        caller.call("start", addresses, PORT, one != "public", False)
        row = caller.call("meet", target_id, target_addresses, timeout_s=5 * TIMEOUT_S)
    return {"a": one, "b": other, **row, "first_contribution_s": first_contribution_s(one, other)}


def first_contribution_s(one: str, other: str) -> float | None:
    """Seconds from the start of a pair until its first round with both; None if there is none in time."""
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(internet([Host(), KINDS[one], KINDS[other]]))
        pool = stack.enter_context(ThreadPoolExecutor(2))
        first, *pair = (stack.enter_context(Worker(Trainer, name)) for name in names)
        for worker in (first, *pair):
            worker.call("ready", timeout_s=START_TIMEOUT_S)
        addresses = first.call("start", [], RELAY_PORT, None, True)
        wait_for([first], "step")
        for start in [pool.submit(worker.call, "start", addresses, PORT, None) for worker in pair]:
            start.result()
        until = time.monotonic() + FIRST_TIMEOUT_S
        while time.monotonic() < until:
            reports = [worker.call("report") for worker in pair]
            if errors := [report["error"] for report in reports if report["error"]]:
                raise RuntimeError(f"{one} and {other}: {errors[0]}")
            firsts: list[float | None] = [
                report["first_with"].get(peer["peer_id"])
                for report, peer in zip(reports, reversed(reports), strict=True)
            ]
            both = [first for first in firsts if first is not None]
            if len(both) == len(pair):
                return round(max(both), 1)
            time.sleep(0.2)
    return None


class Averaging:
    """A peer of a swarm that averages, in its own process and namespace."""

    def __init__(self, namespace: str, num_params: int, mbit_s: float) -> None:
        enter(namespace)
        torch.set_num_threads(1)
        self._rpc = RpcConfig(max_upload_mbit_s=mbit_s)
        self._num_params = num_params
        self._peer: manyhands.Peer | None = None
        self._averager: manyhands.Averager | None = None
        self._sent = 0

    def start(self, initial_peers: list[str], is_client: bool, seed: int) -> list[str]:
        """Join; returns the addresses."""
        listen = {} if is_client else {"listen": [str(PORT)]}
        self._peer = manyhands.Peer(initial_peers, client_mode=is_client, rpc_config=self._rpc, **listen)  # type: ignore[arg-type]
        shape = self._num_params // COLUMNS, COLUMNS  # vectors stay exact, whatever the codec
        tensor = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
        times.TWO_DIALS_S = 60.0  # type: ignore[attr-defined]  # all on one machine: streams open late
        config = AveragingConfig(codec="int8", matchmaking_time_s=30.0, averaging_timeout_s=240.0, max_group_size=64)
        self._averager = manyhands.Averager([tensor], peer=self._peer, run_id="swarm", averaging=config)
        return self._peer.addresses

    def num_punched(self) -> int:
        """How many other clients are connected without a relay."""
        assert self._peer is not None
        return list(self._peer.endpoint.ways().values()).count(PUNCHED)

    def round(self, num_peers: int) -> tuple[float, int, str]:
        """Average once: seconds, bytes sent, and why it is not a round with all."""
        assert self._peer is not None
        assert self._averager is not None
        before = self._peer.endpoint.bytes_sent
        began = time.perf_counter()
        result = self._averager.step(timeout_s=300.0)
        seconds = time.perf_counter() - began
        why = "" if result.committed and len(result.contributors) == num_peers else (result.reason or "not with all")
        return seconds, self._peer.endpoint.bytes_sent - before, why

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()


SWARMS = {
    "symmetric routers": Host(has_router=True, is_symmetric=True),
    "port-preserving routers": Host(has_router=True),
    "public": Host(),
}
"""Behind symmetric routers the peers are clients that reduce nothing; in the last one all can be dialled."""


def measure_swarm(kind: str, num_clients: int, num_params: int, mbit_s: float, num_rounds: int) -> dict[str, Any]:
    """One row: peers of one kind, and one with a public address, average with a limited upload each."""
    is_client = kind != "public"
    num_peers = num_clients + 1
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(internet([Host(), *[SWARMS[kind]] * num_clients]))
        pool = stack.enter_context(ThreadPoolExecutor(num_peers))
        workers = [stack.enter_context(Worker(Averaging, name, num_params, mbit_s)) for name in names]
        addresses = workers[0].call("start", [], False, 0)
        for number, worker in enumerate(workers[1:], 1):
            worker.call("start", addresses, is_client, number)
        rows = []
        for _ in range(WARM_UP_ROUNDS + num_rounds):
            calls = [pool.submit(worker.call, "round", num_peers, timeout_s=320.0) for worker in workers]
            rows.append([call.result() for call in calls])
        del rows[:WARM_UP_ROUNDS]
        num_punched = sum(worker.call("num_punched") for worker in workers) // 2
    whys = {why for row in rows for _, _, why in row if why}
    return {
        "swarm": kind, "peers": num_peers, "params": num_params, "mbit_s": mbit_s, "punched_pairs": num_punched,
        "step_s": round(statistics.median(max(seconds for seconds, _, _ in row) for row in rows), 1),
        "public_mb": round(statistics.median(row[0][1] for row in rows) / 1e6, 1),
        "other_mb": round(statistics.median(sent for row in rows for _, sent, _ in row[1:]) / 1e6, 1),
        "failed": len(whys), "why": "; ".join(sorted(whys))[:200],
    }  # fmt: skip
