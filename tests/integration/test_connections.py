"""Control connections over their life: settled, reused, retired when idle, bounded in number."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import time
from dataclasses import replace

import msgspec
import pytest

from manyhands.base.address import Address
from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerError, Refused, Timeout, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc import AddressSource, Endpoint, RpcConfig
from manyhands.rpc.dialling import in_turns
from manyhands.rpc.frames import Cancel, Drain, Hello, Request, send_frame
from manyhands.transport import Stream
from tests.network import (
    ECHO,
    KINDS,
    LOOPBACK,
    PATIENCE_S,
    STUCK,
    StuckHandler,
    Text,
    endpoints,
    identity_of,
    next_frame,
    raw_control,
    serve_echo,
    transport_beside,
    transport_of,
    until,
)
from tests.sweeps import few_of

SHORT_IDLE = RpcConfig(heartbeat_period_s=0.05, heartbeat_timeout_s=5.0, idle_timeout_s=0.2)


async def connect_anew(here: Endpoint, there: Endpoint) -> None:
    """Dial another connection to a connected peer; one of them is retired."""
    await here.connect(Address.parse(there.addresses[0].host_port))


# settling


@pytest.mark.parametrize("kind", KINDS)
async def test_simultaneous_dials_settle_on_one_connection_and_lose_no_call(kind: str) -> None:
    """The connection that the lower id dialled is kept; calls that began on the other one are answered."""
    async with endpoints(2, kind=kind) as (here, there):
        lost: list[PeerId] = []
        for endpoint in (here, there):
            serve_echo(endpoint)
            endpoint.on_lost.append(lost.append)
        calls = [
            asyncio.ensure_future(caller.call(callee.peer_id, ECHO, Text(str(number))))
            for number in range(20)
            for caller, callee in ((here, there), (there, here))
        ]
        answers = await asyncio.gather(*calls)
        assert len(answers) == 40
        await until(lambda: here.num_streams == there.num_streams == 1, "one is left")
        lower, higher = sorted((here, there), key=lambda endpoint: endpoint.peer_id)
        assert await lower.wire.num_open(only_dialled=True) == 1
        assert await higher.wire.num_open(only_dialled=True) == 0
        assert lost == []
        assert (await here.call(there.peer_id, ECHO, Text("hi"))).text.startswith("hi")


@pytest.mark.parametrize("seed", few_of(range(10), 3))
async def test_calls_from_both_ends_all_the_while_connections_come_and_go(seed: int) -> None:
    rng = random.Random(seed)
    async with endpoints(2) as (here, there):
        for endpoint in (here, there):
            serve_echo(endpoint)

        async def call_often(caller: Endpoint, callee: Endpoint) -> None:
            for number in range(40):
                await caller.call(callee.peer_id, ECHO, Text(str(number)))
                for _ in range(rng.randrange(8)):
                    await asyncio.sleep(0)
                if rng.random() < 0.3:
                    await connect_anew(caller, callee)

        async with time_limit(PATIENCE_S, "for all calls"):
            await asyncio.gather(call_often(here, there), call_often(there, here), call_often(here, there))
        assert not here.counters
        assert not there.counters


# idle connections


async def test_an_idle_connection_is_closed_by_both_ends_and_is_no_loss() -> None:
    async with endpoints(2, kind="tls", config=SHORT_IDLE) as (here, there):
        lost: list[PeerId] = []
        for endpoint in (here, there):
            serve_echo(endpoint)
            endpoint.on_lost.append(lost.append)
        await there.reach(here.peer_id, PATIENCE_S)
        await here.call(there.peer_id, ECHO, Text("hi"))
        await until(lambda: here.num_streams == there.num_streams == 0, "both have closed it")
        assert lost == []
        assert (await there.call(here.peer_id, ECHO, Text("again"))).text.startswith("again")


async def test_a_held_connection_stays() -> None:
    async with endpoints(2, kind="tls", config=SHORT_IDLE) as (here, there):
        serve_echo(there)
        await there.reach(here.peer_id, PATIENCE_S)
        with here.held(there.peer_id), there.held(here.peer_id):
            await here.call(there.peer_id, ECHO, Text("hi"))
            before = list(here.wire.dialled)
            await asyncio.sleep(0.5)
            assert here.is_connected(there.peer_id)
            assert list(here.wire.dialled) == before, "and is not another one"
        await until(lambda: not here.is_connected(there.peer_id), "it is closed once nobody holds it")


async def test_a_connection_that_one_end_holds_is_replaced_when_the_other_end_retires_it() -> None:
    async with endpoints(2, kind="tls", config=SHORT_IDLE) as (here, there):
        serve_echo(there)
        await there.reach(here.peer_id, PATIENCE_S)
        await here.call(there.peer_id, ECHO, Text("hi"))
        lost: list[PeerId] = []
        there.on_lost.append(lost.append)
        with there.held(here.peer_id):
            await asyncio.sleep(0.6)
            assert there.is_connected(here.peer_id)
            assert lost == []


async def test_a_peer_that_nobody_ever_reached_keeps_its_connections() -> None:
    """It may sit behind a firewall without knowing; then this is the only way to it."""
    async with endpoints(2, kind="tls", config=SHORT_IDLE) as (here, there):
        serve_echo(there)
        connected: list[PeerId] = []
        there.on_connected.append(connected.append)
        await here.call(there.peer_id, ECHO, Text("hi"))
        await asyncio.sleep(0.5)
        assert there.is_connected(here.peer_id)
        assert connected == [here.peer_id]


async def test_a_connection_with_a_call_under_way_stays() -> None:
    async with endpoints(2, kind="tls", config=SHORT_IDLE) as (here, there):
        StuckHandler(there)
        with pytest.raises(Timeout):
            await here.call(there.peer_id, STUCK, Text("hi"), 0.6)


async def test_the_connection_of_a_client_stays() -> None:
    """Nobody could dial it when it is wanted."""
    async with endpoints(2, kind="tls", clients=[1], config=SHORT_IDLE) as (here, client):
        serve_echo(client)
        await client.connect(here.addresses[0])
        await asyncio.sleep(0.5)
        assert (await here.call(client.peer_id, ECHO, Text("hi"))).text.startswith("hi")


async def test_a_peer_that_never_agrees_to_drain_is_left_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.rpc.connection.DRAIN_TIMEOUT_S", 0.2)
    monkeypatch.setattr("manyhands.rpc.pool.SPARE_AFTER_S", 0.0)
    config = replace(SHORT_IDLE, max_connections=1, heartbeat_timeout_s=60.0)
    async with (
        endpoints(1, kind="tls", config=config) as (there,),
        raw_control(there) as stream,
        raw_control(there, number=98),  # which takes its place
        time_limit(PATIENCE_S, "to be left"),
    ):
        await next_frame(stream, Drain)
        await stream.wait_closed()


async def test_draining_waits_for_the_answers_of_both_ends() -> None:
    async with endpoints(1, kind="tls") as (there,), raw_control(there) as stream:
        stuck = StuckHandler(there)
        await send_frame(stream, Request(1, STUCK.name, 30.0, msgspec.Raw(msgspec.msgpack.encode(Text("hi")))))
        await stuck.called.wait()
        await send_frame(stream, Drain())
        await next_frame(stream, Drain)
        ended = asyncio.ensure_future(stream.wait_closed())
        await asyncio.sleep(0.1)
        assert not ended.done()
        await send_frame(stream, Cancel(1))
        async with time_limit(PATIENCE_S, "for the end"):
            await ended


# limits


async def test_above_the_limit_an_unused_connection_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.rpc.pool.SPARE_AFTER_S", 0.1)
    async with endpoints(4, kind="tls", config=RpcConfig(max_connections=2)) as (there, *others):
        serve_echo(there)
        for other in others[:2]:
            await other.call(there.peer_id, ECHO, Text("hi"))
        with pytest.raises(Refused, match="2 connections already"):
            await others[2].call(there.peer_id, ECHO, Text("hi"))
        assert there.counters["refused_full"] == 1
        await asyncio.sleep(0.15)
        await others[2].connect(there.addresses[0])  # a dial that failed is not repeated at once
        assert (await others[2].call(there.peer_id, ECHO, Text("hi"))).text.startswith("hi")
        await until(lambda: there.num_streams == 2, "the one that was unused for longest is gone")
        assert not there.is_connected(others[0].peer_id)


async def test_a_peer_that_does_not_answer_is_not_dialled_at_once_again() -> None:
    async with endpoints(2, kind="tls") as (here, there):
        serve_echo(there)
        address = there.addresses[0]
        gone = identity_of(7).peer_id
        here.learn(gone, [address])
        with pytest.raises(Unavailable, match="another identity answered"):
            await here.call(gone, ECHO, Text("hi"))
        with pytest.raises(Unavailable, match=r"last dial failed \(.*another identity answered.* due in 0\.\d s"):
            await here.call(gone, ECHO, Text("hi"))
        here.learn(gone, [Address.parse("/ip4/127.0.0.1/tcp/9")])  # a new address is tried at once
        with pytest.raises(Unavailable, match="no address answers"):
            await here.call(gone, ECHO, Text("hi"))


async def test_the_best_address_has_a_head_start() -> None:
    """Of two that work, only the one where the peer was reached before is dialled."""
    async with endpoints(2, kind="tls") as (here, there):
        at_other: list[Stream] = []

        async def take(remote: PeerId, header: bytes, stream: Stream) -> None:
            await stream.wait_closed()

        async def note(stream: Stream) -> None:
            at_other.append(stream)

        there.accept_bulk("taken", take)
        transport = transport_beside(there, there.identity)
        other = await transport.listen(LOOPBACK, note)
        try:
            here.learn(there.peer_id, there.addresses, AddressSource.WORKED)
            here.learn(there.peer_id, other.addresses, AddressSource.HEARSAY)
            for _ in range(5):
                here.release(await here.open_bulk(there.peer_id, "taken", b""))
            assert not at_other
        finally:
            await other.close()
            transport.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
async def test_of_a_peer_with_both_families_ipv6_is_dialled_first_and_ipv4_if_that_fails() -> None:
    async with endpoints(2, kind="tls", clients=[0]) as (here, there):
        with_ip4 = there.addresses
        await there.listen([Address.parse("/ip6/::1/tcp/0")])
        here.learn(there.peer_id, there.bound_addresses[1:])
        here.learn(there.peer_id, with_ip4)
        assert [address.protocol for address in here.addresses_of(there.peer_id)] == ["ip4", "ip6"]
        await here.call_on(there.peer_id, 5.0)
        assert here.reached_host(there.peer_id) == "::1"
    async with endpoints(2, kind="tls") as (here, there):
        here.learn(there.peer_id, [Address.parse("/ip6/2001:db8::7/tcp/9"), *there.addresses])
        began = asyncio.get_running_loop().time()
        await here.call_on(there.peer_id, 5.0)
        assert here.reached_host(there.peer_id) == "127.0.0.1"
        assert asyncio.get_running_loop().time() - began < 5.0, "it has not waited for the other one"


async def test_new_identities_do_not_have_a_peer_forget_where_it_has_reached_those_that_are_connected() -> None:
    config = RpcConfig(max_known_addresses=2)
    async with endpoints(5, kind="tls", config=config, are_acquainted=False) as (here, friend, *strangers):
        here.learn(friend.peer_id, friend.addresses)
        await here.call_on(friend.peer_id, 5.0)
        for stranger in strangers:
            here.learn(stranger.peer_id, stranger.addresses, AddressSource.WORKED)
            await here.reach(stranger.peer_id, 5.0)
        assert here.reached_host(friend.peer_id)
        assert [bool(here.reached_host(one.peer_id)) for one in strangers] == [False, False, True]


def test_families_take_turns_and_names_count_as_ipv4() -> None:
    texts = ["127.0.0.1:1", "127.0.0.1:2", "localhost:3", "[::1]:4", "[::1]:5"]
    in_order = in_turns([Address.parse(text) for text in texts])
    assert [address.port for address in in_order] == [4, 1, 5, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
async def test_cancelling_a_call_reaches_its_handler(kind: str) -> None:
    async with endpoints(2, kind=kind) as (here, there):
        stuck = StuckHandler(there)
        calling = asyncio.ensure_future(here.call(there.peer_id, STUCK, Text("hi"), 30.0))
        await stuck.called.wait()
        calling.cancel()
        await asyncio.wait_for(stuck.cancelled.wait(), PATIENCE_S)


# what a slow link and a retirement do to what is on its way


class Throttled:
    """Each socket sends slowly, as if its link did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._monkeypatch = monkeypatch

    def begin(self) -> None:
        send = socket.socket.send
        free_at: dict[socket.socket, float] = {}

        def send_slowly(sock: socket.socket, data: memoryview) -> int:
            now = time.monotonic()
            if now < free_at.get(sock, 0.0):
                raise BlockingIOError
            num_bytes = send(sock, data[:20_000])
            free_at[sock] = now + num_bytes / self.bytes_per_s
            return num_bytes

        self._monkeypatch.setattr(socket.socket, "send", send_slowly)


@pytest.mark.parametrize("retiring", few_of(["caller", "callee"], 1, pytest.mark.long))
async def test_large_calls_outlive_a_retirement(retiring: str) -> None:
    """The request is still being sent, or the answer is, when one end wants no more of the connection."""
    big = Text("x" * 900_000)
    num_under_way = 0
    async with endpoints(2, kind="tls") as (here, there):
        dialling, dialled = (here, there) if retiring == "caller" else (there, here)
        lost: list[PeerId] = []
        for endpoint in (here, there):
            serve_echo(endpoint)
            endpoint.on_lost.append(lost.append)
        await dialling.call_on(dialled.peer_id, PATIENCE_S)
        await until(lambda: dialled.is_connected(dialling.peer_id), "both know the connection")
        for _ in range(10):
            replacing = asyncio.ensure_future(connect_anew(dialling, dialled))
            calls = [asyncio.ensure_future(here.call(there.peer_id, ECHO, big, PATIENCE_S)) for _ in range(6)]
            await replacing  # and retire the connection with the calls
            num_under_way += sum(not call.done() for call in calls)
            answers = await asyncio.gather(*calls)
            assert all(len(answer.text) > 900_000 for answer in answers)
        assert lost == []
    assert num_under_way > 0


@pytest.mark.long
async def test_a_slow_uplink_is_not_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends a long message hears nothing meanwhile; its own ping waits behind it."""
    config = RpcConfig(heartbeat_period_s=0.4, heartbeat_timeout_s=0.85)
    async with endpoints(2, kind="tls", config=config) as (here, there):
        serve_echo(there)
        await here.call(there.peer_id, ECHO, Text("hi"))
        Throttled(monkeypatch, 400_000).begin()
        answer = await here.call(there.peer_id, ECHO, Text("x" * 600_000), 20.0)
        assert answer.text.startswith("x")


# what one peer can take


async def test_the_hello_of_a_connection_is_small() -> None:
    async with endpoints(1, kind="tls") as (there,):
        transport = transport_of(9, "tls", None)  # type: ignore[arg-type]
        stream = await transport.dial(there.addresses[0], 5.0)
        await send_frame(stream, Hello("control", "agent", ["/ip4/192.0.2.1/tcp/1"] * 10_000))
        async with time_limit(PATIENCE_S, "to be dropped"):
            await stream.wait_closed()
        assert there.counters["protocol_violations"] == 1
        transport.close()


async def test_large_requests_are_refused_when_too_many_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async with endpoints(2, kind="tls") as (here, there):
        stuck = StuckHandler(there)
        big = Text("x" * 1_000_000)
        calls = [asyncio.ensure_future(here.call(there.peer_id, STUCK, big, 5.0)) for _ in range(12)]
        await until(lambda: sum(call.done() for call in calls) == 4, "four are refused")
        assert stuck.num_calls == 8
        for call in calls:
            call.cancel()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(outcome, Refused) and outcome.code == "busy" for outcome in outcomes) == 4
        await until(lambda: not stuck.num_running, "the handlers have ended")
        calls = [asyncio.ensure_future(here.call(there.peer_id, STUCK, big, 5.0)) for _ in range(8)]
        await until(lambda: stuck.num_running == 8, "there is room for as many again")
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)


async def test_one_host_with_clients_cannot_keep_the_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.rpc.pool.SPARE_AFTER_S", 0.0)
    async with endpoints(6, kind="tls", clients=[1, 2, 3, 4], config=RpcConfig(max_connections=4)) as swarm:
        there, *clients, honest = swarm
        serve_echo(there)
        for client in clients:
            await client.connect(there.addresses[0])
        assert (await honest.call(there.peer_id, ECHO, Text("hi"))).text.startswith("hi")


# handlers


async def test_a_second_cancellation_does_not_interrupt_a_handlers_clean_up() -> None:
    called, tidied = asyncio.Event(), asyncio.Event()

    async def tidy(remote: PeerId, request: Text) -> Text:
        called.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)
            tidied.set()
        raise AssertionError("nobody sets that event")

    async with endpoints(1, kind="tls") as (there,), raw_control(there) as stream:
        there.handle(STUCK, tidy)
        await send_frame(stream, Request(1, STUCK.name, 30.0, msgspec.Raw(msgspec.msgpack.encode(Text("hi")))))
        await called.wait()
        await send_frame(stream, Cancel(1))
        await send_frame(stream, Cancel(1))
        await asyncio.sleep(0.02)
        stream.abort()
        await asyncio.wait_for(tidied.wait(), PATIENCE_S)


async def test_a_handler_that_cancels_itself_answers() -> None:
    async def give_up(remote: PeerId, request: Text) -> Text:
        raise asyncio.CancelledError

    async with endpoints(2, kind="tls") as (here, there):
        there.handle(ECHO, give_up)
        with pytest.raises(PeerError, match="its log says why"):
            await here.call(there.peer_id, ECHO, Text("hi"), 2.0)


async def test_a_callback_that_fails_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async with endpoints(2, kind="tls") as (here, there):
        serve_echo(there)
        told: list[PeerId] = []

        def fail(peer_id: PeerId) -> None:
            raise ValueError("broken")

        here.on_connected += [fail, told.append]
        here.on_lost += [fail, told.append]
        await here.call(there.peer_id, ECHO, Text("hi"))
        there.wire.abort_all()
        await until(lambda: told == [there.peer_id] * 2, "both are told")
        assert not here.is_connected(there.peer_id)
    assert "ValueError: broken" in caplog.text


async def test_connecting_to_a_connected_peer_remembers_the_address() -> None:
    async with endpoints(2, kind="tls", clients=[0], are_acquainted=False) as (there, here):
        await there.connect(here.addresses[0])
        await until(lambda: here.is_connected(there.peer_id), "the host has the connection")
        assert here.addresses_of(there.peer_id) == []
        address = LOOPBACK.with_peer(there.peer_id)
        await here.connect(address)
        assert here.addresses_of(there.peer_id) == [address]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
async def test_a_busy_event_loop_does_not_raise_the_measured_round_trip_time() -> None:
    """The system has measured the round trip; pings wait for their turn on the loop."""
    async with endpoints(2, kind="tls") as (here, there):
        serve_echo(there)
        calling = asyncio.ensure_future(here.call(there.peer_id, ECHO, Text("hi")))
        while not calling.done():
            await asyncio.sleep(0)
            time.sleep(0.02)  # noqa: ASYNC251 (another task of this process works)
        assert here.rtt_s(there.peer_id) < 0.005
        assert there.rtt_s(here.peer_id) < 0.005
