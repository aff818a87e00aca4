"""Who has many identities in one network fills no key."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from manyhands.base.identity import Identity
from manyhands.dht.ids import distance, key_id, node_id
from manyhands.dht.messages import STORE, StoreOutcome, StoreResponse
from manyhands.dht.records import Reason
from tests.integration.dht_swarm import TTL_S, Swarm, values
from tests.intercepted import InterceptedEndpoint

NUM_HONEST = 6
NUM_FAKES = 7


def swallow(endpoint: InterceptedEndpoint) -> None:
    """Have a node say that it keeps what it is given, and keep nothing."""
    taken = StoreOutcome(is_stored=True, code=Reason.ACCEPTED.value)
    endpoint.answer_with(STORE, lambda remote, request: StoreResponse([taken] * len(request.records)))


def identities_near(key: str, num: int) -> list[Identity]:
    """Those of 500 that are nearest to a key: less than a second of work."""
    made = [Identity.from_seed(number.to_bytes(32, "little")) for number in range(1, 501)]
    return sorted(made, key=lambda one: distance(node_id(one.peer_id), key_id(key)))[:num]


@pytest.mark.parametrize("kind", ["memory", pytest.param("tls", marks=pytest.mark.long)])
async def test_seven_identities_near_a_key_do_not_hide_its_records(kind: str) -> None:
    """They were the five nearest to the key of a run: after half a minute its three trainers were alone, each for
    itself.
    """
    async with AsyncExitStack() as stack:
        swarm = Swarm(stack)
        honest = [await swarm.add(kind=kind, host=f"127.0.{number}.1") for number in range(1, NUM_HONEST + 1)]
        for number, identity in enumerate(identities_near("run.progress", NUM_FAKES), start=1):
            swallow(swarm.endpoint_of(await swarm.add(kind=kind, host=f"127.0.100.{number}", identity=identity)))
        assert set(swarm.nearest("run.progress")[:5]).isdisjoint(honest)
        for node in honest:
            await node.refresh()
        for number, node in enumerate(honest):
            num_holders = await node.store("run.progress", number, TTL_S, f"open-{number}")
            assert num_holders >= 5, "the fakes say so as well; for a slow holder, the next nearest is asked too"
        for _ in range(3):
            for node in honest:
                assert await values(node, "run.progress") == {f"open-{number}": number for number in range(NUM_HONEST)}
