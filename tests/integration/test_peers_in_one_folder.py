"""Programs of one run that are started in one folder without an address find each other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from manyhands import Peer
from manyhands.cli.options import NetworkOptions
from manyhands.cli.taking_part import meet_peers_here, monitor_folder, trainer_folder

LISTEN = "/ip4/127.0.0.1/tcp/0"
ANOTHER = f"""
import sys
from manyhands import Peer
with Peer(listen=["{LISTEN}"], state_dir=sys.argv[1]):
    print("up", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@contextmanager
def running_in(folder: str) -> Iterator[None]:
    """A peer in another process: a process does not wait for its own locks."""
    command = [sys.executable, "-c", ANOTHER, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield
        process.communicate(timeout=30)


def test_those_that_start_at_the_same_time_meet(caplog: pytest.LogCaptureFixture) -> None:
    """Neither has seen the other when it began; the one that looks last sees the other one."""
    caplog.set_level("INFO")
    with Peer(listen=[LISTEN], state_dir=trainer_folder("r")) as trainer, running_in(monitor_folder("r")):
        meet_peers_here(trainer, "r", NetworkOptions())
        assert trainer.dht.num_nodes == 1
    assert "Another peer of run r was started in this folder (manyhands-r.monitor)" in caplog.text


def test_a_peer_meets_neither_itself_nor_peers_of_another_run_nor_others_than_those_that_were_named() -> None:
    with Peer(listen=[LISTEN], state_dir=trainer_folder("r")) as trainer, running_in(trainer_folder("s")):
        meet_peers_here(trainer, "r", NetworkOptions())
        meet_peers_here(trainer, "s", NetworkOptions(initial_peers=("127.0.0.1:1",)))
        assert trainer.dht.num_nodes == 0
