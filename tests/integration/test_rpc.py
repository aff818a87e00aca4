"""Calls between endpoints over TLS on loopback: deadlines, errors, bad peers, dead peers, frozen peers."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from manyhands.base.address import Address
from manyhands.base.deadline import time_limit
from manyhands.base.errors import (
    BadSignature,
    ConfigError,
    PeerError,
    PeerLost,
    ProtocolViolation,
    Refused,
    RoundAborted,
    Timeout,
    Unavailable,
)
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint, Method, RpcConfig
from manyhands.rpc.frames import (
    MAX_FRAME_BYTES,
    CallFailure,
    Cancel,
    Ping,
    Pong,
    Request,
    Response,
    encode_frame,
    send_frame,
)
from manyhands.transport import Stream
from tests.machine import Machine
from tests.network import (
    ECHO,
    PATIENCE_S,
    STUCK,
    StuckHandler,
    Text,
    endpoints,
    identity_of,
    next_frame,
    raw_control,
    serve_echo,
    until,
)

RAW_PEER = identity_of(99).peer_id  # as which raw_control comes
FAST = RpcConfig(heartbeat_period_s=0.05, heartbeat_timeout_s=0.3)


def request_of(method: str = ECHO.name, *, id: int = 1, timeout_s: float = 5.0, **body: Any) -> Request:  # noqa: A002
    return Request(id, method, timeout_s, msgspec.Raw(msgspec.msgpack.encode(body or {"text": "hi"})))


# calls


async def test_calls_go_both_ways_over_the_one_connection_of_a_client() -> None:
    async with endpoints(2, kind="tls", clients=[0]) as (client, server):
        serve_echo(client)
        serve_echo(server)
        there = await client.call(server.peer_id, ECHO, Text("hi"))
        back = await server.call(client.peer_id, ECHO, Text("you"))
        assert (there.text, back.text) == (f"hi from {server.peer_id}", f"you from {client.peer_id}")
        assert client.num_streams == server.num_streams == 1
        assert server.is_client(client.peer_id)
        assert not client.is_client(server.peer_id)


async def test_trust_on_first_use_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with endpoints(2) as (client, server):
        place = Address.parse(server.addresses[0].host_port)
        assert {await client.connect(place), await client.connect(place)} == {server.peer_id}
    assert caplog.text.count("(trusted on first use)") == 1


async def test_many_concurrent_calls_get_their_own_answers() -> None:
    async with endpoints(2, kind="tls") as (here, there):
        serve_echo(there)
        answers = await asyncio.gather(*(here.call(there.peer_id, ECHO, Text(f"{i}")) for i in range(200)))
        assert [answer.text.split()[0] for answer in answers] == [f"{i}" for i in range(200)]


async def test_a_deadline_names_the_call_and_cancels_the_handler() -> None:
    async with endpoints(2, kind="tls") as (here, there):
        stuck = StuckHandler(there)
        await here.connect(there.addresses[0])
        with pytest.raises(Timeout, match=rf"after 0\.[0-9]+ s waiting for test\.stuck of peer {there.peer_id}"):
            await here.call(there.peer_id, STUCK, Text("hi"), 0.05)
        async with time_limit(PATIENCE_S, "for the handler to be cancelled"):
            await stuck.cancelled.wait()
        serve_echo(there)
        assert (await here.call(there.peer_id, ECHO, Text("hi"))).text.startswith("hi")


async def test_cancelling_a_call_cancels_the_handler() -> None:
    async with endpoints(2, kind="tls") as (here, there):
        stuck = StuckHandler(there)
        calling = asyncio.ensure_future(here.call(there.peer_id, STUCK, Text("hi"), 30.0))
        await stuck.called.wait()
        calling.cancel()
        async with time_limit(PATIENCE_S, "for the handler to be cancelled"):
            await stuck.cancelled.wait()
        assert calling.cancelled()


async def test_the_callee_keeps_the_deadline_by_itself() -> None:
    """Also when the caller says nothing any more."""
    async with endpoints(1, kind="tls") as (there,), raw_control(there) as stream:
        stuck = StuckHandler(there)
        await send_frame(stream, request_of(STUCK.name, timeout_s=0.05))
        failure = await next_frame(stream, CallFailure)
        assert isinstance(failure, CallFailure)
        assert failure.code == "timeout"
        assert stuck.cancelled.is_set()


@pytest.mark.parametrize(
    ("raised", "arrives", "says"),
    [
        (KeyError("/home/user/secret"), PeerError, "the call failed inside the peer; its log says why"),
        (Refused(PeerId("x"), "unknown_group", "no such group"), Refused, r"refused \(unknown_group\): no such group"),
        (Refused(PeerId("x"), "long", "x" * 2_000_000), Refused, "xxx"),
        (Unavailable("the disk is full"), Unavailable, "the disk is full"),
        (RoundAborted("nobody came"), Unavailable, "nobody came"),
        (Timeout("waiting for somebody else", 3.0), Unavailable, "timed out after 3 s waiting for somebody else"),
        (asyncio.TimeoutError(), PeerError, "the call failed inside the peer"),
    ],
    ids=["a bug", "no", "a long no", "unavailable", "aborted", "a wait of its own", "a timeout of asyncio"],
)
@pytest.mark.parametrize("is_plain", [False, True], ids=["a coroutine", "a plain function"])
async def test_an_exception_of_the_handler_arrives_typed_and_without_internals(
    raised: Exception, arrives: type[Exception], says: str, is_plain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(remote: PeerId, request: Text) -> Text:
        raise raised

    def fail_at_once(remote: PeerId, request: Text) -> Text:
        raise raised

    async with endpoints(2, kind="tls") as (here, there):
        there.handle(ECHO, fail_at_once if is_plain else fail)
        with pytest.raises(arrives, match=says) as caught:
            await here.call(there.peer_id, ECHO, Text("hi"))
    assert there.peer_id in str(caught.value)
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert ("secret" in caplog.text) == ("secret" in str(raised)), "the log of the peer itself says why"


async def test_a_plain_function_answers_also_at_length() -> None:
    def repeat(remote: PeerId, request: Text) -> Text:
        return Text(request.text * 300_000)

    async with endpoints(2, kind="tls") as (here, there):
        there.handle(ECHO, repeat)
        assert [await here.call(there.peer_id, ECHO, Text(text)) for text in ("", "ab")] == [
            Text(""),
            Text("ab" * 300_000),
        ]
        with pytest.raises(Unavailable, match="bulk stream"):
            await here.call(there.peer_id, ECHO, Text("abcd"))
        with pytest.raises(Refused, match="the request cannot be read"):
            await here.call(there.peer_id, Method(ECHO.name, Number, Text), Number(7))


async def test_an_unknown_method_is_refused() -> None:
    async with endpoints(2, kind="tls") as (here, there):
        with pytest.raises(Refused, match=r"no method 'test\.echo' here") as caught:
            await here.call(there.peer_id, ECHO, Text("hi"))
    assert caught.value.code == "unknown_method"


class Number(msgspec.Struct):
    number: int


async def test_a_request_of_the_wrong_shape_is_refused_and_counted() -> None:
    async with endpoints(2, kind="tls") as (here, there):
        serve_echo(there)
        with pytest.raises(Refused, match="the request cannot be read") as caught:
            await here.call(there.peer_id, Method(ECHO.name, Number, Text), Number(7))
        assert caught.value.code == "bad_request"
        assert there.counters["protocol_violations"] == 1


async def test_an_answer_of_the_wrong_shape_is_a_violation_of_that_peer() -> None:
    async with endpoints(2, kind="tls") as (here, there):
        serve_echo(there)
        with pytest.raises(ProtocolViolation, match=r"the answer of test\.echo cannot be read") as caught:
            await here.call(there.peer_id, Method(ECHO.name, Text, Number), Text("hi"))
        assert caught.value.peer_id == there.peer_id
        assert (await here.call(there.peer_id, ECHO, Text("hi"))).text.startswith("hi")


async def test_messages_that_are_too_large_say_so_at_once() -> None:
    async def answer_at_length(remote: PeerId, request: Text) -> Text:
        return Text("x" * MAX_FRAME_BYTES)

    async with endpoints(2, kind="tls") as (here, there):
        there.handle(ECHO, answer_at_length)
        async with time_limit(PATIENCE_S, "for the errors"):
            with pytest.raises(ConfigError, match="bulk stream"):
                await here.call(there.peer_id, ECHO, Text("x" * MAX_FRAME_BYTES), 30.0)
            with pytest.raises(Unavailable, match=f"peer {there.peer_id}: .*bulk stream"):
                await here.call(there.peer_id, ECHO, Text("hi"), 30.0)


async def test_large_calls_that_are_given_up_leave_the_connection_whole() -> None:
    """Requests and answers of nearly a frame, most of them cancelled while they are being sent."""
    rng = random.Random(3)
    async with endpoints(2, kind="tls") as (here, there):
        serve_echo(there)
        lost: list[PeerId] = []
        here.on_lost.append(lost.append)
        there.on_lost.append(lost.append)
        await here.connect(there.addresses[0])
        big = Text("x" * 1_000_000)

        for _ in range(20):
            calls = [asyncio.ensure_future(here.call(there.peer_id, ECHO, big, 10.0)) for _ in range(8)]
            for _ in range(rng.randrange(60)):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
        answer = await here.call(there.peer_id, ECHO, Text("hi"), 10.0)
        assert answer.text.startswith("hi")
        assert lost == []


async def test_a_peer_that_asks_too_much_at_once_is_told_so() -> None:
    config = RpcConfig(max_requests_per_connection=4)
    async with endpoints(2, kind="tls", config=config) as (here, there):
        stuck = StuckHandler(there)
        calls = [asyncio.ensure_future(here.call(there.peer_id, STUCK, Text("hi"), 0.5)) for _ in range(6)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(outcome, Refused) and outcome.code == "busy" for outcome in outcomes) == 2
        assert sum(isinstance(outcome, Unavailable) for outcome in outcomes) == 4
        assert stuck.num_calls == 4
        serve_echo(there)
        await until(lambda: not stuck.num_running, "the handlers have ended")
        assert (await here.call(there.peer_id, ECHO, Text("hi"))).text.startswith("hi")


# bad peers


async def test_unknown_fields_are_ignored() -> None:
    async with endpoints(1, kind="tls") as (there,), raw_control(there) as stream:
        serve_echo(there)
        fields = {"type": "request", "id": 5, "method": ECHO.name, "timeout_s": 5, "mood": [None]}
        payload = msgspec.msgpack.encode({**fields, "body": {"text": "hi", "colour": "red"}})
        await stream.send(len(payload).to_bytes(4, "big"), payload)
        response = await next_frame(stream, Response)
        assert isinstance(response, Response)
        assert response.id == 5
        assert msgspec.msgpack.decode(response.body, type=Text).text.startswith("hi")


@pytest.mark.parametrize(
    "sent",
    [
        encode_frame(Ping()).replace(b"ping", b"sing"),
        b"\xff\xff\xff\xff",
        (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        b"\x00\x00\x00\x03\xc1\xc1\xc1",
        (50_014).to_bytes(4, "big") + b"\x82\xa4type\xa4ping\xa1x" + b"\x91" * 50_000 + b"\xc0",
        bytes.fromhex("0000000e81a474797065a777656c636f6d65"),
    ],
    ids=["unknown kind", "huge", "just over the limit", "not msgpack", "lists in lists", "a second welcome"],
)
async def test_a_peer_that_breaks_the_protocol_is_dropped_and_the_others_are_served(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with endpoints(2, kind="tls") as (there, other), raw_control(there) as stream:
        serve_echo(there)
        await stream.send(sent)
        async with time_limit(PATIENCE_S, "to be dropped"):
            await stream.wait_closed()
        await until(lambda: there.counters["protocol_violations"] == 1, "it is counted")
        assert (await other.call(there.peer_id, ECHO, Text("hi"))).text.startswith("hi")
    assert [record.levelno for record in caplog.records if record.levelno > logging.INFO] == [logging.WARNING]
    assert "is dropped" in caplog.text


@pytest.mark.parametrize("timeout_s", [math.nan, -1.0, 0.0, -math.inf])
async def test_deadlines_that_are_not_positive_numbers_are_refused(timeout_s: float) -> None:
    """Not a number, put among the timers of the loop, would disorder them all."""
    async with endpoints(1, kind="tls") as (there,), raw_control(there) as stream:
        serve_echo(there)
        await send_frame(stream, request_of(timeout_s=timeout_s))
        failure = await next_frame(stream, CallFailure)
        assert isinstance(failure, CallFailure)
        assert failure.code == "bad_request"


@pytest.mark.parametrize("timeout_s", [1e308, math.inf])
async def test_endless_deadlines_are_shortened(timeout_s: float) -> None:
    async with endpoints(1, kind="tls") as (there,), raw_control(there) as stream:
        serve_echo(there)
        stuck = StuckHandler(there)
        await send_frame(stream, request_of(timeout_s=timeout_s))
        await next_frame(stream, Response)
        await send_frame(stream, request_of(STUCK.name, timeout_s=timeout_s))
        await stuck.called.wait()
        await send_frame(stream, Cancel(1))
        await stuck.cancelled.wait()


async def test_answers_that_nobody_asked_for_are_ignored() -> None:
    async with endpoints(1, kind="tls") as (there,), raw_control(there) as stream:
        serve_echo(there)
        for frame in (Response(77, msgspec.Raw(b"\xc0")), CallFailure(78, "busy", "x"), Cancel(79), Pong()):
            await send_frame(stream, frame)
        await send_frame(stream, request_of())
        await next_frame(stream, Response)


async def test_a_flood_of_pings_from_a_peer_that_never_reads_is_bounded() -> None:
    config = RpcConfig(max_requests_per_connection=8)
    async with endpoints(2, kind="tls", config=config) as (there, other), raw_control(there) as stream:
        serve_echo(there)
        await other.call(there.peer_id, ECHO, Text("hi"), 10.0)
        num_tasks = len(asyncio.all_tasks())
        await stream.send(encode_frame(Ping()) * 20_000)
        await other.call(there.peer_id, ECHO, Text("hi"), 10.0)
        assert len(asyncio.all_tasks()) <= num_tasks
        await send_frame(stream, request_of())
        await next_frame(stream, Response)


async def test_two_requests_with_one_id_are_refused() -> None:
    async with endpoints(1, kind="tls") as (there,), raw_control(there) as stream:
        stuck = StuckHandler(there)
        await send_frame(stream, request_of(STUCK.name))
        await send_frame(stream, request_of(STUCK.name))
        failure = await next_frame(stream, CallFailure)
        assert isinstance(failure, CallFailure)
        assert failure.code == "busy"
        assert stuck.num_calls == 1


# dead and frozen peers


async def test_a_silent_peer_is_lost_and_its_calls_end() -> None:
    async with endpoints(1, kind="tls", config=FAST) as (there,), raw_control(there):
        lost: asyncio.Future[PeerId] = asyncio.get_running_loop().create_future()
        there.on_lost.append(lost.set_result)
        with pytest.raises(PeerLost, match=r"silent for [0-9.]+ s"):
            await there.call(RAW_PEER, ECHO, Text("hi"), 30.0)
        assert await asyncio.wait_for(lost, PATIENCE_S) == RAW_PEER


async def test_a_peer_whose_large_message_is_slow_is_not_silent() -> None:
    """On a slow uplink one frame takes longer than the heartbeat's timeout."""
    async with endpoints(1, kind="tls", config=FAST) as (there,), raw_control(there) as stream:
        serve_echo(there)
        frame = encode_frame(request_of(text="x" * 500_000))
        for piece in range(12):
            await stream.send(frame[piece * len(frame) // 12 : (piece + 1) * len(frame) // 12])
            await asyncio.sleep(0.05)  # 0.6 s in all, twice the timeout
        await next_frame(stream, Response)


async def test_a_loop_that_was_held_up_itself_loses_nobody() -> None:
    async with endpoints(2, kind="tls", config=FAST) as (here, there):
        serve_echo(there)
        await here.connect(there.addresses[0])
        lost: list[PeerId] = []
        here.on_lost.append(lost.append)
        there.on_lost.append(lost.append)
        time.sleep(0.8)  # noqa: ASYNC251 (holding the loop up is the test)
        await asyncio.sleep(0.2)
        assert lost == []
        assert (await here.call(there.peer_id, ECHO, Text("hi"))).text.startswith("hi")


CHILD = """
import asyncio
from tests.integration.test_rpc import FAST
from tests.network import StuckHandler, endpoints

async def main():
    async with endpoints(2, kind="tls", config=FAST) as (_, endpoint):
        StuckHandler(endpoint)
        print(endpoint.addresses[0], flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def child_process() -> AsyncIterator[tuple[asyncio.subprocess.Process, Address]]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with time_limit(120.0, "for the child to listen"):
            line = await process.stdout.readline()
        yield process, Address.parse(line.decode().strip())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001 (asyncio has no public name for it)


async def loss_of_child(endpoint: Endpoint, address: Address, process: Any, number: int) -> tuple[float, PeerLost]:
    """Send the child a signal in the middle of a call; how long that call took to fail, and why."""
    peer_id = await endpoint.connect(address)
    lost = asyncio.Event()
    endpoint.on_lost.append(lambda peer_id: lost.set())
    calling = asyncio.ensure_future(endpoint.call(peer_id, STUCK, Text("hi"), 30.0))
    with pytest.raises(Refused):  # the child is up and answers
        await endpoint.call(peer_id, ECHO, Text("hi"))
    began = time.monotonic()
    process.send_signal(number)
    with pytest.raises(PeerLost) as caught:
        await calling
    took_s = time.monotonic() - began
    await asyncio.wait_for(lost.wait(), PATIENCE_S)
    return took_s, caught.value


@pytest.mark.process
async def test_a_killed_process_is_noticed_at_once() -> None:
    async with endpoints(1, kind="tls") as (here,), child_process() as (process, address):
        took_s, error = await loss_of_child(here, address, process, signal.SIGKILL)
    assert took_s < RpcConfig().heartbeat_timeout_s
    assert "connection closed" in str(error)


@pytest.mark.process
@pytest.mark.skipif(os.name == "nt", reason="no SIGSTOP there")
async def test_a_frozen_process_is_noticed_by_its_silence() -> None:
    async with endpoints(1, kind="tls", config=FAST) as (here,), child_process() as (process, address):
        took_s, error = await loss_of_child(here, address, process, signal.SIGSTOP)
        assert took_s > 0.2
        assert "silent for" in str(error)
        with pytest.raises(Unavailable, match="timed out"):
            await here.call(error.peer_id, ECHO, Text("hi"), 0.3)


# bulk


async def test_a_bulk_stream_carries_its_header_and_its_bytes_count() -> None:
    async with endpoints(2, kind="tls") as (here, there):
        received: asyncio.Future[tuple[PeerId, bytes, bytes]] = asyncio.get_running_loop().create_future()

        async def take(remote: PeerId, header: bytes, stream: Stream) -> None:
            target = bytearray(3 << 20)
            await stream.receive_into(memoryview(target))
            received.set_result((remote, header, bytes(target)))

        there.accept_bulk("test", take)
        data = random.Random(1).randbytes(3 << 20)
        stream = await here.open_bulk(there.peer_id, "test", b"what it is for")
        await stream.send(data)
        assert await asyncio.wait_for(received, PATIENCE_S) == (here.peer_id, b"what it is for", data)
        here.release(stream)
        assert here.bytes_sent > len(data)
        assert not here.is_connected(there.peer_id), "no control connection was needed"


@pytest.mark.parametrize(
    ("raised", "level"),
    [
        (BadSignature("somebody", "the signature does not match"), logging.WARNING),
        (Timeout("waiting for the rest", 1.0), logging.DEBUG),
        (Unavailable("the round is over"), logging.DEBUG),
        (KeyError("a bug"), logging.ERROR),
    ],
    ids=["theirs", "late", "unavailable", "ours"],
)
async def test_a_bulk_stream_ends_with_its_acceptor(
    raised: Exception, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What another peer can cause is no error of ours, and fills no log with tracebacks."""

    async def fail(remote: PeerId, header: bytes, stream: Stream) -> None:
        raise raised

    async with endpoints(2, kind="tls") as (here, there):
        there.accept_bulk("test", fail)
        with caplog.at_level(logging.DEBUG):
            stream = await here.open_bulk(there.peer_id, "test", b"")
            async with time_limit(PATIENCE_S, "for the stream to end"):
                await stream.wait_closed()
            await until(lambda: not there.num_streams, "the stream is forgotten")
        here.release(stream)
    loudest = max(caplog.records, key=lambda record: record.levelno)
    assert loudest.levelno == level
    assert (loudest.exc_info is not None) == (level == logging.ERROR)


async def test_heartbeats_go_on_while_bulk_flows() -> None:
    async with endpoints(2, kind="tls", config=FAST) as (here, there):
        serve_echo(there)

        async def take(remote: PeerId, header: bytes, stream: Stream) -> None:
            target = bytearray(1 << 20)
            while True:
                await stream.receive_into(memoryview(target))

        there.accept_bulk("test", take)
        await here.connect(there.addresses[0])
        lost: list[PeerId] = []
        here.on_lost.append(lost.append)
        stream = await here.open_bulk(there.peer_id, "test", b"")

        async def send() -> None:
            data = bytes(8 << 20)
            while stream.bytes_sent < 200 << 20:
                await stream.send(data)

        sending = asyncio.ensure_future(send())
        slowest_s = 0.0
        with Machine() as machine:
            while not sending.done():
                began = time.monotonic()
                await here.call(there.peer_id, ECHO, Text("hi"))
                slowest_s = max(slowest_s, time.monotonic() - began)
        await sending
        here.release(stream)
        assert lost == []
        assert slowest_s < machine.allows(0.5)
