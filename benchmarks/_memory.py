"""What a process has needed of memory at most; on Linux only."""

from __future__ import annotations

from pathlib import Path

KIB = 1024


def _status(pid: int) -> dict[str, int]:
    """The lines of /proc/PID/status that count memory, in bytes."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * KIB for words in lines if len(words) == 3 and words[2] == "kB"}


def own_bytes(pid: int) -> int:
    """Memory of this process alone: neither files, such as libraries, nor what it shares with others."""
    return _status(pid)["RssAnon"]


def start_peak(pid: int) -> None:
    """From now on count the peak anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_own_bytes(pid: int) -> int:
    """About the most of :func:`own_bytes` since :func:`start_peak`: files and shared memory do not shrink meanwhile."""
    status = _status(pid)
    return status["VmHWM"] - status["RssFile"] - status["RssShmem"]
