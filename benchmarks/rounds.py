"""Duration of a round: the search for the group, the all-reduce and the verdict, over TLS on loopback.

    python benchmarks/rounds.py --peers 2 4 8 --numel 1000 --rounds 50 [--json FILE]

All peers are in one process, so the figures are upper bounds for as many machines on a fast network.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from pathlib import Path

import torch
from _roster import Everybody

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.rounds import RoundMeter, RoundRunner
from manyhands.base.address import Address
from manyhands.base.identity import Identity
from manyhands.rpc import Endpoint
from manyhands.transport import TlsTransport


async def measure(num_peers: int, numel: int, num_rounds: int) -> dict[str, float]:
    endpoints = [Endpoint(TlsTransport(Identity.generate())) for _ in range(num_peers)]
    for endpoint in endpoints:
        await endpoint.listen([Address.parse("/ip4/127.0.0.1/tcp/0")])
    averagers = []
    for endpoint in endpoints:
        for other in endpoints:
            endpoint.learn(other.peer_id, other.addresses)
        roster = Everybody({other.peer_id: False for other in endpoints if other is not endpoint})
        averagers.append(RoundRunner(endpoint, "benchmark", b"", roster, AveragingConfig(), random.Random(0)))
    vector = torch.ones(numel)
    seconds, forming = list[float](), list[float]()
    for _ in range(num_rounds + 1):
        meters = [RoundMeter() for _ in averagers]
        results = await asyncio.gather(
            *(averager.average(vector, 1.0, meter=meter) for averager, meter in zip(averagers, meters, strict=True))
        )
        forming.append(max(meter.matchmaking_s for meter in meters))
        seconds.append(max(m.matchmaking_s + r.averaging_s for m, r in zip(meters, results, strict=True)))
    for averager in averagers:
        await averager.close()
    for endpoint in endpoints:
        await endpoint.close()
    seconds, forming = sorted(seconds[1:]), forming[1:]
    return {
        "peers": num_peers,
        "numel": numel,
        "round_p50_ms": round(1e3 * statistics.median(seconds), 1),
        "round_max_ms": round(1e3 * seconds[-1], 1),
        "formation_p50_ms": round(1e3 * statistics.median(forming), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--numel", type=int, default=1000, help="elements of the vector, float32")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = [asyncio.run(measure(peers, arguments.numel, arguments.rounds)) for peers in arguments.peers]
    for result in results:
        print(json.dumps(result))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
