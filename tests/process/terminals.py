"""Commands in a pseudo-terminal, as a user at a keyboard sees them."""

from __future__ import annotations

import codecs
import os
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import psutil

from tests.process.commands import PATIENT
from tests.waiting import PATIENCE_S

TAKE_TERMINAL = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Makes the terminal that of the session, so that Ctrl-C and closing it send their signals, also if the tests were
started with nohup, which ignores one of them."""

CTRL_C, CTRL_Z = b"\x03", b"\x1a"


class Terminal:
    """A command in a terminal of its own, of 120 columns and 40 rows at first."""

    def __init__(self, *command: str, env: Mapping[str, str] | None = None) -> None:
        self.screen = ""
        self._folder = tempfile.TemporaryDirectory()
        self._is_closed = threading.Event()
        self._master, slave = os.openpty()
        self.resize(120, 40)
        self._process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, sys.executable, "-c", PATIENT, *command],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True, cwd=self._folder.name,
            env=_without(os.environ, "COLUMNS", "LINES", "NO_COLOR") | {"TERM": "xterm"} | (env or {}),
        )  # fmt: skip
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while not self._is_closed.is_set():
            if not select.select([self._master], [], [], 0.05)[0]:
                continue
            try:
                data = os.read(self._master, 65536)
            except OSError:  # nobody has the terminal open any more
                return
            if not data:
                return
            self.screen += decoder.decode(data)

    def resize(self, width: int, height: int) -> None:
        """As the window of a terminal; the program is told by SIGWINCH."""
        import fcntl
        import struct
        import termios

        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def type(self, keys: bytes) -> None:
        """As a user at the keyboard; ``b"\\x03"`` is Ctrl-C."""
        os.write(self._master, keys)

    def hang_up(self) -> None:
        """Close the terminal, as its window does."""
        if not self._is_closed.is_set():
            self._is_closed.set()
            self._reader.join(5.0)
            os.close(self._master)

    def wait_until(self, pattern: str, times: int = 1) -> None:
        self.wait_for(lambda: len(re.findall(pattern, self.screen)) >= times)

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, self.screen
            assert self._process.poll() is None, self.screen
            time.sleep(0.05)

    @property
    def is_stopped(self) -> bool:
        return psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        code = self._process.wait(PATIENCE_S)
        self._reader.join(5.0)
        return code

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self.hang_up()
        self._folder.cleanup()


def _without(env: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


@contextmanager
def in_terminal(*command: str, env: Mapping[str, str] | None = None) -> Iterator[Terminal]:
    terminal = Terminal(*command, env=env)
    try:
        yield terminal
    finally:
        terminal.close()


def final_rows(screen: str) -> list[str]:
    """What is left to read, of a terminal that is wide enough: erased rows are gone."""
    rows = [""]
    for piece in re.split(r"(\r\n|\r|\x1b\[1A|\x1b\[2K)", screen):
        if piece == "\r\n":
            rows.append("")
        elif piece == "\x1b[1A":
            rows.pop()
        elif piece == "\x1b[2K":
            rows[-1] = ""
        elif piece != "\r":
            rows[-1] += re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", piece)
    return rows
