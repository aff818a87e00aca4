"""How long connections are kept that are used now and then, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from manyhands.base.address import Address
from manyhands.rpc import Endpoint, RpcConfig
from manyhands.testing import Host, World
from tests.network import ECHO, Text, serve_echo


def dials(pause_s: float, num_calls: int = 12) -> tuple[int, float]:
    """How many connections so many calls take with pauses between them, and how long the last one is kept."""
    world = World(1)
    addresses: list[Address] = []
    kept_s = 0.0
    num_before = 0

    async def there(host: Host) -> None:
        endpoint = Endpoint(world.transport(host), rng=world.rng(f"endpoint of {host.name}"))
        serve_echo(endpoint)
        await endpoint.listen([Address.of(host.ip, 0)])
        addresses.extend(endpoint.addresses)
        await asyncio.sleep(0.5)
        await endpoint.probe(addresses[1], 1.0)  # the other one knows then that it can be reached
        await asyncio.Event().wait()

    def num_opened() -> int:
        return sum(line.endswith("opened") for line in world.trace.lines)

    async def here(host: Host) -> None:
        nonlocal kept_s, num_before
        endpoint = Endpoint(world.transport(host), rng=world.rng(f"endpoint of {host.name}"))
        await endpoint.listen([Address.of(host.ip, 0)])
        addresses.extend(endpoint.addresses)
        await asyncio.sleep(1)
        assert endpoint.was_reached
        num_before = num_opened()
        peer_id = await endpoint.connect(addresses[0])
        for number in range(num_calls):
            await asyncio.sleep(pause_s if number else 0.0)
            await endpoint.call(peer_id, ECHO, Text("hi"))
        called_at = world.loop.now
        while endpoint.is_connected(peer_id):
            await asyncio.sleep(0.5)
        kept_s = world.loop.now - called_at
        await endpoint.close()

    world.start("there", there)
    world.start("here", here)
    world.run(2000)
    return num_opened() - num_before, kept_s


@pytest.mark.parametrize(("pause_s", "num_dials"), [(2.0, 1), (35.0, 1), (90.0, 12)])
def test_a_connection_that_is_used_each_half_minute_is_dialled_once(pause_s: float, num_dials: int) -> None:
    num, kept_s = dials(pause_s)
    assert num == num_dials
    assert abs(kept_s - RpcConfig.idle_timeout_s - 1) <= 1.5
