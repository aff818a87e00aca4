"""Processes that the demo starts; none outlives it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from queue import SimpleQueue

Lines = SimpleQueue[tuple[str, str]]
"""The printed lines, each with the name of its process."""


class Child:
    """One ``manyhands`` command in a process.

    It exits when its standard input ends, so it ends with this process even if that is killed.

    Args:
        module: the program, which takes the arguments of the ``manyhands`` command.
        folder: working directory. It is not the user's, since prepared data there must not affect the demo.
        lines: receives each line that it prints.
    """

    def __init__(self, name: str, arguments: Sequence[str], folder: Path, lines: Lines, module: str) -> None:
        self.name = name
        self._last_line = "it printed nothing"
        self._lines = lines
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", module, *arguments, "--leave-on-eof"],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # so that Ctrl-C in a terminal reaches only the demo, which ends the others
        )
        self._reader = threading.Thread(target=self._read, name=f"output of {name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.rstrip("\n")
            self._lines.put((self.name, text))
            if text.strip():
                self._last_line = text

    def last_line(self) -> str:
        """The last line that was not empty; call it when the process has ended."""
        self._reader.join(1.0)
        return self._last_line

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Send SIGKILL: the process ends without a goodbye, as when a machine loses power."""
        self._process.kill()

    def ask_to_leave(self) -> None:
        """Send SIGTERM, on which the process says goodbye to its peers and leaves."""
        if self.exit_code is None:
            self._process.terminate()

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within ``timeout_s`` seconds."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Kill the process if it still runs, and reap it."""
        self._process.kill()
        self._process.wait()
        self._reader.join(1.0)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def end_all(children: Iterable[Child], timeout_s: float) -> None:
    """Ask all to leave, and kill those that have not left within ``timeout_s`` seconds."""
    children = list(children)
    for child in children:
        child.ask_to_leave()
    deadline = time.monotonic() + timeout_s
    for child in children:
        child.wait(max(deadline - time.monotonic(), 0.0))
    for child in children:
        child.close()
