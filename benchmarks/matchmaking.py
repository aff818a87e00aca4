"""Time until the peers of a run have formed their group, on loopback.

    python benchmarks/matchmaking.py [--peers 2,4,8,16] [--groups 100] [--json FILE]

All peers of a case are endpoints over TLS in one process and on one loop, so their CPU time adds up: the figures are
upper bounds for as many machines. For each group, all peers call at times drawn from 0 to 20 ms; the time from the last
call until the last peer has the group is counted.

    cold   with a given roster and no connections: dials and handshakes are included
    warm   with a given roster, and peers that were in a group before
    dht    whole peers with a DHT and an Averager each, which read each other's records at every step; counted is the
           step without the all-reduce and the verdict
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import torch
from _roster import Everybody

from manyhands.averaging.averager_loop import AveragerLoop
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.matchmaking.matchmaker import Matchmaker
from manyhands.averaging.messages import Position
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.averaging.tensor_list import TensorList
from manyhands.base.address import Address
from manyhands.base.identity import Identity
from manyhands.peer import Presence
from manyhands.rpc import Endpoint
from manyhands.transport import TlsTransport

LOOPBACK = Address.parse("/ip4/127.0.0.1/tcp/0")
SPREAD_S = 0.02
PAUSE_S = 0.3
"""Pause between two steps of peers with a DHT, for their records to arrive."""
TIMEOUT_S = 30.0
COLD_SHARE = 10
"""Warm groups for each cold one, which needs new peers."""


class Swarm:
    """Peers with a given roster."""

    def __init__(self, num_peers: int) -> None:
        self.endpoints = [Endpoint(TlsTransport(Identity.generate())) for _ in range(num_peers)]

    async def start(self) -> None:
        for endpoint in self.endpoints:
            await endpoint.listen([LOOPBACK])
        self.rosters, self.matchmakers = [], []
        for number, endpoint in enumerate(self.endpoints):
            for other in self.endpoints:
                endpoint.learn(other.peer_id, other.addresses)
            others = {other.peer_id: False for other in self.endpoints if other is not endpoint}
            roster = Everybody(endpoint, others)
            rng = random.Random(number)
            self.rosters.append(roster)
            self.matchmakers.append(Matchmaker(RunEndpoint(endpoint, "benchmark"), b"", roster, AveragingConfig(), rng))

    async def close(self) -> None:
        for matchmaker in self.matchmakers:
            await matchmaker.close()
        for endpoint in self.endpoints:
            await endpoint.close()

    async def form(self, step: int, rng: random.Random) -> float:
        """Form a group; returns the seconds until all peers have it."""
        for roster in self.rosters:
            roster.at = Position(step, b"benchmark")
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda matchmaker=matchmaker: matchmaker.find_group(1.0, 0)  # type: ignore[misc]
            for matchmaker in self.matchmakers
        ]
        return await from_the_last_call(calls, rng)


async def from_the_last_call(calls: Sequence[Callable[[], Awaitable[object]]], rng: random.Random) -> float:
    """Make each call at a random time; returns the seconds from the last of these times until all have returned."""
    loop = asyncio.get_running_loop()
    times = [loop.time() + rng.uniform(0.0, SPREAD_S) for _ in calls]

    async def make(call: Callable[[], Awaitable[object]], at: float) -> None:
        await asyncio.sleep(at - loop.time())
        await call()

    await asyncio.gather(*(make(call, at) for call, at in zip(calls, times, strict=True)))
    return loop.time() - max(times)


async def with_given_roster(num_peers: int, num_groups: int) -> dict[str, list[float]]:
    rng = random.Random(num_peers)
    cold, warm = [], []
    for _ in range(max(1, num_groups // COLD_SHARE)):
        swarm = Swarm(num_peers)
        await swarm.start()
        cold.append(await swarm.form(0, rng))
        warm += [await swarm.form(step, rng) for step in range(1, COLD_SHARE + 1)]
        await swarm.close()
    return {"cold": cold, "warm": warm}


async def with_dht(num_peers: int, num_groups: int) -> list[float]:
    rng = random.Random(num_peers)
    presences: list[Presence] = []
    members: list[AveragerLoop] = []
    config = AveragingConfig(codec="none")
    for number in range(num_peers):
        presence = Presence(TlsTransport(Identity.generate()), rng=random.Random(number))
        await presence.start(presences[0].endpoint.addresses if presences else [], [LOOPBACK])
        presences.append(presence)
        members.append(AveragerLoop(presence, "benchmark", TensorList([torch.ones(10)]), config))
        await members[-1].start()
    seconds = []
    for group in range(num_groups + 1):
        others_s: list[float] = []

        async def step(member: AveragerLoop, others_s: list[float] = others_s) -> None:
            attempts = await member.step(torch.ones(10), 1.0, TIMEOUT_S)
            others_s.append(attempts.meter.averaging_s + attempts.meter.vote_s)
            if attempts.committed is None or len(attempts.committed.manifest.members) != num_peers:
                num_members = 0 if attempts.committed is None else len(attempts.committed.manifest.members)
                print(f"a group of {num_members} instead of {num_peers}: {attempts.reason}", flush=True)

        total_s = await from_the_last_call([lambda member=member: step(member) for member in members], rng)  # type: ignore[misc]
        if group:  # the first one also reads the records
            seconds.append(max(0.0, total_s - min(others_s)))
        await asyncio.sleep(PAUSE_S)
    for member in members:
        await member.close()
    for presence in presences:
        await presence.stop()
    return seconds


def summary(num_peers: int, case: str, seconds: list[float]) -> dict[str, object]:
    ordered = sorted(seconds)
    return {
        "peers": num_peers,
        "processes": 1,
        "case": case,
        "groups": len(ordered),
        "p50_ms": round(1e3 * statistics.median(ordered), 1),
        "p99_ms": round(1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 1),
    }


def counts(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 2:
        raise argparse.ArgumentTypeError(f"{text}: a group has at least 2 peers; for example 2,4,8,16")
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=counts, default=[2, 4, 8, 16], help="comma-separated")
    parser.add_argument("--groups", type=int, default=100, help="warm ones for each number of peers")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.groups < 1:
        parser.error(f"--groups {arguments.groups} must be at least 1; for example 100")
    results = []
    for num_peers in arguments.peers:
        cases = asyncio.run(with_given_roster(num_peers, arguments.groups))
        cases["dht"] = asyncio.run(with_dht(num_peers, max(1, arguments.groups // 4)))
        for case, seconds in cases.items():
            results.append(summary(num_peers, case, seconds))
            print(json.dumps(results[-1]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
