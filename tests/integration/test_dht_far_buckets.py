"""Nodes know somebody in every part of the swarm, not only near themselves."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from manyhands.dht import DhtConfig
from manyhands.dht.ids import distance, key_id, node_id
from tests.integration.dht_swarm import Swarm

CONFIG = DhtConfig(k=4, replicas=2, refresh_period_s=1000.0)
NUM_NODES = 48


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    async with AsyncExitStack() as stack:
        swarm = Swarm(stack)
        for _ in range(NUM_NODES):
            await swarm.add(config=CONFIG)
        yield swarm


async def test_a_node_that_has_joined_knows_a_node_at_each_distance_and_stores_at_the_nearest(swarm: Swarm) -> None:
    points = {node: node_id(swarm.endpoint_of(node).peer_id) for node in swarm.nodes}
    for number, node in enumerate(swarm.nodes):
        there = {distance(points[node], points[other]).bit_length() for other in swarm.nodes[:number]}
        known = {distance(points[node], node_id(contact.peer_id)).bit_length() for contact in node.contacts()}
        assert there <= known, f"node {number} knows nobody at distances {there - known}"
    rng = random.Random(1)
    for number in range(20):
        key = f"key {number}"
        writer = rng.choice(swarm.nodes)
        assert await writer.store(key, number, 60.0) == CONFIG.replicas
        holders = {node for node in swarm.nodes if await swarm.held_by(node, key)}
        wanted = sorted(swarm.nodes, key=lambda node: distance(points[node], key_id(key)))[: CONFIG.replicas]
        assert holders == set(wanted), key
