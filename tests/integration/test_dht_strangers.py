"""Whom a peer has reached, and by whom it was."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from manyhands.base.errors import Unavailable
from tests.integration.dht_swarm import Swarm
from tests.network import endpoints, until


@pytest.mark.parametrize("kind", ["memory", "tls"])
async def test_a_connection_that_the_other_end_dialled_does_not_show_that_it_can_be_dialled(kind: str) -> None:
    async with endpoints(2, kind=kind) as (here, there):
        await there.connect(here.addresses[0])
        assert there.has_reached(here.peer_id)
        assert here.was_reached
        assert not here.has_reached(there.peer_id)
        assert not there.was_reached
        await here.reach(there.peer_id, 3.0)
        assert here.has_reached(there.peer_id)
        await until(lambda: there.was_reached, "the other end has seen it")
        await there.close()
        with pytest.raises(Unavailable):
            await here.reach(there.peer_id, 3.0)
        assert not here.has_reached(there.peer_id)


async def test_a_node_that_was_reached_by_nobody_is_a_holder_as_long_as_it_is_alone() -> None:
    async with AsyncExitStack() as stack:
        swarm = Swarm(stack)
        node = await swarm.add()
        assert not swarm.endpoint_of(node).was_reached
        assert await node.store("key", 1, 60.0) == 1


@pytest.mark.parametrize("kind", ["memory", "tls"])
async def test_a_newcomer_is_dialled_by_those_it_asks(kind: str) -> None:
    async with AsyncExitStack() as stack:
        swarm = Swarm(stack)
        first, second = [await swarm.add(kind=kind) for _ in range(2)]
        here, there = swarm.endpoint_of(first), swarm.endpoint_of(second)
        await until(lambda: here.has_reached(there.peer_id), "the first one has dialled the second")
        await until(lambda: there.was_reached, "the second has seen it")
        assert [contact.peer_id for contact in first.contacts()] == [there.peer_id]
