"""A pool of buffers for records in transfer, shared by all streams of the process; idle streams need none.

A buffer is called a room. Each small one is a memory mapping of its own: the heaps of the C library would keep memory
that hundreds of threads have freed. Large ones are ordinary memory: as mappings, they would cost rounds 8% more CPU
(`benchmarks/allreduce.py`).
"""

from __future__ import annotations

import mmap
from collections import deque

from manyhands.transport.chunks import CHUNK_BYTES

SMALL_ROOM_BYTES = (1 << 16) + 1024
"""Size of a small room, for a record of up to 64 KiB. A reducer with hundreds of members needs two for each of them."""

ROOM_BYTES = CHUNK_BYTES + 1024
"""Size of a large room, for one of the longest records and a little that is sent with it."""

MAX_IDLE_BYTES = 8 << 20
"""Bytes in unused rooms of each size that are kept for reuse: the system takes 0.2 ms to clear a new large one."""

_idle: dict[int, deque[memoryview]] = {SMALL_ROOM_BYTES: deque(), ROOM_BYTES: deque()}


def take_room(num_bytes: int) -> memoryview:
    """Take a room for one record, with arbitrary contents; giving it back is optional. Thread-safe.

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
    """Return a room to the pool; the caller must not use it any more. Rooms of other sizes are not kept."""
    idle = _idle.get(len(room))
    if idle is not None and len(room) * len(idle) < MAX_IDLE_BYTES:
        idle.append(room)
