"""Swarms that are too large for one group: averaging in virtual time without a DHT, and how far apart the peers get.

Each peer has a vector of its own. Before each step all values drift apart: to each is added a number drawn from
N(0, 1), as if each peer had trained alone for a while. Then all step, at about the same time. A peer may fail: it sits
the step out, or its process is killed in its midst and started again; then it takes the values of another one.
"""

from __future__ import annotations

import asyncio
import enum
import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from manyhands.averaging.averager_loop import AveragerLoop
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.tensor_list import TensorList
from manyhands.base.address import Address
from manyhands.dht import StoredValue
from manyhands.dht.records import encode_value
from manyhands.rpc import Endpoint
from manyhands.testing import Host, World

NUMEL = 64
"""So many that each step moves the values of each peer by 1, give or take a tenth (root mean square)."""
PERIOD_S = 20.0
"""From the begin of one step to that of the next."""
JITTER_S = 0.5
TIMEOUT_S = 15.0
MIN_TRIP_S = 0.02
FIRST_STEPS = 1
"""Until all peers have read of each other's places."""
ROUNDING = 1e-5


class SharedRecords:
    """Stands where the DHT of each peer stands: what one stores, all read 20 ms later."""

    def __init__(self) -> None:
        self._values: dict[str, StoredValue] = {}
        self._stored_at: dict[str, float] = {}
        self._num_stored = 0

    def view(self, owner: str) -> Any:
        async def store(key: str, value: Any, ttl_s: float, subkey: str = "") -> int:
            await asyncio.sleep(MIN_TRIP_S)
            self._num_stored += 1
            self._values[subkey] = StoredValue(encode_value(value), self._num_stored, ttl_s, owner)
            self._stored_at[subkey] = asyncio.get_running_loop().time()
            return 1

        async def get(key: str, *, quickly: bool = False) -> dict[str, StoredValue]:
            await asyncio.sleep(MIN_TRIP_S)
            now = asyncio.get_running_loop().time()
            for subkey in [
                subkey for subkey, at in self._stored_at.items() if at + self._values[subkey].remaining_s < now
            ]:
                del self._values[subkey], self._stored_at[subkey]
            return self._values

        async def topics(kind: str) -> set[str]:
            return set()

        return SimpleNamespace(store=store, get=get, topics=topics, declare=lambda key, schema: None)


@dataclass
class Swarm:
    """What is seen of a swarm.

    Attributes:
        values: of each peer that runs.
        spreads: after each step, the root mean square distance of the values of all peers from their mean, which was
            about 1 more before the step.
        means: the mean of all values after each step; before_means, before it.
        reported: the disagreement that the peers were told, relative to the mean; the median of each step.
        failures: peers that sat out or were killed, by step.
        partial: how many peers had fewer rounds than the step has, by step.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    spreads: list[float] = field(default_factory=list)
    before_means: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    reported: list[float | None] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    partial: list[int] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    group_sizes: list[int] = field(default_factory=list)

    def bounds(self, num_peers: int) -> list[float]:
        """The bound of docs/explanation/averaging.md on the spread after each step: √(2 x the share that failed).

        Of those who failed in the step or in the one before. Who sits out stays about 1 from the others; who is killed
        leaves the mates of its groups with means of less.
        """
        before = [0, *self.failures]
        return [
            math.sqrt(2 * (failed + earlier) / num_peers) + ROUNDING
            for failed, earlier in zip(self.failures, before, strict=False)
        ]


class Failure(enum.Enum):
    """What keeps a peer from a step."""

    SITS_OUT = "it lives, but does not begin the step"
    DIES = "it is killed in the midst of the step, and started again 3 s later"


def grid_world(
    seed: int,
    num_peers: int,
    max_group_size: int,
    num_steps: int,
    p_fail: float,
    weights: tuple[float, ...] = (1.0,),
    planned: Mapping[int, tuple[str, Failure]] = {},
) -> tuple[World, Swarm, float]:
    """A swarm that takes so many steps; returns also how many virtual seconds that takes.

    Args:
        p_fail: each peer fails with this probability in each step.
        planned: who fails besides, and how, by step; the first one is step 1.
    """
    world = World(seed)
    world.network.default_link.latency_s = MIN_TRIP_S
    world.network.default_link.jitter_s = 0.005
    swarm, records, rng = Swarm(), SharedRecords(), world.rng("swarm")
    names = [f"p{number}" for number in range(num_peers)]
    weight_of = {name: weights[number % len(weights)] for number, name in enumerate(names)}
    config = AveragingConfig(
        matchmaking_time_s=3.0,
        averaging_timeout_s=10.0,
        codec="none",
        max_group_size=max_group_size,
    )
    disagreements: list[float] = []
    sits_out: set[str] = set()

    async def has_no_charter(run_id: str) -> None: ...

    async def peer(host: Host) -> None:
        own_rng = world.rng(f"{host.name} from {world.loop.time()}")
        endpoint = Endpoint(world.transport(host), rng=world.rng(f"endpoint of {host.name}"))
        presence: Any = SimpleNamespace(
            endpoint=endpoint, dht=records.view(endpoint.peer_id), rng=own_rng, on_close=[], peer_id=endpoint.peer_id,
            check_run=has_no_charter, check_own=lambda run_id: None, leaving=asyncio.Lock(),
        )  # fmt: skip
        await endpoint.listen([Address.of(host.ip, 0)])
        values = swarm.values[host.name] = first_values(host.name, own_rng)
        averager_loop = AveragerLoop(presence, "grid", TensorList([values]), config)
        await averager_loop.start()
        number = int(world.loop.time() // PERIOD_S) + 1
        while True:
            await asyncio.sleep(number * PERIOD_S + own_rng.uniform(0.0, JITTER_S) - world.loop.time())
            number += 1
            if host.name not in sits_out:
                await take_step(host, averager_loop, values)

    def first_values(name: str, own_rng: random.Random) -> torch.Tensor:
        others = [values for other, values in swarm.values.items() if other != name]
        return own_rng.choice(others).clone() if others else torch.ones(NUMEL)

    async def take_step(host: Host, averager_loop: AveragerLoop, values: torch.Tensor) -> None:
        began = world.loop.time()
        attempts = await averager_loop.step(values.clone(), weight_of[host.name], TIMEOUT_S)
        swarm.step_s.append(world.loop.time() - began)
        if attempts.committed is not None:
            assert attempts.committed.averaged_N is not None
            values.copy_(attempts.committed.averaged_N)
            swarm.group_sizes.append(len(attempts.committed.manifest.members))
        if attempts.disagreement is not None:
            disagreements.append(attempts.disagreement)
        if attempts.num_rounds_committed < attempts.num_rounds:
            swarm.partial[-1] += 1
            swarm.reasons[attempts.reason] = swarm.reasons.get(attempts.reason, 0) + 1

    def before_step() -> None:
        for values in swarm.values.values():
            values += torch.tensor([rng.gauss(0.0, 1.0) for _ in range(NUMEL)])
        swarm.before_means.append(mean_over(swarm.values, weight_of))
        swarm.partial.append(0)
        swarm.failures.append(0)
        sits_out.clear()
        for name in names:
            if rng.random() < p_fail:
                fail(name, Failure.SITS_OUT if rng.random() < 0.5 else Failure.DIES)
        if len(swarm.failures) in planned:
            fail(*planned[len(swarm.failures)])

    def fail(name: str, how: Failure) -> None:
        swarm.failures[-1] += 1
        if how is Failure.SITS_OUT:
            sits_out.add(name)
        else:
            world.loop.call_later(0.25 + rng.uniform(0.0, 2.0), kill, name)

    def kill(name: str) -> None:
        world.kill(name)
        del swarm.values[name]
        world.loop.call_later(3.0, world.restart, name)

    def after_step() -> None:
        swarm.spreads.append(spread_of(swarm.values))
        swarm.means.append(mean_over(swarm.values, weight_of))
        swarm.reported.append(statistics.median(disagreements) if disagreements else None)
        disagreements.clear()

    for name in names:
        world.start(name, peer)
    for number in range(1, num_steps + 1):
        world.loop.call_at(number * PERIOD_S - 0.1, before_step)
        world.loop.call_at((number + 1) * PERIOD_S - 0.2, after_step)
    return world, swarm, (num_steps + 1) * PERIOD_S


def spread_of(values: dict[str, torch.Tensor]) -> float:
    stacked = torch.stack(list(values.values())).double()
    return math.sqrt(float(((stacked - stacked.mean(dim=0)) ** 2).mean()))


def mean_over(values: dict[str, torch.Tensor], weight_of: dict[str, float]) -> float:
    """The weighted mean of the first value."""
    total = sum(weight_of[name] for name in values)
    return sum(weight_of[name] * float(vector[0]) for name, vector in values.items()) / total
