"""What an attacker can make a peer hold in memory has bounds."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from manyhands.base.errors import PeerLost
from manyhands.rpc.frames import Frame, Ping, encode_frame
from tests.integration.siege import KINDS, request, siege
from tests.network import identity_of
from tests.sweeps import few_of

MAX_HELD_BYTES = 32 << 20
"""For one attacker: what waits for a peer that does not read, its calls under way, and the tools of this test."""
TRACED_LATENCY_S = 3.0  # Python is several times slower while its memory is measured


@contextmanager
def bounded_memory() -> Iterator[None]:
    """The peak of what is allocated within the block stays below the bound."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    print(f"peak {peak / 2**20:.1f} MiB")
    assert peak < MAX_HELD_BYTES


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "frame",
    few_of(
        [Ping(), request(1, "x" * 300_000), request(1), request(1, "x" * 5_000), request(1, method="none")],
        2,
        pytest.mark.long,
    ),
    ids=["pings", "large calls", "calls", "larger calls", "calls without a method"],
)
async def test_a_peer_that_never_reads_its_answers_takes_bounded_memory(kind: str, frame: Frame) -> None:
    loop = asyncio.get_running_loop()
    is_call = not isinstance(frame, Ping)
    async with siege(kind, max_latency_s=TRACED_LATENCY_S) as scene:
        stream = await scene.connect()
        with bounded_memory():
            began, number = loop.time(), 0
            with suppress(PeerLost, asyncio.TimeoutError):
                while loop.time() < began + 1.0:
                    if is_call:
                        number += 1
                        frame.id = number  # type: ignore[union-attr]
                        message = encode_frame(frame)
                        message *= max(1, 20_000 // len(message))
                    else:
                        message = encode_frame(frame) * 2000
                    await asyncio.wait_for(stream.send(message), 0.5)
            await scene.served(5)


@pytest.mark.parametrize("kind", KINDS)
async def test_frames_that_are_announced_and_never_come_take_bounded_memory(kind: str) -> None:
    """Each of these could have a mebibyte set aside for it before a byte of it has come."""
    async with siege(kind, max_latency_s=TRACED_LATENCY_S) as scene:
        streams = [await scene.connect(identity_of(200 + number)) for number in range(60)]
        with bounded_memory():
            for stream in streams:
                await stream.send(b"\x00\x0f\xff\xf0\x81")
            await scene.served(5)
