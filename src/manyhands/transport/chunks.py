"""How much of a message is worked on at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

CHUNK_BYTES = 256 * 1024
"""What is encrypted at a time: about 0.1 ms."""


def chunks_of(buffers: Iterable[bytes | bytearray | memoryview], max_bytes: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """Buffers one after the other, in views of at most ``max_bytes``; nothing is copied."""
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        for start in range(0, len(view), max_bytes):
            yield view[start : start + max_bytes]
