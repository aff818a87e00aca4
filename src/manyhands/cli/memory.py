"""Memory use of this process."""

from __future__ import annotations

from pathlib import Path

_STATM = Path("/proc/self/statm")


def memory_bytes() -> int | None:
    """Resident memory now, or the peak so far on systems that do not report it; None on Windows."""
    try:
        import resource
    except ImportError:
        return None
    try:
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
