"""One member of a round as a process of its own, which may kill or stop itself in a phase of it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.rounds import RoundRunner
from manyhands.base.address import Address
from manyhands.base.errors import RoundAborted
from manyhands.base.identity import Identity, PeerId
from manyhands.transport import TlsTransport
from tests.phases import on_phase
from tests.swarm import FixedMeeting
from tests.wire import WatchedEndpoint

NUMEL = 4_000_000
NUM_BYTES = 4 * NUMEL
CONFIG = AveragingConfig(matchmaking_time_s=3.0, averaging_timeout_s=30.0, codec="none")
POLL_S = 0.0005
STAY_S = 30.0
MAX_ATTEMPTS = 2
"""A round whose leader dies is aborted, and its members form another group."""
PHASES = (
    "before", "joining", "formed", "first chunk sent", "half sent", "reducing", "before commit", "after commit",
)  # fmt: skip
SENT = {"first chunk sent": 0.1, "half sent": 0.7}
RECEIVED = {"reducing": 0.5}


@dataclass(frozen=True)
class Report:
    """How a round ended for a member.

    Attributes:
        time: of the machine's monotonic clock, in seconds.
        digest: of the mean that it holds; empty if it holds none.
        reason: what went wrong, in words.
        num_attempts: rounds in which it took part; only that of a leader that died needs a second one.
    """

    time: float
    digest: bytes
    reason: str
    num_attempts: int


def identity_of(number: int) -> Identity:
    return Identity.from_seed(number.to_bytes(32, "big"))


def run(number: int, phase: str, fault: signal.Signals | None, pipe: Connection) -> None:
    """The process: it tells its addresses, is told those of all, averages once, and reports."""
    torch.set_num_threads(1)
    asyncio.run(_run(number, phase, fault, pipe))


async def _run(number: int, phase: str, fault: signal.Signals | None, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    endpoint = WatchedEndpoint(TlsTransport(identity_of(number)))
    await endpoint.listen([Address.parse("/ip4/127.0.0.1/tcp/0")])
    pipe.send((endpoint.peer_id, [str(address) for address in endpoint.addresses]))
    addresses: Mapping[PeerId, list[str]] = await loop.run_in_executor(None, pipe.recv)
    for peer_id, texts in addresses.items():
        endpoint.learn(peer_id, [Address.parse(text) for text in texts])
    others = {peer_id: False for peer_id in addresses if peer_id != endpoint.peer_id}
    runner = RoundRunner(endpoint, "faults", b"", FixedMeeting(endpoint, others), CONFIG, random.Random(number))
    vector_N = torch.full((NUMEL,), float(number))

    def fail_in(now: str) -> None:
        if fault is not None and now == phase:
            pipe.send(time.monotonic())
            os.kill(os.getpid(), fault)

    async def watch() -> None:
        while True:
            sent = endpoint.bytes_sent
            received = sum(stream.bytes_received for stream in endpoint.wire.streams)
            if sent >= SENT.get(phase, 9.0) * NUM_BYTES or received >= RECEIVED.get(phase, 9.0) * NUM_BYTES:
                fail_in(phase)
                return
            await asyncio.sleep(POLL_S)

    on_phase(endpoint.peer_id, lambda entered: fail_in(entered.value))
    fail_in("before")
    watching = asyncio.create_task(watch())
    reason = ""
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            result = await runner.average(vector_N, 1.0)
        except RoundAborted as error:
            reason = error.reason
        else:
            digest = result.manifest.digest if result.averaged_N is not None else b""
            report = Report(time.monotonic(), digest, result.reason, attempt)
            break
    else:
        report = Report(time.monotonic(), b"", reason, MAX_ATTEMPTS)
    pipe.send(report)
    await loop.run_in_executor(None, pipe.poll, STAY_S)  # whoever is in doubt may ask
    watching.cancel()
    await runner.close()
    await endpoint.close()
