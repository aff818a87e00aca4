"""A memory pool for records in transfer, shared by all streams of the process; idle streams need none.

Small rooms are mappings of their own: what hundreds of threads free in the heaps of the C library, these keep. Large
ones are not, as rounds with them take 8% more CPU (`benchmarks/allreduce.py`).
"""

from __future__ import annotations

import mmap
from collections import deque

from manyhands.transport.chunks import CHUNK_BYTES

SMALL_ROOM_BYTES = (1 << 16) + 1024
"""For a record of up to 64 KiB: a reducer of hundreds of members receives from, and sends to, each of them at once."""

ROOM_BYTES = CHUNK_BYTES + 1024
"""For one of the longest records, and a little that is sent with it."""

MAX_IDLE_BYTES = 8 << 20
"""Of each size, kept for reuse; the system takes 0.2 ms to clear a new large one."""

_idle: dict[int, deque[memoryview]] = {SMALL_ROOM_BYTES: deque(), ROOM_BYTES: deque()}


def take_room(num_bytes: int) -> memoryview:
    """Take memory for one record, with arbitrary contents; giving it back is optional. Thread-safe.

    Args:
        num_bytes: the least size, at most ``ROOM_BYTES``.
    """
    is_small = num_bytes <= SMALL_ROOM_BYTES
    try:
        return _idle[SMALL_ROOM_BYTES if is_small else ROOM_BYTES].pop()
    except IndexError:
        if not is_small:
            return memoryview(bytearray(ROOM_BYTES))
        return memoryview(mmap.mmap(-1, SMALL_ROOM_BYTES, access=mmap.ACCESS_COPY))  # a forked process has its own


def give_back_room(room: memoryview) -> None:
    """Return memory to the pool; the caller must not use it any more. Memory of other sizes is not kept."""
    idle = _idle.get(len(room))
    if idle is not None and len(room) * len(idle) < MAX_IDLE_BYTES:
        idle.append(room)
