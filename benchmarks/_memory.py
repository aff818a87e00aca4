"""What a process has needed of memory at most; on Linux only."""

from __future__ import annotations

import ctypes
from pathlib import Path

KIB = 1024
MMAP_THRESHOLD = -3  # of malloc.h
LARGE_BYTES = 1 << 20


def _status(pid: int) -> dict[str, int]:
    """The lines of /proc/PID/status that count memory, in bytes."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * KIB for words in lines if len(words) == 3 and words[2] == "kB"}


def own_bytes(pid: int) -> int:
    """Memory of this process alone: neither files, such as libraries, nor what it shares with others."""
    return _status(pid)["RssAnon"]


def free_at_once() -> None:
    """From now on large tensors go back to the system when they are freed.

    By default glibc learns from the first ones to keep such memory, or not: a third of a model more or less by chance.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGE_BYTES)


def start_peak(pid: int) -> None:
    """From now on count the peak anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_own_bytes(pid: int) -> int:
    """About the most of :func:`own_bytes` since :func:`start_peak`: files and shared memory do not shrink meanwhile."""
    status = _status(pid)
    return status["VmHWM"] - status["RssFile"] - status["RssShmem"]
