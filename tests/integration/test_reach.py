"""Peers that dial back to others when asked: what they find, and what they refuse."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from manyhands.base.address import Address
from manyhands.base.errors import Refused
from manyhands.peer import Presence
from manyhands.reach import DIAL_BACK, EXAMINE, REACHED
from manyhands.reach.messages import DialBackRequest, DialOutcome, ExamineRequest, ReachedRequest
from manyhands.reach.service import BURST_OF_SOURCE, MAX_UNDER_WAY
from manyhands.rpc import Endpoint
from manyhands.transport import TlsTransport
from tests.integration.test_transport import silent_port
from tests.network import LOOPBACK, PATIENCE_S, identity_of

ASKED, CALLER = identity_of(1), identity_of(2)


@asynccontextmanager
async def two_peers() -> AsyncIterator[tuple[Presence, Endpoint]]:
    """A peer to ask, and one that is connected to it."""
    asked = Presence(TlsTransport(ASKED))
    caller = Endpoint(TlsTransport(CALLER))
    try:
        await asked.start([], [LOOPBACK])
        await caller.listen([LOOPBACK])
        await caller.connect(asked.endpoint.addresses[0])
        yield asked, caller
    finally:
        await caller.close()
        await asked.stop()


async def dialled(caller: Endpoint, *addresses: Address | str) -> list[DialOutcome]:
    request = DialBackRequest([str(address) for address in addresses])
    return (await caller.call(ASKED.peer_id, DIAL_BACK, request, 5.0)).outcomes


async def test_an_examined_peer_tells_the_host_that_it_sees_its_table_its_version_and_its_clock() -> None:
    async with two_peers() as (asked, caller):
        seen = await caller.call(ASKED.peer_id, EXAMINE, ExamineRequest())
        assert seen.host == "127.0.0.1"
        assert seen.num_known_peers == asked.dht.num_known_peers
        assert seen.agent.startswith("manyhands/")
        assert seen.wall_time_s > 1.7e9


async def test_a_peer_tells_where_it_has_dialled_others_and_not_from_where_they_called() -> None:
    async with two_peers() as (asked, caller):
        client = Endpoint(TlsTransport(identity_of(3)), client_mode=True)
        await client.connect(asked.endpoint.addresses[0])
        await asked.endpoint.reach(CALLER.peer_id, 5.0)
        request = ReachedRequest([CALLER.peer_id, client.peer_id, identity_of(4).peer_id])
        assert (await caller.call(ASKED.peer_id, REACHED, request)).hosts == ["127.0.0.1", "", ""]
        await client.close()


async def test_each_address_has_an_outcome_of_its_own() -> None:
    async with two_peers() as (asked, caller):
        with silent_port(listens=False) as closed:
            own, other = caller.addresses[0], asked.endpoint.addresses[0]
            outcomes = await dialled(caller, own, closed, "nonsense", other)
        assert [outcome.code for outcome in outcomes] == ["", "refused", "bad_address", "itself"]
        assert [outcome.address for outcome in outcomes] == [str(own), str(closed), "nonsense", str(other)]


async def test_the_connection_is_a_fresh_one_and_carries_a_handshake_only() -> None:
    async with two_peers() as (_, caller):
        streams: list[Any] = []

        async def accepted(stream: Any) -> None:
            streams.append(stream)
            await stream.wait_closed()

        transport = TlsTransport(CALLER)
        listener = await transport.listen(LOOPBACK, accepted)
        outcomes = await dialled(caller, listener.addresses[0])
        await listener.close()
        transport.close()
        assert [outcome.code for outcome in outcomes] == [""]
        assert [stream.bytes_received for stream in streams] == [0]
        assert caller.is_connected(ASKED.peer_id)


async def test_another_peer_at_the_address_does_not_count() -> None:
    async with two_peers() as (_, caller):
        other = Endpoint(TlsTransport(identity_of(3)))
        await other.listen([LOOPBACK])
        outcomes = await dialled(caller, other.addresses[0])
        await other.close()
        assert [outcome.code for outcome in outcomes] == ["wrong_identity"]


async def test_a_caller_from_the_internet_cannot_have_the_local_network_scanned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {"inside.example": "192.168.1.1", "metadata.example": "169.254.169.254"}
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: real(names.get(host, host), *a, **k))
    async with two_peers() as (asked, caller):
        monkeypatch.setattr(asked.endpoint, "host_of", lambda peer_id: "8.8.8.8")
        inside = ["192.168.1.1:22", "/dns4/inside.example/tcp/80", "/dns/metadata.example/tcp/80"]
        outcomes = await dialled(caller, caller.addresses[0], *inside)
        assert {outcome.code for outcome in outcomes} == {"not_allowed"}


async def test_a_peer_that_asks_too_often_to_be_dialled_back_is_refused() -> None:
    async with two_peers() as (asked, caller):
        for _ in range(BURST_OF_SOURCE):
            await dialled(caller, caller.addresses[0])
        with pytest.raises(Refused, match="too many requests to dial back; ask again in some seconds") as refused:
            await dialled(caller, caller.addresses[0])
        assert refused.value.code == "busy"
        assert asked.endpoint.counters["refused_dial_backs"] == 1
        assert asked.endpoint.counters["dial_backs"] == BURST_OF_SOURCE


async def test_names_are_looked_up_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []
    real = socket.getaddrinfo

    def look_up(host: str, *args: Any, **kwargs: Any) -> Any:
        if host.endswith(".example"):
            looked_up.append(host)
        return real("127.0.0.1" if host.endswith(".example") else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    async with two_peers() as (_, caller):
        port = caller.addresses[0].port
        names = [f"/dns4/name{number}.example/tcp/{port}" for number in range(8)]
        outcomes = [*await dialled(caller, *names[:4]), *await dialled(caller, *names[4:])]
        assert [outcome.code for outcome in outcomes] == [""] * BURST_OF_SOURCE + ["not_allowed"] * 4
        assert len(looked_up) == BURST_OF_SOURCE


async def test_dial_back_requests_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_peers() as (asked, caller):
        go_on, begun = asyncio.Event(), asyncio.Semaphore(0)

        async def slow(address: Address, timeout_s: float, sayer: str) -> None:
            begun.release()
            await go_on.wait()

        monkeypatch.setattr(asked.endpoint, "probe", slow)
        asking = [asyncio.ensure_future(dialled(caller, caller.addresses[0])) for _ in range(MAX_UNDER_WAY)]
        for _ in range(MAX_UNDER_WAY):
            await asyncio.wait_for(begun.acquire(), PATIENCE_S)
        with pytest.raises(Refused, match="ask again in a few seconds"):
            await dialled(caller, caller.addresses[0])
        go_on.set()
        assert len(await asyncio.gather(*asking)) == MAX_UNDER_WAY
