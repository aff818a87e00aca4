"""What one read of a key costs a peer while strangers show thousands of records under it.

    python -m tests.hostile.reads [--nodes 2] [--open]

Five honest nodes in networks of their own, and two machines whose nodes, those nearest to the key, hold 6,200 valid
records each. One process without sockets, so that times are those of the processor. A line for each read: the seconds,
the bytes that the reader was sent, the signatures that it checked, and how many records of honest peers it got.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Collection, Set
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from manyhands.base import identity as identity_module
from manyhands.base.identity import Identity, PeerId
from manyhands.dht import records as records_module
from manyhands.dht.ids import distance, key_id, node_id
from manyhands.dht.messages import FIND
from manyhands.dht.records import Record, encode_value
from tests.integration.dht_swarm import CONFIG, Swarm
from tests.unit.dht.examples import WALL_NOW

KEY = "run.progress"
NUM_RECORDS = 6200
NUM_HONEST = 5
TTL_S = 600.0
VALUE = encode_value(bytes(180))
NO_LIMIT = replace(CONFIG, max_requests_per_s_of_peer=1e6)
MACHINES = ("11.101.1.2", "11.102.1.2")


class Invited:
    """The members of a run by invitation; nobody else has a lease."""

    def __init__(self, members: set[PeerId]) -> None:
        self._members = members

    def known(self) -> Collection[str]:
        return self._members

    async def look_up(self, peer_ids: Set[PeerId]) -> bool:
        return False

    async def introduce(self, holder: PeerId) -> bool:
        return False

    def takes(self, record: Record) -> bool:
        return record.owner in self._members


def identities(first: int, num: int) -> list[Identity]:
    return [Identity.from_seed(number.to_bytes(32, "little")) for number in range(first, first + num)]


def distance_of(identity: Identity) -> int:
    """From the key."""
    return distance(node_id(identity.peer_id), key_id(KEY))


async def measure(num_nodes: int, *, is_open: bool) -> None:
    async with AsyncExitStack() as stack:
        swarm = Swarm(stack)
        honest = [await swarm.add(host=f"11.{number}.1.2") for number in range(1, NUM_HONEST + 1)]
        ids = {swarm.endpoint_of(node).peer_id for node in honest}
        for node in honest:
            node.met["run"] = lambda: ids
            if not is_open:
                node.members["run"] = Invited(ids)
        for number, host in enumerate(MACHINES, 1):
            near = sorted(identities(number * 100_000, 4000), key=distance_of)
            records = [
                Record(key=KEY, subkey=one.peer_id, value=VALUE, sequence=1, issued_at=WALL_NOW, ttl_s=TTL_S).signed_by(
                    one
                )
                for one in identities(10_000_000 + number * 100_000, NUM_RECORDS)
            ]
            for identity in near[:num_nodes]:
                node = await swarm.add(host=host, identity=identity, config=NO_LIMIT)
                swarm.show(node, records)
        for node in honest:
            await node.store(KEY, "here", TTL_S, subkey=swarm.endpoint_of(node).peer_id)
        await report(swarm, ids)


async def report(swarm: Swarm, ids: set[PeerId]) -> None:
    reader, endpoint = swarm.nodes[0], swarm.endpoints[0]
    num_bytes = num_checks = 0
    call, verify = endpoint.call, identity_module.verify

    async def counted_call(peer_id: PeerId, method: Any, *rest: Any) -> Any:
        nonlocal num_bytes
        answer = await call(peer_id, method, *rest)
        if method is FIND:
            num_bytes += sum(aged.record.num_bytes for aged in answer.records)
        return answer

    def counted_verify(*arguments: Any) -> None:
        nonlocal num_checks
        num_checks += 1
        verify(*arguments)

    endpoint.call = counted_call  # type: ignore[assignment,method-assign]
    records_module.verify = counted_verify  # type: ignore[assignment,attr-defined]
    for number in range(8):
        num_bytes = num_checks = 0
        began, busy = time.perf_counter(), time.process_time()
        found = await reader.get(KEY, quickly=number % 2 > 0)
        print(
            f"{time.perf_counter() - began:5.2f} s ({time.process_time() - busy:.2f} s busy), "
            f"{num_bytes / 1e6:5.1f} MB, {num_checks:4d} signatures, {len(ids & found.keys())} of {NUM_HONEST} honest"
        )
        await asyncio.sleep(0.3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=1, help="of each of the two machines")
    parser.add_argument("--open", action="store_true", help="a run that is open to all")
    options = parser.parse_args()
    asyncio.run(measure(options.nodes, is_open=options.open))
