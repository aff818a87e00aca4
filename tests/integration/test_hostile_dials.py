"""What strangers make a peer dial has bounds, whatever addresses they name."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from manyhands.base.address import Address
from manyhands.base.errors import DialFailed, DialReason, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint
from manyhands.rpc.announce import ANNOUNCE, Announcement
from manyhands.transport import tcp
from tests.memory_transport import MemoryNetwork, MemoryStream, MemoryTransport
from tests.network import ECHO, Text, endpoints, identity_of, serve_echo
from tests.wire import WatchedEndpoint

ON_THE_INTERNET = Address.parse("/ip4/8.8.4.4/tcp/31337")


class CountingTransport(MemoryTransport):
    """Counts the dials by host."""

    def __init__(self, number: int, network: MemoryNetwork) -> None:
        super().__init__(identity_of(number), network)
        self.dials: Counter[str] = Counter()

    async def dial(self, address: Address, timeout_s: float) -> MemoryStream:
        self.dials[address.host] += 1
        return await super().dial(address, timeout_s)


@asynccontextmanager
async def dialler(
    listen: Address, network: MemoryNetwork | None = None
) -> AsyncIterator[tuple[WatchedEndpoint, Counter[str]]]:
    transport = CountingTransport(0, network or MemoryNetwork())
    endpoint = WatchedEndpoint(transport)
    await endpoint.listen([listen])
    try:
        yield endpoint, transport.dials
    finally:
        await endpoint.close()


async def fails_at(endpoint: Endpoint, peer_id: PeerId, *places: str) -> Unavailable:
    endpoint.learn(peer_id, [Address.parse(place) for place in places])
    with pytest.raises(Unavailable) as caught:
        await endpoint.call(peer_id, ECHO, Text("hi"))
    return caught.value


@pytest.mark.parametrize(
    "place", ["10.0.0.7:31337", "169.254.169.254:31337", "127.0.0.1:22", "127.0.0.1:31337", "8.8.4.4:22", "[::1]:22"]
)
async def test_a_peer_on_the_internet_dials_nothing_local_because_a_record_names_it(place: str) -> None:
    async with dialler(ON_THE_INTERNET) as (endpoint, dials):
        failure = await fails_at(endpoint, identity_of(1).peer_id, place)
        assert isinstance(failure, DialFailed)
        assert failure.reason is DialReason.HELD_BACK
        assert not dials


async def test_a_name_is_held_to_the_addresses_that_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def metadata(address: Address, timeout_s: float) -> tcp.Places:
        kind = socket.AF_INET, socket.SOCK_STREAM, 6, ""
        return [(*kind, ("169.254.169.254", address.port)), (*kind, ("10.0.0.7", address.port))]

    monkeypatch.setattr(tcp, "look_up", metadata)
    async with dialler(ON_THE_INTERNET) as (endpoint, dials):
        failure = await fails_at(endpoint, identity_of(1).peer_id, "/dns4/metadata.example/tcp/31337")
        assert isinstance(failure, DialFailed)
        assert failure.reason is DialReason.HELD_BACK
        assert not dials


@pytest.mark.long
async def test_a_hundred_records_cause_few_dials_to_a_third_party() -> None:
    async with dialler(ON_THE_INTERNET) as (endpoint, dials):
        for turn in range(10):
            places = [f"1.1.1.1:{2000 + 10 * turn + port}" for port in range(8)]
            peers = [identity_of(100 + number).peer_id for number in range(100)]
            await asyncio.gather(*(fails_at(endpoint, peer_id, *places) for peer_id in peers))
        assert dials["1.1.1.1"] <= 80


async def test_peers_of_one_local_network_or_one_machine_find_each_other() -> None:
    async with dialler(Address.parse("/ip4/192.168.7.2/tcp/31337")) as (endpoint, dials):
        await fails_at(endpoint, identity_of(1).peer_id, "192.168.7.3:31337", "10.0.0.7:31337", "127.0.0.1:31337")
        assert dials == {"192.168.7.3": 1}
    async with endpoints(150, kind="memory") as swarm:  # all on 127.0.0.1, with more peers than a budget has dials
        serve_echo(swarm[0])
        for other in swarm[1:]:
            serve_echo(other)
            await swarm[0].call(other.peer_id, ECHO, Text("hi"))


async def test_a_peer_may_name_its_own_local_address_from_there() -> None:
    """A monitor that listens on the internet, and on a second interface."""
    async with dialler(ON_THE_INTERNET) as (endpoint, dials):
        peer_id, place = identity_of(1).peer_id, Address.parse("/ip4/10.0.0.7/tcp/31337")
        endpoint.host_of = lambda peer_id: "10.0.0.7"  # type: ignore[method-assign]
        endpoint.handlers[ANNOUNCE.name](peer_id, Announcement([str(place)]))
        with pytest.raises(Unavailable):
            await endpoint.call(peer_id, ECHO, Text("hi"))
        assert dials == {"10.0.0.7": 1}


async def test_dials_that_succeed_do_not_use_up_the_dials_of_their_host() -> None:
    network = MemoryNetwork()
    async with dialler(ON_THE_INTERNET, network) as (endpoint, dials):
        for number in range(100):
            other = Endpoint(MemoryTransport(identity_of(100 + number), network))
            await other.listen([Address.of("1.1.1.1", 2000 + number)])
            serve_echo(other)
            endpoint.learn(other.peer_id, other.addresses)
            await endpoint.call(other.peer_id, ECHO, Text("hi"))
            await other.close()
        assert dials["1.1.1.1"] == 100
