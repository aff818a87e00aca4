"""Endpoints in memory: races that real sockets show too rarely."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from manyhands.base.address import Address
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ConfigError, DialFailed, DialReason, PeerLost, Refused, Timeout, Unavailable
from manyhands.base.identity import Identity, PeerId
from manyhands.rpc import Endpoint, RpcConfig
from manyhands.rpc.frames import CONTROL, Hello, Ping, Reject, Request, encode_frame, receive_frame
from manyhands.transport import ControlStream, Listener, OnStream, Stream
from tests.memory_transport import MemoryNetwork, MemoryTransport
from tests.network import (
    ECHO,
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
    until,
)
from tests.wire import WatchedEndpoint


@pytest.fixture
async def loop_errors() -> AsyncIterator[list[str]]:
    """What asyncio would log: exceptions that nobody retrieved, callbacks that failed."""
    loop, errors = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda loop, context: errors.append(str(context["message"])))
    yield errors
    gc.collect()
    assert errors == []


class SlowTransport:
    """Lets a test decide when each dial succeeds."""

    def __init__(self, inner: MemoryTransport) -> None:
        self.identity: Identity = inner.identity
        self.inner = inner
        self.gates: dict[int, asyncio.Event] = {}
        self.dialling = asyncio.Event()

    def close(self) -> None:
        self.inner.close()

    def public_ip6(self) -> str:
        return self.inner.public_ip6()

    async def dial(self, address: Address, timeout_s: float) -> ControlStream:
        await self._pass(address, timeout_s)
        return await self.inner.dial(address, timeout_s)

    async def dial_bulk(self, address: Address, timeout_s: float) -> Stream:
        await self._pass(address, timeout_s)
        return await self.inner.dial_bulk(address, timeout_s)

    async def _pass(self, address: Address, timeout_s: float) -> None:
        self.dialling.set()
        async with time_limit(timeout_s, f"dialling {address}"):
            await self.gates.setdefault(address.port, asyncio.Event()).wait()

    async def listen(self, address: Address, on_stream: OnStream) -> Listener:
        return await self.inner.listen(address, on_stream)


@asynccontextmanager
async def slow_pair() -> AsyncIterator[tuple[WatchedEndpoint, SlowTransport, WatchedEndpoint]]:
    """An endpoint whose dials take as long as the test wants, its transport, and another to dial, on two ports."""
    network = MemoryNetwork()
    transport = SlowTransport(MemoryTransport(identity_of(0), network))
    here, there = WatchedEndpoint(transport), WatchedEndpoint(MemoryTransport(identity_of(1), network))
    await there.listen([LOOPBACK, LOOPBACK])
    serve_echo(there)
    here.learn(there.peer_id, there.addresses)
    try:
        yield here, transport, there
    finally:
        await here.close()
        await there.close()


# dialling


async def test_the_stream_that_is_returned_is_the_one_that_is_kept() -> None:
    """Two addresses answer almost at once: the earlier answer wins, whatever their order in the list."""
    async with slow_pair() as (here, transport, there):
        first, second = (transport.gates.setdefault(address.port, asyncio.Event()) for address in there.addresses)
        calls = asyncio.ensure_future(here.call(there.peer_id, ECHO, Text("hi")))
        await transport.dialling.wait()
        await asyncio.sleep(0)
        second.set()
        for _ in range(8):  # the second dial is about to be over; now the first follows on its heels
            await asyncio.sleep(0)
            first.set()
        assert (await calls).text == f"hi from {there.peer_id}"
        assert here.num_streams == 1


@pytest.mark.parametrize("num_turns", range(12))
async def test_two_addresses_answer_within_a_few_turns_of_the_loop(num_turns: int) -> None:
    async with slow_pair() as (here, transport, there):
        first, second = (transport.gates.setdefault(address.port, asyncio.Event()) for address in there.addresses)
        stream_task = asyncio.ensure_future(here.open_bulk(there.peer_id, "test", b""))
        there.accept_bulk("test", echo_bytes)
        await transport.dialling.wait()
        await asyncio.sleep(0)
        second.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        first.set()
        stream = await stream_task
        await stream.send(b"ok")
        target = bytearray(2)
        await stream.receive_into(memoryview(target))
        assert target == b"ok"
        here.release(stream)
        await until(lambda: not here.num_streams, "the loser is dropped too")


async def echo_bytes(remote: PeerId, header: bytes, stream: Stream) -> None:
    target = bytearray(2)
    await stream.receive_into(memoryview(target))
    await stream.send(target)
    await stream.wait_closed()


async def test_callers_at_the_same_time_share_one_dial() -> None:
    async with endpoints(2) as (here, there):
        serve_echo(there)
        answers = await asyncio.gather(*(here.call(there.peer_id, ECHO, Text(str(i))) for i in range(50)))
        assert [answer.text.split()[0] for answer in answers] == [str(i) for i in range(50)]
        assert there.num_streams == 1


async def test_calls_of_peers_that_dial_each_other_at_once_succeed() -> None:
    async with endpoints(2) as (here, there):
        serve_echo(here)
        serve_echo(there)
        for _ in range(3):
            async with time_limit(PATIENCE_S, "for both calls"):
                await asyncio.gather(
                    here.call(there.peer_id, ECHO, Text("hi")), there.call(here.peer_id, ECHO, Text("hi"))
                )


async def test_one_caller_gives_up_and_the_others_get_their_answer() -> None:
    async with slow_pair() as (here, transport, there):
        hasty = asyncio.ensure_future(here.call(there.peer_id, ECHO, Text("hi"), 0.01))
        patient = asyncio.ensure_future(here.call(there.peer_id, ECHO, Text("hi"), 5.0))
        cancelled = asyncio.ensure_future(here.call(there.peer_id, ECHO, Text("hi"), 5.0))
        await transport.dialling.wait()
        cancelled.cancel()
        with pytest.raises(Timeout, match=rf"timed out after 0\.01 s connecting to peer {there.peer_id}"):
            await hasty
        for gate in transport.gates.values():
            gate.set()
        assert (await patient).text.startswith("hi")
        assert cancelled.cancelled()


async def test_close_during_a_dial_ends_the_callers_with_an_error_not_a_cancellation() -> None:
    async with slow_pair() as (here, transport, there):
        calling = asyncio.ensure_future(here.call(there.peer_id, ECHO, Text("hi")))
        streaming = asyncio.ensure_future(here.open_bulk(there.peer_id, "test", b""))
        connecting = asyncio.ensure_future(here.connect(there.addresses[0]))
        await transport.dialling.wait()
        await here.close()
        async with time_limit(PATIENCE_S, "for the callers to notice"):
            outcomes = await asyncio.gather(calling, streaming, connecting, return_exceptions=True)
        assert all(isinstance(outcome, Unavailable) for outcome in outcomes), outcomes


@pytest.mark.parametrize("num_turns", range(10))
async def test_a_dial_that_succeeds_while_the_endpoint_closes_leaves_nothing(num_turns: int) -> None:
    async with slow_pair() as (here, transport, there):
        calling = asyncio.ensure_future(here.call(there.peer_id, ECHO, Text("hi")))
        connecting = asyncio.ensure_future(here.connect(there.addresses[0]))
        await transport.dialling.wait()
        for gate in transport.gates.values():
            gate.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await here.close()
        outcomes = await asyncio.gather(calling, connecting, return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, (Unavailable, Text, str)), outcome
        assert here.num_streams == 0
        assert not here.is_connected(there.peer_id)
        await until(lambda: not there.is_connected(here.peer_id), "the other side has noticed")


async def test_after_close_nothing_is_dialled() -> None:
    async with endpoints(2) as (here, there):
        await here.close()
        for attempt in (
            here.call(there.peer_id, ECHO, Text("hi")),
            here.open_bulk(there.peer_id, "test", b""),
            here.connect(there.addresses[0]),
        ):
            with pytest.raises(Unavailable, match="this peer is closed"):
                await attempt
        await here.close()


async def test_a_call_to_a_peer_without_a_known_address_says_so() -> None:
    async with endpoints(2, clients=[1]) as (here, there):
        with pytest.raises(Unavailable, match=r"no address is known .* client mode cannot be dialled"):
            await here.call(there.peer_id, ECHO, Text("hi"))


async def test_all_failures_of_a_peer_are_reported_together() -> None:
    async with endpoints(1) as (here,):
        addresses = [Address.of("127.0.0.1", port) for port in (9001, 9002)]
        here.learn(identity_of(5).peer_id, addresses)
        with pytest.raises(Unavailable) as caught:
            await here.call(identity_of(5).peer_id, ECHO, Text("hi"))
        for address in addresses:
            assert f"{address.with_peer(identity_of(5).peer_id)}: connection refused" in str(caught.value)


async def test_a_peer_that_connects_to_itself_is_refused() -> None:
    async with endpoints(1) as (here,):
        with pytest.raises(DialFailed) as caught:
            await here.connect(Address.of("127.0.0.1", here.addresses[0].port))
        assert caught.value.reason is DialReason.ITSELF
        with pytest.raises(Unavailable, match="this peer cannot call itself"):
            await here.call(here.peer_id, ECHO, Text("hi"))


class Answering:
    """A listener that is no endpoint: it answers every hello with the bytes that it was given."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer

    async def on_stream(self, stream: Stream) -> None:
        await receive_frame(stream)
        await stream.send(self.answer)
        await stream.wait_closed()


@pytest.mark.parametrize(
    ("answer", "reason", "text"),
    [
        (encode_frame(Ping()), DialReason.REJECTED, "answered a hello with Ping"),
        (b"\xff\xff\xff\xff", DialReason.REJECTED, "a frame of 4294967295 bytes"),
        (b"\x00\x00", DialReason.TIMED_OUT, "waiting for the welcome of"),
    ],
)
async def test_odd_answers_to_a_hello_fail_the_dial(answer: bytes, reason: DialReason, text: str) -> None:
    network = MemoryNetwork()
    listener = await MemoryTransport(identity_of(1), network).listen(LOOPBACK, Answering(answer).on_stream)
    here = WatchedEndpoint(MemoryTransport(identity_of(0), network))
    with pytest.raises(DialFailed, match=text) as caught:
        await here.connect(listener.addresses[0], 0.1)
    assert caught.value.reason is reason
    assert here.num_streams == 0
    await here.close()
    await listener.close()


async def test_a_rejection_carries_its_code() -> None:
    network = MemoryNetwork()
    answer = encode_frame(Reject("full", "come\x1b[31m later"))
    listener = await MemoryTransport(identity_of(1), network).listen(LOOPBACK, Answering(answer).on_stream)
    here = Endpoint(MemoryTransport(identity_of(0), network))
    with pytest.raises(Refused, match=r"come\?\[31m later") as caught:
        await here.connect(listener.addresses[0])
    assert caught.value.code == "full"
    await here.close()
    await listener.close()


# accepted streams


async def test_a_peer_that_leaves_right_after_its_hello_is_forgotten() -> None:
    """Else it would count as connected for ever, and could never be called again."""
    async with endpoints(1) as (there,):
        events: list[str] = []
        there.on_connected.append(lambda peer_id: events.append("connected"))
        there.on_lost.append(lambda peer_id: events.append("lost"))
        stream = await transport_beside(there, identity_of(9)).dial(there.addresses[0], 1.0)
        stream.send_now(encode_frame(Hello(CONTROL, addresses=["/ip4/127.0.0.1/tcp/9"])))
        stream.abort()  # the hello has arrived, but was not read
        await until(lambda: events == ["connected", "lost"], "it is known to have come and gone")
        await until(lambda: not there.num_streams, "the stream is forgotten")
        assert not there.is_connected(identity_of(9).peer_id)


async def test_a_connection_without_a_hello_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async with endpoints(1, config=RpcConfig(hello_timeout_s=0.1)) as (there,):
        for words, violates in [(b"", False), (b"\x00\x00", False), (encode_frame(Ping()), True), (b"GET /", True)]:
            before = there.counters["protocol_violations"]
            stream = await transport_beside(there, identity_of(9)).dial(there.addresses[0], 1.0)
            await stream.send(words)
            async with time_limit(PATIENCE_S, "to be dropped"):
                await stream.wait_closed()
            await until(lambda: not there.num_streams, "the stream is forgotten")
            assert there.counters["protocol_violations"] == before + violates
    assert "failed" not in caplog.text


async def test_a_bulk_stream_that_nobody_takes_is_refused() -> None:
    async with endpoints(2) as (here, there):
        with pytest.raises(Refused, match="no streams of kind 'music' here") as caught:
            await here.open_bulk(there.peer_id, "music", b"")
        assert caught.value.code == "unknown_purpose"
        assert here.num_streams == 0


async def test_the_newest_connection_of_a_peer_is_used() -> None:
    """A peer that crashed and came back: its old connection may be silent for seconds before it is known to be dead."""
    async with endpoints(1) as (there,), raw_control(there), raw_control(there) as new:
        calling = asyncio.ensure_future(there.call(identity_of(99).peer_id, STUCK, Text("hi")))
        request = await next_frame(new, Request)
        assert isinstance(request, Request)
        assert request.method == STUCK.name
        calling.cancel()
        await asyncio.wait([calling])


# connections coming and going


async def test_a_lost_peer_is_told_of_at_once_though_its_handlers_take_their_time() -> None:
    async with endpoints(2) as (here, there):
        released, lost = asyncio.Event(), asyncio.Event()

        async def tidy_up_slowly(remote: PeerId, request: Text) -> Text:
            while not released.is_set():
                with suppress(asyncio.CancelledError):
                    await released.wait()
            return request

        there.handle(STUCK, tidy_up_slowly)
        there.on_lost.append(lambda peer_id: lost.set())
        with pytest.raises(Timeout):
            await here.call(there.peer_id, STUCK, Text("hi"), 0.01)
        await here.close()
        async with time_limit(PATIENCE_S, "to be told"):
            await lost.wait()
        assert not there.is_connected(here.peer_id)
        released.set()


async def test_a_callback_may_remove_itself() -> None:
    async with endpoints(2) as (here, there):
        told: list[str] = []

        def once(peer_id: PeerId) -> None:
            told.append("once")
            there.on_lost.remove(once)

        there.on_lost += [once, lambda peer_id: told.append("always")]
        await here.connect(there.addresses[0])
        await here.close()
        await until(lambda: "always" in told, "the peer is lost")
        assert told == ["once", "always"]


async def test_an_open_call_ends_with_the_connection() -> None:
    async with endpoints(2) as (here, there):
        stuck = StuckHandler(there)
        calling = asyncio.ensure_future(here.call(there.peer_id, STUCK, Text("hi"), 30.0))
        await stuck.called.wait()
        await there.close()
        with pytest.raises(PeerLost, match="it closed the connection: shutting down"):
            await calling
        assert stuck.cancelled.is_set()


async def test_a_call_that_is_still_being_sent_ends_with_the_connection(loop_errors: list[str]) -> None:
    """And leaves no exception behind that nobody retrieves."""
    async with endpoints(1) as (here,), raw_control(here) as stream:
        big = Text("x" * 900_000)
        calls = [asyncio.ensure_future(here.call(identity_of(99).peer_id, ECHO, big, 30.0)) for _ in range(4)]
        for _ in range(20):
            await asyncio.sleep(0)
        stream.abort()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, PeerLost) for outcome in outcomes)
        del outcomes, calls


async def test_an_answer_that_comes_too_late_is_ignored(loop_errors: list[str]) -> None:
    async with endpoints(2) as (here, there):
        answer, begun, cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def late(remote: PeerId, request: Text) -> Text:
            begun.set()
            try:
                await answer.wait()
            except asyncio.CancelledError:
                cancelled.set()
            return Text("too late")

        there.handle(STUCK, late)
        while not begun.is_set():  # a call that times out before the handler runs is never served
            with pytest.raises(Timeout):
                await here.call(there.peer_id, STUCK, Text("hi"), 0.01)
        await cancelled.wait()
        serve_echo(there)
        assert (await here.call(there.peer_id, ECHO, Text("hi"))).text.startswith("hi")


async def test_a_method_has_one_handler_at_a_time() -> None:
    async with endpoints(1) as (here,):
        serve_echo(here)
        with pytest.raises(ConfigError, match=r"test\.echo is served already"):
            serve_echo(here)
        here.unhandle(ECHO)
        serve_echo(here)


def test_known_addresses_are_bounded() -> None:
    async def scenario() -> None:
        endpoint = Endpoint(MemoryTransport(identity_of(0), MemoryNetwork()), config=RpcConfig(max_known_addresses=3))
        for number in range(1, 6):
            endpoint.learn(identity_of(number).peer_id, [Address.of("127.0.0.1", port) for port in range(1, 30)])
        assert [len(endpoint.addresses_of(identity_of(number).peer_id)) for number in range(1, 6)] == [0, 0, 8, 8, 8]
        await endpoint.close()

    asyncio.run(scenario())
