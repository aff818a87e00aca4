"""Memory for records on their way, shared by all streams of the process: only those that move something need any."""

from __future__ import annotations

from collections import deque

from manyhands.transport.chunks import CHUNK_BYTES

ROOM_BYTES = CHUNK_BYTES + 1024
"""For one of the longest records, and a little that is sent with it."""

MAX_IDLE = 32
"""So many are kept for the next stream, 8 MiB; to clear new memory takes the system 0.2 ms for each."""

_idle: deque[memoryview] = deque()


def take_room() -> memoryview:
    """Memory for one long record, with any bytes in it; whoever takes it may give it back. Any thread may call it."""
    try:
        return _idle.pop()
    except IndexError:
        return memoryview(bytearray(ROOM_BYTES))


def give_back_room(room: memoryview) -> None:
    """Nobody looks at it any more."""
    if len(_idle) < MAX_IDLE:
        _idle.append(room)
