"""Whole peers with optimizers, each with a training thread, for tests over real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakValueDictionary

import pytest
import torch

import manyhands
import manyhands.peer as peer_module
from manyhands.averaging import AveragingConfig
from manyhands.base.identity import Identity, PeerId
from manyhands.optim import ProgressConfig
from manyhands.transport import TlsTransport
from tests.inside import OpenOptimizer
from tests.smaller import smaller
from tests.wire import Wire

FAST = ProgressConfig(min_refresh_s=0.05, max_refresh_s=0.5, ttl_s=5.0)
AVERAGING = AveragingConfig(matchmaking_time_s=5.0, averaging_timeout_s=20.0)
LISTEN = ["/ip4/127.0.0.1/tcp/0"]
BATCH_SIZE = 4


def new_model(seed: int = 0, width: int = 8) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))


_wires: WeakValueDictionary[PeerId, Wire] = WeakValueDictionary()


@contextmanager
def mortal() -> Iterator[None]:
    """Peers that are made within the block can be killed."""

    def transport_of(identity: Identity) -> Wire:
        _wires[identity.peer_id] = wire = Wire(TlsTransport(identity))
        return wire

    with patch.object(peer_module, "TlsTransport", transport_of):
        yield


@contextmanager
def peers(num_peers: int) -> Iterator[list[manyhands.Peer]]:
    """All of which reduce, in each round."""
    with smaller(span_numel=1), ExitStack() as stack:
        with mortal():
            first = stack.enter_context(manyhands.Peer(listen=LISTEN))
            others = [
                stack.enter_context(manyhands.Peer(initial_peers=first.addresses, listen=LISTEN))
                for _ in range(num_peers - 1)
            ]
        yield [first, *others]


def kill(peer: manyhands.Peer) -> None:
    """End a peer of :func:`mortal` as SIGKILL does: its sockets close, and nothing is said to anybody."""
    peer.run(_wires[peer.peer_id].cut(), 5.0, "dying")
    peer.close()  # what it would say to the others does not leave this machine


def in_threads(functions: Sequence[Callable[[], None]], timeout_s: float = 240.0) -> None:
    """Run each function in a thread of its own; the first failure is raised, and so is a thread that does not end."""
    failures: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 (raised below, in the test's thread)
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a training thread hangs"


def step_until(optimizer: manyhands.Optimizer, condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Take part in rounds, without more samples, until something holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"it did not come about: {optimizer.statistics} at step {optimizer.global_step}")
        optimizer.step(batch_size=0)
        time.sleep(0.005)


class Trainer:
    """A peer's model, optimizer and data."""

    def __init__(
        self,
        peer: manyhands.Peer,
        run_id: str,
        target_batch_size: int,
        *,
        seed: int = 0,
        width: int = 8,
        make: Callable[[torch.nn.Module], torch.optim.Optimizer] | None = None,
        **options: Any,
    ) -> None:
        self.peer = peer
        self.model = new_model(seed, width)
        self._generator = torch.Generator().manual_seed(seed)
        settings: dict[str, Any] = {"averaging": AVERAGING, "progress": FAST} | options
        inner = make(self.model) if make is not None else torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.optimizer = OpenOptimizer(
            inner,
            peer=peer,
            run_id=run_id,
            target_batch_size=target_batch_size,
            batch_size_per_step=BATCH_SIZE,
            **settings,
        )

    def train_batch(self) -> None:
        inputs = torch.randn(BATCH_SIZE, 5, generator=self._generator)
        targets = torch.randn(BATCH_SIZE, 3, generator=self._generator)
        torch.nn.functional.mse_loss(self.model(inputs), targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.check_samples()

    def train_until(self, global_step: int, pause_s: float = 0.01, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.optimizer.global_step < global_step:
            if time.monotonic() > deadline:
                pytest.fail(f"step {global_step} was not reached: {self.optimizer.statistics}")
            self.train_batch()
            time.sleep(pause_s)

    def check_samples(self) -> None:
        """No sample is lost, and none counts twice."""
        counts = self.optimizer.statistics
        assert counts.samples_computed == (
            counts.samples_used + counts.samples_dropped + self.optimizer.samples_accumulated
        ), counts
