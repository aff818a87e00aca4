"""Ctrl-C on any command: it exits soon, and nothing is left."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from manyhands.cli.leaving import LEAVE_TIMEOUT_S
from tests.process.commands import LOOPBACK, Command, address_of
from tests.process.commands import running as running_patiently
from tests.sweeps import few_of
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

running = functools.partial(running_patiently, is_patient=False)

INTERRUPTED = 130
LEAVE_S = 3 * LEAVE_TIMEOUT_S
"""A command ends itself after one LEAVE_TIMEOUT_S, and after another one once it has saved what it must."""
SMALL = (
    "--hidden-size", "48", "--num-attention-heads", "3", "--intermediate-size", "64", "--num-hidden-layers", "1",
    "--seq-length", "32", "--vocab-size", "600",
)  # fmt: skip


def assert_it_leaves(command: Command, interrupt: Callable[[], None]) -> None:
    before = command.descendants()
    interrupt()
    code = command.wait(LEAVE_S)
    assert code == INTERRUPTED, command.output
    assert "Traceback" not in command.output
    assert not psutil.wait_procs(before, timeout=LEAVE_S)[1], "processes are left"


def test_ctrl_c_ends_a_monitor() -> None:
    with running("monitor", "--run-id", "leaving", "--listen", LOOPBACK) as monitor:
        address_of(monitor)
        assert_it_leaves(monitor, monitor.interrupt)


@pytest.mark.parametrize(
    ("closed", "command"), few_of([(">&- 2>&- <&-", "first-peer"), (">&-", "monitor")], 1, pytest.mark.long)
)
def test_a_command_whose_output_is_closed_runs_and_leaves(closed: str, command: str, tmp_path: Path) -> None:
    words = [command, "--listen", LOOPBACK, "--events", str(tmp_path / "events")]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "manyhands", *words]
    with subprocess.Popen(shell, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        deadline = time.monotonic() + PATIENCE_S
        while not (tmp_path / "events").exists() or "listening" not in (tmp_path / "events").read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{process.poll()}: {process.stdout.read()}")
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == INTERRUPTED
        assert process.stdout.read() == ""


@pytest.mark.skipif(sys.platform == "win32", reason="no such shell")
def test_a_diagnosis_whose_output_is_closed_has_its_exit_code(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "manyhands", "doctor", "127.0.0.1:1"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *words], check=False, capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no such signal")
def test_a_hangup_without_a_terminal_ends_nothing(tmp_path: Path) -> None:
    """As a program that rotates logs sends it; the events go to a new file."""
    events, log = tmp_path / "events", tmp_path / "log"
    files = ("--events", str(events), "--log-file", str(log), "--log-json")
    with running("first-peer", "--listen", LOOPBACK, *files) as peer:
        peer.wait_for("nodes in the table")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert lines[-1]["message"].startswith("nodes in the table")
        assert lines[-1]["peer"] in peer.output
        events.rename(tmp_path / "events.1")
        for _ in range(2):
            peer.hang_up()
            time.sleep(0.2)
        assert_it_leaves(peer, peer.interrupt)


@pytest.mark.parametrize(
    "moment",
    [
        "Collaboration accumulated",
        pytest.param("Beginning run", marks=pytest.mark.long),
        pytest.param("Training the tokenizer", marks=pytest.mark.sweep),
    ],
)
def test_ctrl_c_ends_a_trainer(moment: str, tmp_path: Path) -> None:
    """In ``make test`` although it takes 10 s: it is the only one there that runs a whole trainer."""
    text = tmp_path / "text.txt"
    text.write_text(
        "".join(f"Sentence number {n} of this text. It has another one behind it.\n\n" for n in range(2000))
    )
    with running(
        "train",
        "--run-id",
        "leaving",
        "--listen",
        LOOPBACK,
        "--threads",
        "1",
        "--text",
        str(text),
        "--batch-size",
        "4",
        *SMALL,
    ) as trainer:
        trainer.wait_for(moment)
        assert_it_leaves(trainer, trainer.interrupt)


@pytest.mark.long
def test_a_trainer_stopped_before_the_training_says_so() -> None:
    with running_patiently("train", "--run-id", "leaving", "--listen", LOOPBACK, *SMALL) as trainer:
        trainer.wait_for("Others can join through this peer")  # it imports PyTorch meanwhile
        trainer.interrupt()
        assert trainer.wait() == INTERRUPTED, trainer.output
        assert "Stopped before the training began" in trainer.output.splitlines()[-1], trainer.output


@pytest.mark.long
def test_ctrl_c_ends_a_trainer_that_waits_for_an_averaging_partner() -> None:
    with ExitStack() as stack:
        common = ("train", "--run-id", "leaving", "--listen", LOOPBACK, "--threads", "1", "--target-batch-size", "32")
        first = stack.enter_context(running(*common))
        address = first.wait_for("Others can join").split()[-1]
        second = stack.enter_context(running(*common, "--initial-peers", address, "--slow-down", "30"))
        second.wait_for("Collaboration accumulated")
        first.wait_for("Beginning global optimizer step")
        assert_it_leaves(first, first.interrupt)


@pytest.mark.long
@pytest.mark.parametrize("moment", few_of(["Step 1", "Running a coordinator"]))
def test_ctrl_c_ends_the_demo(moment: str) -> None:
    with running("demo", "--peers", "2", "--steps", "50", "--target-batch-size", "32") as demo:
        demo.wait_for(moment)
        assert demo.descendants()
        assert_it_leaves(demo, demo.interrupt)


@pytest.mark.long
def test_a_demo_that_is_killed_takes_its_processes_along() -> None:
    with running("demo", "--peers", "1", "--steps", "50") as demo:
        demo.wait_for("Beginning run")
        children = demo.descendants()
        assert len(children) == 2
        demo.kill()
        # they notice at once; but one that is just loading torch's libraries notices later
        assert not psutil.wait_procs(children, timeout=PATIENCE_S)[1], "processes are left"
