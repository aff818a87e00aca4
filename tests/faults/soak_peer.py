"""One trainer of ``make soak``: a process that trains for ever, says how it is, and does to itself what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import psutil
import torch

import manyhands
import manyhands.peer as peer_module
from manyhands.base.address import Address
from manyhands.base.identity import Identity
from manyhands.peer import Presence
from manyhands.transport import TlsTransport
from manyhands.transport.api import OnStream, Stream
from manyhands.transport.sealed_stream import SealedStream
from manyhands.transport.tls import TlsListener
from manyhands.transport.tls_stream import TlsStream
from tests.faults.leaks import memory_mb
from tests.hostile.trainer import BATCH_SIZE, WIDTH, adam, loss_of
from tests.smaller import make_smaller
from tests.trainers import LISTEN

RUN_ID = "soaked"
BATCH_S = 0.2
TARGET = 800
"""Samples: a step each 1.2 to 4 s, for ten peers or three."""
SAY_S = 1.0
LONG_S = 10.0
"""A call of ``step()`` that takes longer is reported with its begin and end."""
NUM_DIGESTS = 20


@dataclass(frozen=True)
class Command:
    """What a peer does to itself from now on.

    Attributes:
        wrong_s: seconds by which its clock is ahead of the machine's.
        bytes_per_s: rate of each of its connections; infinite if nothing limits it.
    """

    wrong_s: float = 0.0
    bytes_per_s: float = float("inf")


@dataclass
class Facts:
    """How a peer is.

    Attributes:
        addresses: where others can dial it.
        at: when it said so; as all times here, seconds of the machine's monotonic clock.
        in_step_since: when the call of ``step()`` that still runs began, if one does.
        waits: begin and end of the long calls of ``step()`` so far.
        digests: of its state, by global step, for the last ones.
        reasons: of the rounds that were aborted, with their numbers.
        waiting: samples that count in the next step.
    """

    addresses: list[str]
    at: float = 0.0
    step: int = 0
    loss: float = float("nan")
    in_step_since: float | None = None
    waits: list[tuple[float, float]] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    counts: dict[str, Any] = field(default_factory=dict)
    waiting: int = 0
    num_tasks: int = 0
    num_files: int = 0
    num_threads: int = 0
    memory_mb: float = 0.0


class SlowableTransport(TlsTransport):
    """A transport all of whose connections can be made slow, those that are open and those to come."""

    def __init__(self, identity: Identity) -> None:
        super().__init__(identity)
        self._open: WeakSet[Stream] = WeakSet()
        self._bytes_per_s = float("inf")

    def slow_down(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        for stream in self._open:
            stream.pace(bytes_per_s)

    def _note(self, stream: Stream) -> None:
        self._open.add(stream)
        stream.pace(self._bytes_per_s)

    async def dial(self, address: Address, timeout_s: float) -> TlsStream:
        stream = await super().dial(address, timeout_s)
        self._note(stream)
        return stream

    async def dial_bulk(self, address: Address, timeout_s: float) -> SealedStream:
        stream = await super().dial_bulk(address, timeout_s)
        self._note(stream)
        return stream

    async def listen(self, address: Address, on_stream: OnStream) -> TlsListener:
        async def noted(stream: Stream) -> None:
            self._note(stream)
            await on_stream(stream)

        return await super().listen(address, noted)


class Soaked:
    """The trainer, and what it says of itself."""

    def __init__(self, pipe: Connection, initial_peers: Sequence[str]) -> None:
        make_smaller(span_numel=1)  # all members reduce; all else as users have it
        self._pipe = pipe
        self._command = Command()
        self._is_training = False
        threading.Thread(target=self._talk, daemon=True).start()
        torch.manual_seed(0)
        self._model = torch.nn.Linear(WIDTH, WIDTH)
        defaults: Any = Presence.__init__.__kwdefaults__
        defaults["wall_clock"] = lambda: time.time() + self._command.wrong_s

        with patch.object(peer_module, "TlsTransport", self._new_transport):
            self._peer = manyhands.Peer(initial_peers=initial_peers, listen=LISTEN, must_join=False)
        self._optimizer = manyhands.Optimizer(
            adam(self._model), peer=self._peer, run_id=RUN_ID, target_batch_size=TARGET,
            batch_size_per_step=BATCH_SIZE,
        )  # fmt: skip
        self._facts = Facts(self._peer.addresses)
        self._digests: deque[tuple[int, str]] = deque(maxlen=NUM_DIGESTS)

    def _new_transport(self, identity: Identity) -> SlowableTransport:
        self._transport = SlowableTransport(identity)
        return self._transport

    def train(self) -> None:
        """Until this process is interrupted."""
        self._is_training = True
        self._obey(self._command)  # it may have come while this peer joined
        generator = torch.Generator().manual_seed(os.getpid())
        optimizer, facts = self._optimizer, self._facts
        try:
            while True:
                time.sleep(BATCH_S)
                loss = loss_of(self._model, generator)
                loss.backward()
                step, aborted, told = optimizer.global_step, optimizer.statistics.rounds_aborted, optimizer.last_failure
                facts.in_step_since = began = time.monotonic()
                optimizer.step()
                facts.in_step_since = None
                optimizer.zero_grad()
                facts.loss = loss.item()
                if time.monotonic() - began > LONG_S:
                    facts.waits.append((began, time.monotonic()))
                if more := optimizer.statistics.rounds_aborted - aborted:
                    failure = optimizer.last_failure
                    facts.reasons[failure.reason if failure is not None and failure is not told else ""] += more
                if optimizer.global_step != step:
                    self._digests.append((optimizer.global_step, optimizer.state_digest()))
        except KeyboardInterrupt:
            pass
        finally:
            optimizer.close()
            self._peer.close()

    def _talk(self) -> None:
        """Say how it is, each second, and do what is told meanwhile; end when the process that started it is gone."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                if self._is_training:
                    self._pipe.send(self._facts_now())
                until = time.monotonic() + SAY_S
                while self._pipe.poll(max(until - time.monotonic(), 0.0)):
                    self._command = self._pipe.recv()
                    if self._is_training:
                        self._obey(self._command)
        os._exit(1)

    def _facts_now(self) -> Facts:
        facts, process = self._facts, psutil.Process()
        facts.at, facts.step = time.monotonic(), self._optimizer.global_step
        facts.digests = dict(self._digests)
        facts.counts = dataclasses.asdict(self._optimizer.statistics)
        facts.waiting = self._optimizer.samples_accumulated
        facts.num_tasks = self._num_tasks()
        facts.num_files, facts.num_threads = process.num_fds(), threading.active_count()
        facts.memory_mb = memory_mb()
        return facts

    def _num_tasks(self) -> int:
        async def count() -> int:
            return len(asyncio.all_tasks())

        try:
            return self._peer.run(count(), SAY_S, "counting tasks")
        except manyhands.ManyhandsError:
            return self._facts.num_tasks

    def _obey(self, command: Command) -> None:
        async def slow_down() -> None:
            self._transport.slow_down(command.bytes_per_s)

        with contextlib.suppress(manyhands.ManyhandsError):
            self._peer.run(slow_down(), SAY_S, "slowing down")


def run(pipe: Connection, initial_peers: Sequence[str], log_file: str) -> None:
    """What the process does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in children of a script's background job
    sys.unraisablehook = _interrupt_again
    logging.basicConfig(filename=log_file, level="INFO", format="%(asctime)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    with contextlib.suppress(KeyboardInterrupt):
        Soaked(pipe, initial_peers).train()


def _interrupt_again(event: sys.UnraisableHookArgs) -> None:
    """Press Ctrl-C again if Python has discarded it, as it does in callbacks of the garbage collector.

    On busy cores torch imports for seconds, and 12 of 175 were lost so. The commands do the same.
    """
    if isinstance(event.exc_value, KeyboardInterrupt):
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        threading.Timer(0.01, signal.pthread_kill, [main_thread, signal.SIGINT]).start()
    else:
        sys.__unraisablehook__(event)
