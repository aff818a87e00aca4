"""A memory pool for records in transfer, shared by all streams of the process; idle streams need none."""

from __future__ import annotations

from collections import deque

from manyhands.transport.chunks import CHUNK_BYTES

ROOM_BYTES = CHUNK_BYTES + 1024
"""For one of the longest records, and a little that is sent with it."""

MAX_IDLE = 32
"""Buffers kept for reuse, 8 MiB in total; the system takes 0.2 ms to clear a new one."""

_idle: deque[memoryview] = deque()


def take_room() -> memoryview:
    """Take memory for one long record, with arbitrary contents; giving it back is optional. Thread-safe."""
    try:
        return _idle.pop()
    except IndexError:
        return memoryview(bytearray(ROOM_BYTES))


def give_back_room(room: memoryview) -> None:
    """Return memory to the pool; the caller must not use it any more."""
    if len(_idle) < MAX_IDLE:
        _idle.append(room)
