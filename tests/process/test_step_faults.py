"""A real process that is killed in a phase of a global step, or frozen: the others go on, lose no sample, and learn."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import torch

import manyhands
from manyhands.averaging.allreduce.butterfly import Butterfly
from manyhands.averaging.matchmaking.matchmaker import Matchmaker
from manyhands.averaging.round.round_machine import Round
from manyhands.optim import ProgressConfig
from manyhands.optim.run.collaboration import Collaboration
from manyhands.optim.step.replica import Replica
from manyhands.rpc import RpcConfig
from tests.process.commands import Command
from tests.smaller import make_smaller, smaller
from tests.sweeps import few_of
from tests.trainers import LISTEN, Trainer, in_threads, new_model

pytestmark = pytest.mark.process

PHASES: dict[str, tuple[type, str]] = {
    "deciding": (Collaboration, "decide"),
    "looking for a group": (Matchmaker, "find_group"),
    "averaging": (Butterfly, "run"),
    "voting": (Round, "_exchanged"),
    "updating": (Replica, "advance"),
    "telling": (Collaboration, "move"),
}
RPC = RpcConfig(heartbeat_period_s=1.5, heartbeat_timeout_s=3.5)
FROZEN_S = 8.0
LAST_STEP_OF_VICTIM = 2
MORE_STEPS = 3
TARGET = 120

CHILD = """
import sys
from tests.process.test_step_faults import live
live(sys.argv[1], sys.argv[2:])
"""


def quadratic(model: torch.nn.Module) -> torch.Tensor:
    return sum((parameter - 1).square().mean() for parameter in model.parameters())  # type: ignore[return-value]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2)


def train(trainer: Trainer, until: Callable[[], bool], timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not until():
        assert time.monotonic() < deadline, trainer.optimizer.statistics
        quadratic(trainer.model).backward()  # type: ignore[no-untyped-call]
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        trainer.check_samples()
        time.sleep(0.02)


def live(phase: str, initial_peers: list[str]) -> None:
    """The victim: it kills itself in a phase of its step, or trains on for ever."""
    make_smaller(span_numel=1)  # all members reduce
    with manyhands.Peer(initial_peers=initial_peers, listen=LISTEN, rpc_config=RPC) as peer:
        trainer = Trainer(peer, "faults", TARGET, make=sgd, progress=ProgressConfig())  # whose records live for long
        train(trainer, lambda: trainer.optimizer.global_step >= LAST_STEP_OF_VICTIM)
        if phase in PHASES:
            owner, method = PHASES[phase]
            setattr(owner, method, _die)
        print("ready", flush=True)  # for its fault
        while True:
            step = trainer.optimizer.global_step + 1
            train(trainer, lambda step=step: trainer.optimizer.global_step >= step)  # type: ignore[misc]
            counts = trainer.optimizer.statistics
            print("loaded", counts.states_loaded, "committed", counts.rounds_committed, flush=True)


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def victim(phase: str, initial_peers: list[str]) -> Iterator[Command]:
    command = Command(["-c", CHILD, phase, *initial_peers], module=None)
    try:
        yield command
    finally:
        command.close()


@contextmanager
def survivors() -> Iterator[list[Trainer]]:
    with (
        smaller(span_numel=1),
        manyhands.Peer(listen=LISTEN, rpc_config=RPC) as first,
        manyhands.Peer(initial_peers=first.addresses, listen=LISTEN, rpc_config=RPC) as second,
    ):
        yield [Trainer(peer, "faults", TARGET, make=sgd) for peer in (first, second)]


def assert_they_learnt_and_agree(trainers: list[Trainer]) -> None:
    for trainer in trainers:
        counts = trainer.optimizer.statistics
        assert (counts.samples_dropped, counts.steps_alone) == (0, 0), counts
        assert quadratic(trainer.model) < 0.8 * quadratic(new_model())
    by_step = {trainer.optimizer.global_step: trainer.optimizer.state_digest() for trainer in trainers}
    assert len(by_step) == 2 or len({trainer.optimizer.state_digest() for trainer in trainers}) == 1


@pytest.mark.long
@pytest.mark.parametrize("phase", few_of(PHASES))
def test_the_others_learn_and_agree_after_a_kill_in_any_phase_of_a_step(phase: str) -> None:
    with survivors() as trainers, victim(phase, trainers[0].peer.addresses) as command:
        last_step: list[int] = []

        def watch() -> None:
            command.wait_for("ready")
            assert command.wait() == -signal.SIGKILL
            last_step.append(max(trainer.optimizer.global_step for trainer in trainers) + MORE_STEPS)

        def go_on(trainer: Trainer) -> None:
            train(trainer, lambda: bool(last_step) and trainer.optimizer.global_step >= last_step[0])
            trainer.optimizer.wait_for_others(5.0)

        in_threads([watch, *(lambda t=trainer: go_on(t) for trainer in trainers)])
        assert_they_learnt_and_agree(trainers)


@pytest.mark.long
def test_a_survivor_of_a_kill_goes_on_before_the_record_of_the_dead_peer_expires() -> None:
    with (
        manyhands.Peer(listen=LISTEN, rpc_config=RPC) as peer,
        victim("averaging", peer.addresses) as command,
    ):
        trainer = Trainer(peer, "faults", TARGET, make=sgd)
        counts, died_at, alone_before = trainer.optimizer.statistics, [], []

        def watch() -> None:
            command.wait_for("ready")
            assert command.wait() == -signal.SIGKILL
            alone_before.append(counts.steps_alone)
            died_at.append(time.monotonic())

        def go_on() -> None:
            train(trainer, lambda: bool(died_at) and counts.steps_alone > alone_before[0])

        in_threads([watch, go_on])
        assert time.monotonic() - died_at[0] < ProgressConfig().ttl_s * 0.6
        assert counts.samples_dropped == 0


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGSTOP")
def test_a_process_that_was_frozen_notices_it_reloads_and_goes_on() -> None:
    with survivors() as trainers, victim("none", trainers[0].peer.addresses) as command:
        is_over: list[bool] = []

        def watch() -> None:
            try:
                command.wait_for("ready")
                process = psutil.Process(command.pid)
                before = trainers[0].optimizer.global_step
                process.suspend()
                time.sleep(FROZEN_S)
                process.resume()
                assert trainers[0].optimizer.global_step > before, "the others went on without it"
                while True:
                    _, loaded, _, committed = command.wait_for("loaded").split()
                    if int(loaded) >= 1:
                        break
                while int(command.wait_for("loaded").split()[-1]) == int(committed):
                    pass
            finally:
                is_over.append(True)

        in_threads([watch, *(lambda t=t: train(t, lambda: bool(is_over)) for t in trainers)])
        assert_they_learnt_and_agree(trainers)
