"""Processes that the demo starts; none outlives it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

REMEMBERED_LINES = 200


class Child:
    """One ``manyhands`` command in a process.

    It exits when its standard input ends, so it ends with this process even if that is killed.

    Args:
        folder: working directory, not the user's: prepared data there must not affect the demo.
    """

    def __init__(self, name: str, arguments: Sequence[str], folder: Path) -> None:
        self.name = name
        self.is_killed = False
        self._lines: deque[str] = deque(maxlen=REMEMBERED_LINES)
        self._num_taken = 0
        self._num_lines = 0
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "manyhands", *arguments, "--leave-on-eof"],
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
            self._lines.append(line.rstrip("\n"))
            self._num_lines += 1

    def take_new_lines(self) -> list[str]:
        """Lines printed since the last call, at most the last :data:`REMEMBERED_LINES`."""
        num_new = min(self._num_lines - self._num_taken, len(self._lines))
        self._num_taken += num_new
        return list(self._lines)[len(self._lines) - num_new :]

    def last_line(self) -> str:
        """The last line that is not empty."""
        self._reader.join(1.0)
        return next((line for line in reversed(self._lines) if line.strip()), "it printed nothing")

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Send SIGKILL, which gives no chance to say goodbye, as when a machine loses power."""
        self.is_killed = True
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
