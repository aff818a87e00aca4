"""What happened in a world, in order: as lines for people, and as one hash that tells two runs apart."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TextIO

REMEMBERED_LINES = 2000
FLUSH_AT = 1000  # lines: formatting and hashing many at once costs half of one by one


class Trace:
    """The events of one run.

    Attributes:
        num_events: all of them.
        log: a file that gets each line, if there is one.
    """

    def __init__(self) -> None:
        self.num_events = 0
        self.log: TextIO | None = None
        self._lines: deque[str] = deque(maxlen=REMEMBERED_LINES)
        self._new: list[tuple[float, str | tuple[str, str, int, int, int]]] = []
        self._sha256 = hashlib.sha256()

    def add(self, now: float, what: str) -> None:
        """Something happened at virtual time ``now``."""
        self.num_events += 1
        self._new.append((now, what))
        if len(self._new) >= FLUSH_AT:
            self.flush()

    def add_chunk(self, now: float, source: str, destination: str, stream: int, num_bytes: int, crc: int) -> None:
        """Bytes arrived."""
        self.num_events += 1
        self._new.append((now, (source, destination, stream, num_bytes, crc)))
        if len(self._new) >= FLUSH_AT:
            self.flush()

    @property
    def lines(self) -> list[str]:
        """The last events, as text."""
        self.flush()
        return list(self._lines)

    def digest(self) -> str:
        """SHA-256 of all events so far, in hexadecimal."""
        self.flush()
        return self._sha256.copy().hexdigest()

    def flush(self) -> None:
        """Hash what is new, and write it to the log."""
        lines = [f"{now:.6f} {_text(what)}" for now, what in self._new]
        self._new.clear()
        self._lines.extend(lines)
        text = "".join(line + "\n" for line in lines)
        self._sha256.update(text.encode())
        if self.log is not None:
            self.log.write(text)

    def close_log(self) -> None:
        """Write the last lines to the log, and let it go."""
        self.flush()
        self.log = None


def _text(what: str | tuple[str, str, int, int, int]) -> str:
    if isinstance(what, str):
        return what
    source, destination, stream, num_bytes, crc = what
    return f"{source}>{destination} #{stream} {num_bytes} bytes {crc:08x}"
