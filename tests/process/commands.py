"""The commands, as a user would start them: as processes of their own, or as a call where a process adds nothing."""

from __future__ import annotations

import io
import logging
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import psutil
import pytest

from manyhands.cli.main import run
from tests.waiting import PATIENCE_S

STARTUP_S = 20.0
"""Of Python and its imports, without torch, on a busy machine; 1 s on an idle one."""

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


PATIENT = """
import runpy
from manyhands.cli import leaving
leaving.LEAVE_TIMEOUT_S = 60.0
runpy.run_module("manyhands", run_name="__main__", alter_sys=True)
"""
"""The command line, with more time to leave: on a busy machine a summary or a checkpoint would be cut off."""


class Command:
    """A running Python program; its output can be waited for, and it never outlives the test.

    Args:
        folder: where it runs; a command by default in a fresh folder, as trainers keep what they have there.
        is_patient: whether the command line has more time to leave than users give it.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        module: str | None = "manyhands",
        folder: Path | None = None,
        *,
        is_patient: bool = True,
    ) -> None:
        self.output = ""
        self._own_folder = Path(tempfile.mkdtemp()) if module and folder is None else None
        self.folder = folder or self._own_folder
        start = ["-c", PATIENT] if module == "manyhands" and is_patient else ["-m", module] if module else []
        self._process = subprocess.Popen(
            [sys.executable, "-u", *start, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, text: str) -> str:
        """The first new line with ``text`` in it."""
        deadline = time.monotonic() + PATIENCE_S
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=left_s)
            except queue.Empty:
                break
            if line is None:
                break
            self.output += line
            if text in line:
                return line
        pytest.fail(f"{text!r} did not come; the output was:\n{self.output}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self._process.pid).children(recursive=True)

    def hang_up(self) -> None:
        """As a program that rotates logs."""
        self._process.send_signal(signal.SIGHUP)

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit code; the rest of the output is in :attr:`output` then."""
        code = self._process.wait(timeout_s)
        while (line := self._lines.get(timeout=PATIENCE_S)) is not None:
            self.output += line
        return code

    def close(self) -> None:
        for process in self.descendants() if self._process.poll() is None else []:
            process.kill()
        self._process.kill()
        self._process.wait()
        self._reader.join(5.0)
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)


@contextmanager
def running(*arguments: str, folder: Path | None = None, is_patient: bool = True) -> Iterator[Command]:
    command = Command(arguments, folder=folder, is_patient=is_patient)
    try:
        yield command
    finally:
        command.close()


def called(*arguments: str) -> tuple[int, str]:
    """The exit code of a command that runs in this process, and its output; its log is set up as it was before."""
    output, root, ours = io.StringIO(), logging.getLogger(), logging.getLogger("manyhands")
    handlers, levels = root.handlers, (root.level, ours.level)
    try:
        with redirect_stdout(output), redirect_stderr(output):
            code = run(arguments)
    finally:
        root.handlers = handlers
        root.setLevel(levels[0])
        ours.setLevel(levels[1])
        logging.captureWarnings(False)
    return code, output.getvalue()


def address_of(monitor: Command) -> str:
    """The multiaddr in the line that a monitor prints for trainers."""
    return monitor.wait_for("manyhands train").split()[-1]
