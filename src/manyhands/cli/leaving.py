"""Ctrl-C, a polite kill, and the end of the parent process all end a command the same way."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType


def leave_on_signals() -> None:
    """SIGTERM, and SIGHUP where it exists, raise KeyboardInterrupt in the main thread as Ctrl-C does."""
    signal.signal(signal.SIGINT, _interrupt)  # a background job of a shell starts with SIGINT ignored
    signal.signal(signal.SIGTERM, _interrupt)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, _interrupt)


def leave_on_eof() -> None:
    """When standard input ends, leave as on SIGTERM."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="waiting for the end of stdin", daemon=True).start()


def _interrupt(number: int, frame: FrameType | None) -> None:
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # leaving has begun: a second signal does not disturb it
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    raise KeyboardInterrupt
