"""A training thread that holds Python's lock stops its peer's network thread; what that costs the peer and the run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import manyhands
from manyhands.rpc import RpcConfig
from tests.process.commands import Command
from tests.smaller import smaller
from tests.trainers import LISTEN, Trainer, in_threads

pytestmark = pytest.mark.process

SCALE = float(os.environ.get("GIL_TEST_SCALE", "0.4"))
"""1 is the real thing: the default heartbeats, and a lock that is held for 15 s (or until the others make a step)."""

HELD_S = 15.0 * SCALE
TARGET_BATCH_SIZE = 500
RPC = RpcConfig(heartbeat_period_s=4.0 * SCALE, heartbeat_timeout_s=8.5 * SCALE)

CHILD = """
import ctypes, os, sys, time
import manyhands
from tests.process.test_gil import RPC, TARGET_BATCH_SIZE
from tests.smaller import make_smaller
from tests.trainers import LISTEN, Trainer

make_smaller(span_numel=1)  # all members reduce
libc = ctypes.PyDLL(None)  # calls keep the lock, as a slow extension does
end = os.open(sys.argv[1], os.O_RDWR)
with manyhands.Peer(initial_peers=sys.argv[2:], listen=LISTEN, rpc_config=RPC) as peer:
    print("peer", peer.peer_id, flush=True)
    trainer = Trainer(peer, "gil", TARGET_BATCH_SIZE)
    while trainer.optimizer.num_peers < 3:  # nobody joins while the lock is held
        trainer.optimizer.step(batch_size=0)
        time.sleep(0.05)
    trainer.train_until(trainer.optimizer.global_step + 2)
    print("holds", flush=True)
    committed = trainer.optimizer.statistics.rounds_committed
    libc.read(end, ctypes.create_string_buffer(1), 1)
    print("goes on at", trainer.optimizer.global_step, flush=True)
    while True:
        trainer.train_batch()
        if trainer.optimizer.statistics.rounds_committed > committed:
            print("took part in step", trainer.optimizer.global_step, flush=True)
        time.sleep(0.01)
"""


@contextmanager
def child(end: Path, *initial_peers: str) -> Iterator[Command]:
    """Holds its lock until something is written into the pipe ``end``."""
    os.mkfifo(end)
    command = Command(["-c", CHILD, str(end), *initial_peers], module=None)
    try:
        yield command
    finally:
        command.close()


@pytest.mark.long
def test_a_held_lock_costs_its_peer_a_round_and_not_its_place(tmp_path: Path) -> None:
    """The others average without it after the heartbeat's timeout; then it is back, with the state of the run."""
    with (
        smaller(span_numel=1),
        manyhands.Peer(listen=LISTEN, rpc_config=RPC) as first,
        manyhands.Peer(initial_peers=first.addresses, listen=LISTEN, rpc_config=RPC) as second,
        child(tmp_path / "end", *first.addresses) as command,
    ):
        held_peer = command.wait_for("peer ").split()[1]
        trainers = [Trainer(peer, "gil", TARGET_BATCH_SIZE, seed=seed) for seed, peer in enumerate([first, second])]
        is_over = threading.Event()

        def train(trainer: Trainer) -> None:
            while not is_over.is_set():
                trainer.train_batch()
                time.sleep(0.01)

        def watch() -> None:
            try:
                command.wait_for("holds")
                steps_before = trainers[0].optimizer.global_step
                since = time.monotonic()
                while trainers[0].optimizer.global_step == steps_before or time.monotonic() < since + HELD_S:
                    assert time.monotonic() < since + 10 * HELD_S, "the others go on without it"
                    time.sleep(0.05)
                (tmp_path / "end").write_bytes(b"1")
                step_there = int(command.wait_for("goes on at").split()[-1])
                missed = trainers[0].optimizer.global_step
                assert step_there <= steps_before + 1
                step = int(command.wait_for("took part in step").split()[-1])
                assert step <= missed + 2, "it takes part in the second round after its return at the latest"
                assert held_peer in {contact.peer_id for contact in first.dht.contacts()}
            finally:
                is_over.set()

        in_threads([watch, *(lambda trainer=trainer: train(trainer) for trainer in trainers)])
