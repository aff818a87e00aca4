"""Public averagers in one process, on the loop of the test: whole peers with a DHT, over memory or real TLS."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch

import manyhands
from manyhands.averaging import AveragingConfig
from manyhands.peer import Presence
from manyhands.testing.blocking import SimPeer, run_blocking
from tests.memory_transport import MemoryNetwork
from tests.network import LOOPBACK, transport_of
from tests.smaller import smaller

CONFIG = AveragingConfig(matchmaking_time_s=3.0, averaging_timeout_s=15.0)
RUN = "averages"


@asynccontextmanager
async def sim_peers(
    num_peers: int,
    *,
    kind: str = "memory",
    clients: Sequence[int] = (),
    first: int = 0,
    network: MemoryNetwork | None = None,
    **sizes: float,
) -> AsyncIterator[list[SimPeer]]:
    """Peers of one DHT; those numbered in ``clients`` do not listen. The first one must.

    Args:
        first: number of the identity of the first one.
        network: in which others are, who know none of them.
        sizes: as for :func:`tests.smaller.smaller`; by default all reduce, in small chunks.
    """
    network = network or MemoryNetwork()
    peers: list[SimPeer] = []
    try:
        for number in range(num_peers):
            is_client = number in clients
            transport = transport_of(first + number, kind, network)
            presence = Presence(transport, client_mode=is_client, rng=random.Random(number))
            initial = peers[0].endpoint.addresses if peers else []
            await presence.start(initial, [] if is_client else [LOOPBACK])
            peers.append(SimPeer(presence))
        with smaller(**{"span_numel": 1, "chunk_numel": 1024} | sizes):
            yield peers
    finally:
        for peer in peers:
            await peer.presence.stop()


async def join(peer: SimPeer, tensors: Any, *, run_id: str = RUN, **options: Any) -> manyhands.Averager:
    """As ``manyhands.Averager(...)``, with a configuration for tests."""
    options = {"averaging": CONFIG} | options
    return await run_blocking(lambda: manyhands.Averager(tensors, peer=peer, run_id=run_id, **options))


async def step(averager: manyhands.Averager, weight: float = 1.0, timeout_s: float = 10.0) -> manyhands.RoundResult:
    """As ``averager.step(...)``."""
    return await run_blocking(lambda: averager.step(weight, timeout_s))


async def step_all(
    averagers: Sequence[manyhands.Averager], weights: Sequence[float] | None = None, timeout_s: float = 10.0
) -> list[manyhands.RoundResult]:
    """All of them at once."""
    weights = weights or [1.0] * len(averagers)
    return await asyncio.gather(
        *(step(averager, weight, timeout_s) for averager, weight in zip(averagers, weights, strict=True))
    )


async def close_all(averagers: Sequence[manyhands.Averager]) -> None:
    """Have them leave."""
    for averager in averagers:
        await run_blocking(averager.close)


def weighted_mean(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """In float64."""
    total = sum((value.double() * weight for value, weight in zip(values, weights, strict=True)), torch.tensor(0.0))
    return total / sum(weights)
