"""What a peer sends far away is paced, over real sockets; nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from manyhands.base.deadline import time_limit
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint, uplink
from manyhands.transport import Stream, tcp
from manyhands.transport.sealed_stream import SealedStream
from tests.network import PATIENCE_S, endpoints
from tests.swarm import averagers

MB = 10**6
MAX_PACING_RATE_OFFSET = 112
"""Of ``tcpi_max_pacing_rate`` in ``struct tcp_info``: 8 bytes."""
NO_PACE = (2**64 - 1, 2**32 - 1)
TLS_OVERHEAD = 1.01

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what was acknowledged, and paces")


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """All links count as long."""
    monkeypatch.setattr(tcp, "LONG_RTT_S", 0.0)


@contextlib.asynccontextmanager
async def streams_from(here: Endpoint, there: Endpoint, num: int) -> AsyncIterator[list[Stream]]:
    """Bulk streams whose other end takes all that comes."""

    async def take(remote: PeerId, header: bytes, stream: Stream) -> None:
        room = memoryview(bytearray(1 << 16))
        while True:
            await stream.receive_into(room)

    there.accept_bulk("taken", take)
    here.learn(there.peer_id, there.addresses)
    streams = [await here.open_bulk(there.peer_id, "taken", b"") for _ in range(num)]
    try:
        yield streams
    finally:
        for stream in streams:
            here.release(stream)


def pace_of(stream: Stream) -> int | None:
    """As the system has it, in bytes per second; None without one."""
    assert isinstance(stream, SealedStream)
    sock = stream._sock  # noqa: SLF001 (what the system has is shown by the socket alone)
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, MAX_PACING_RATE_OFFSET + 8)
    (rate,) = struct.unpack_from("=Q", info, MAX_PACING_RATE_OFFSET)
    return None if rate in NO_PACE else int(rate)


def measuring() -> list[str]:
    """The tasks that measure uplinks."""
    return [task.get_name() for task in asyncio.all_tasks() if "uplink measurement" in task.get_name()]


def has_shown(endpoint: Endpoint, line: float) -> float:
    """Let an endpoint have seen a line of so many bytes per second; returns its pace."""
    endpoint.uplink.pace.add(uplink.MonitorInterval(line, 0.0))
    paced = endpoint.uplink.pace.bytes_per_s
    assert paced is not None
    return paced


@on_linux
@pytest.mark.usefixtures("far")
async def test_the_kernel_counts_as_delivered_the_bytes_that_were_sent() -> None:
    async with endpoints(2, kind="tls") as (here, there), streams_from(here, there, 1) as (stream,):
        before = stream.delivery()
        assert before is not None
        await stream.send(bytearray(2 * MB))
        async with time_limit(PATIENCE_S, "for acknowledgements"):
            while (delivery := stream.delivery()) is not None and delivery.delivered < before.delivered + 2 * MB:
                await asyncio.sleep(0.01)
        assert delivery is not None
        assert 2 * MB < delivery.delivered - before.delivered < TLS_OVERHEAD * 2 * MB
        assert 2 * MB < delivery.sent - before.sent - (delivery.resent - before.resent) < TLS_OVERHEAD * 2 * MB
        stream.abort()
        await stream.wait_closed()
        assert stream.delivery() is None
        stream.pace(1e6)  # nothing to pace any more


@on_linux
@pytest.mark.usefixtures("far")
async def test_a_stream_sends_no_faster_than_its_pace() -> None:
    async with endpoints(2, kind="tls") as (here, there), streams_from(here, there, 1) as (stream,):
        stream.pace(8 * MB)
        began = time.monotonic()
        await stream.send(bytearray(8 * MB))
        assert time.monotonic() - began > 0.4  # what the buffers of both systems hold goes at once


async def test_a_short_link_is_not_paced() -> None:
    async with endpoints(2, kind="tls") as (here, there), streams_from(here, there, 1) as (stream,):
        has_shown(here, 4 * MB)
        with here.uplink.shared() as share:
            share.add(stream, 1)
            await asyncio.sleep(0.01)
            assert stream.delivery() is None
            assert not share.streams
            if sys.platform == "linux":
                assert pace_of(stream) is None
        assert not measuring(), "it costs nothing"


@on_linux
@pytest.mark.usefixtures("far")
async def test_the_streams_of_a_round_share_the_pace_by_what_they_carry() -> None:
    async with endpoints(2, kind="tls") as (here, there), streams_from(here, there, 3) as streams:
        with here.uplink.shared() as share:
            for stream, num_bytes in zip(streams, [300 * MB, 100 * MB, 0], strict=True):
                share.add(stream, num_bytes)
            await asyncio.sleep(0.01)
            assert [pace_of(stream) for stream in streams] == [None] * 3, "nothing is known yet"
        paced = has_shown(here, 8 * MB)
        with here.uplink.shared() as share:
            for stream, num_bytes in zip(streams, [300 * MB, 100 * MB, 0], strict=True):
                share.add(stream, num_bytes)
            await asyncio.sleep(0.01)
            paces = [pace_of(stream) for stream in streams]
        assert paces == pytest.approx([0.75 * paced, 0.25 * paced, uplink.MIN_PACE], abs=1)
        assert [pace_of(stream) for stream in streams] == [None] * 3, "what is left is sent at once after the round"


@on_linux
@pytest.mark.usefixtures("far")
async def test_the_share_of_a_lost_stream_goes_to_the_others() -> None:
    async with endpoints(2, kind="tls") as (here, there), streams_from(here, there, 3) as streams:
        paced = has_shown(here, 8 * MB)
        with here.uplink.shared() as share:
            for stream in streams:
                share.add(stream, 100 * MB)
            await asyncio.sleep(0.01)
            streams[0].abort()
            async with time_limit(PATIENCE_S, "for the next look"):
                while pace_of(streams[1]) != pytest.approx(paced / 2, abs=1):
                    await asyncio.sleep(0.01)
            assert pace_of(streams[2]) == pytest.approx(paced / 2, abs=1)


@on_linux
@pytest.mark.usefixtures("far")
async def test_a_stream_that_is_behind_gets_more_of_a_new_pace() -> None:
    async with endpoints(2, kind="tls") as (here, there), streams_from(here, there, 2) as streams:
        with here.uplink.shared() as share:
            for stream in streams:
                share.add(stream, 4 * MB)
            await streams[0].send(bytearray(3 * MB))
            async with time_limit(PATIENCE_S, "for acknowledgements"):
                while share.streams[streams[0]].left > 1 * MB:
                    await asyncio.sleep(0.01)
            paced = has_shown(here, 1 * MB)
            with here.uplink.shared():
                pass  # at its end the pace is divided anew
            paces = [pace_of(stream) for stream in streams]
            assert paces == pytest.approx([1.2 / 5.4 * paced, 4.2 / 5.4 * paced], rel=0.02)


@on_linux
@pytest.mark.usefixtures("far")
async def test_two_rounds_at_once_share_the_line() -> None:
    async with endpoints(2, kind="tls") as (here, there), streams_from(here, there, 3) as streams:
        paced = has_shown(here, 8 * MB)
        with here.uplink.shared() as first, here.uplink.shared():  # the third has no stream yet
            first.add(streams[0], 100 * MB)
            await asyncio.sleep(0.01)
            assert pace_of(streams[0]) == pytest.approx(paced, abs=1)
            with here.uplink.shared() as second:
                for stream in streams[1:]:
                    second.add(stream, 50 * MB)
                await asyncio.sleep(0.01)
                paces = [pace_of(stream) for stream in streams]
                assert paces == pytest.approx([paced / 2, paced / 4, paced / 4], abs=1)
            assert pace_of(streams[0]) == pytest.approx(paced, abs=1), "the other round is over"


@on_linux
@pytest.mark.usefixtures("far")
async def test_the_measured_rate_is_what_the_line_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's pace stands for the line."""
    monkeypatch.setattr(uplink, "MIN_INTERVAL_S", 1.0)
    monkeypatch.setattr(uplink, "MIN_FIRST_S", 1.0)
    async with endpoints(2, kind="tls") as (here, there), streams_from(here, there, 2) as streams:
        with here.uplink.shared() as share:
            for stream in streams:
                share.add(stream, 7 * MB)
                stream.pace(2 * MB)
            await asyncio.gather(*(stream.send(bytearray(8 * MB)) for stream in streams))  # some of it into buffers
        assert share.backlog.rate == pytest.approx(4 * MB, rel=0.15)
        with here.uplink.shared() as share:
            for stream in streams:
                share.add(stream, 100 * MB)
            await asyncio.sleep(0.01)
            paces = [pace_of(stream) or 0 for stream in streams]
        line = sum(paces) / (1 + uplink.STEP)
        assert line == pytest.approx(4 * MB, rel=0.25)  # the first window of each goes at once


@on_linux
@pytest.mark.usefixtures("far")
async def test_a_stream_whose_other_end_has_no_room_is_not_busy() -> None:
    async with endpoints(2, kind="tls") as (here, there):
        is_taking = asyncio.Event()

        async def take(remote: PeerId, header: bytes, stream: Stream) -> None:
            await is_taking.wait()
            while True:
                await stream.receive_into(memoryview(bytearray(1 << 16)))

        there.accept_bulk("taken", take)
        here.learn(there.peer_id, there.addresses)
        stream = await here.open_bulk(there.peer_id, "taken", b"")
        sending = asyncio.ensure_future(stream.send(bytearray(64 * MB)))
        await asyncio.sleep(1.0)
        delivery = stream.delivery()
        assert delivery is not None
        assert not sending.done()
        assert delivery.busy_s < 0.5
        is_taking.set()
        await sending
        here.release(stream)


@on_linux
@pytest.mark.usefixtures("far")
async def test_a_short_round_is_not_paced_on_streams_that_a_long_one_has_used() -> None:
    async with endpoints(2, kind="tls") as (here, there), streams_from(here, there, 1) as (stream,):
        paced = has_shown(here, 1 * MB)
        for num_bytes, expected in [(5 * MB, pytest.approx(paced, abs=1)), (3 * MB, None)]:
            with here.uplink.shared() as share:
                share.add(stream, num_bytes)
                await asyncio.sleep(0.01)
                assert pace_of(stream) == expected


@on_linux
@pytest.mark.usefixtures("far")
async def test_an_endpoint_that_is_closed_in_a_round_leaves_nothing() -> None:
    async with endpoints(2, kind="tls") as (here, there), streams_from(here, there, 2) as streams:
        with here.uplink.shared() as share:
            share.add(streams[0], 1)
            await here.close()
            share.add(streams[1], 1)
            assert not measuring()
        with here.uplink.shared() as share:
            share.add(streams[1], 1)
            assert not share.streams, "it is closed"


@on_linux
@pytest.mark.usefixtures("far")
async def test_the_streams_of_an_all_reduce_are_paced_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink, "MIN_ROUND_S", 0.0)
    generator = torch.Generator().manual_seed(1)
    vectors = [torch.randn(400_000, generator=generator) for _ in range(3)]
    seen: dict[PeerId, list[int | None]] = {}

    async with averagers(3, kind="tls") as members:
        paces = {
            endpoint.peer_id: has_shown(endpoint, (number + 1) * 9e6) for number, (_, _, endpoint) in enumerate(members)
        }

        shares: dict[PeerId, uplink.RoundShare] = {}
        ended: list[PeerId] = []

        def note_shares_of(endpoint: Endpoint) -> None:
            shared = endpoint.uplink.shared

            @contextlib.contextmanager
            def noting() -> Iterator[uplink.RoundShare]:
                with shared() as share:
                    shares[endpoint.peer_id] = share
                    yield share
                ended.append(endpoint.peer_id)

            monkeypatch.setattr(endpoint.uplink, "shared", noting)

        async def look() -> None:
            while len(seen) < 3:
                for peer_id, share in list(shares.items()):
                    if len(share.streams) == 2 and peer_id not in seen:
                        await asyncio.sleep(0)
                        seen[peer_id] = [pace_of(stream) for stream in share.streams]
                await asyncio.sleep(0)

        for _, _, endpoint in members:
            note_shares_of(endpoint)
        looking = asyncio.ensure_future(look())
        results = await asyncio.gather(*(one[0].average(vectors[i], 1.0) for i, one in enumerate(members)))
        await asyncio.wait_for(looking, PATIENCE_S)
        assert sorted(ended) == sorted(paces)
    for result in results:
        torch.testing.assert_close(result.averaged_N, sum(vectors) / 3, rtol=1e-5, atol=1e-6)
    for peer_id, parts in seen.items():
        assert sum(part or 0 for part in parts) == pytest.approx(paces[peer_id], rel=0.01)
