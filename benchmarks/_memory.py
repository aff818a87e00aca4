"""Peak memory of a process; Linux only."""

from __future__ import annotations

import ctypes
from pathlib import Path

KIB = 1024
MMAP_THRESHOLD = -3  # from malloc.h
LARGE_BYTES = 1 << 20


def _status(pid: int) -> dict[str, int]:
    """The memory values in /proc/PID/status, in bytes."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * KIB for words in lines if len(words) == 3 and words[2] == "kB"}


def own_bytes(pid: int) -> int:
    """Memory of this process alone, without files such as libraries, and without shared memory."""
    return _status(pid)["RssAnon"]


def free_at_once() -> None:
    """Make glibc return the memory of large tensors to the system when they are freed.

    By default glibc may learn to keep such memory: a third of a model more or less by chance.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGE_BYTES)


def start_peak(pid: int) -> None:
    """Reset the peak."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_own_bytes(pid: int) -> int:
    """The approximate peak of :func:`own_bytes` since :func:`start_peak`, as files and shared memory do not shrink."""
    status = _status(pid)
    return status["VmHWM"] - status["RssFile"] - status["RssShmem"]
