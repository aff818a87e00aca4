"""The events of a world in order: as text, and as a hash for comparing two runs."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TextIO

import msgspec

REMEMBERED_LINES = 2000
"""Number of the last events that :attr:`Trace.lines` shows."""
FLUSH_AT = 1000
"""Number of events that are hashed at once, which takes half the time of hashing each."""

_SHORT_ARRAY = 15
"""Most elements of an array whose header in msgpack is 1 byte; it is 3 bytes up to 65,535 elements."""

_encoder = msgspec.msgpack.Encoder()

TraceEvent = tuple[float, str] | tuple[float, str, str, int, int, int]


class Trace:
    """The events of one run.

    Attributes:
        num_events: in all.
        log: a file for all lines, or None.
        flush_at: number of events that are hashed, and written to the log, at once.
    """

    def __init__(self) -> None:
        self.num_events = 0
        self.log: TextIO | None = None
        self.flush_at = FLUSH_AT
        self._last: deque[TraceEvent] = deque(maxlen=REMEMBERED_LINES)
        self._new: list[TraceEvent] = []
        self._sha256 = hashlib.sha256()

    def add(self, now: float, what: str) -> None:
        """Add an event at virtual time ``now``."""
        self._add((now, what))

    def add_chunk(self, now: float, source: str, destination: str, stream: int, num_bytes: int, crc: int) -> None:
        """Add the arrival of bytes."""
        self._add((now, source, destination, stream, num_bytes, crc))

    def _add(self, event: TraceEvent) -> None:
        self.num_events += 1
        self._new.append(event)
        if len(self._new) >= self.flush_at:
            self.flush()

    @property
    def lines(self) -> list[str]:
        """The last events, as text."""
        self.flush()
        return [_line(event) for event in self._last]

    def digest(self) -> str:
        """SHA-256 of all events so far, in hexadecimal."""
        self.flush()
        return self._sha256.copy().hexdigest()

    def flush(self) -> None:
        """Hash new events, and write them to the log."""
        if not self._new:
            return
        self._last.extend(self._new)
        encoded = _encoder.encode(self._new)
        header_bytes = 1 if len(self._new) <= _SHORT_ARRAY else 3
        self._sha256.update(encoded[header_bytes:])  # without the header, so that flushes do not change the digest
        if self.log is not None:
            self.log.write("".join(_line(event) + "\n" for event in self._new))
        self._new.clear()

    def close_log(self) -> None:
        """Flush the log and close it."""
        self.flush()
        self.log = None


def _line(event: TraceEvent) -> str:
    if len(event) == 2:
        return f"{event[0]:.6f} {event[1]}"
    now, source, destination, stream, num_bytes, crc = event
    return f"{now:.6f} {source}>{destination} #{stream} {num_bytes} bytes {crc:08x}"
