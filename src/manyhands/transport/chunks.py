"""Splits messages into chunks for encryption."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

CHUNK_BYTES = 256 * 1024
"""Most bytes that are encrypted in one call, which takes about 0.1 ms."""


def buffer_chunks(
    buffers: Iterable[bytes | bytearray | memoryview], max_bytes: int = CHUNK_BYTES
) -> Iterator[memoryview]:
    """Yield the buffers in order, as views of at most ``max_bytes``, without copying."""
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        for start in range(0, len(view), max_bytes):
            yield view[start : start + max_bytes]
