"""What happened in a world, in order: as lines for people, and as one hash that tells two runs apart."""

from __future__ import annotations

import hashlib
from collections import deque

REMEMBERED_LINES = 2000


class Trace:
    """The events of one run.

    Attributes:
        lines: the last of them, as text.
        num_events: all of them.
    """

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=REMEMBERED_LINES)
        self.num_events = 0
        self._sha256 = hashlib.sha256()

    def add(self, now: float, what: str) -> None:
        """Something happened at virtual time ``now``."""
        line = f"{now:.6f} {what}"
        self.lines.append(line)
        self.num_events += 1
        self._sha256.update(line.encode() + b"\n")

    def digest(self) -> str:
        """SHA-256 of all events so far, in hexadecimal."""
        return self._sha256.copy().hexdigest()
