"""How much of a message is handed over in one go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

RUN_BYTES = 1 << 20
"""A message of up to this size is handed over whole: cancelling its sender cannot tear it."""

CHUNK_BYTES = 256 * 1024
"""What is encrypted at a time: about 0.2 ms of the loop's time."""


def runs_of(buffers: Sequence[bytes | bytearray | memoryview]) -> Iterator[list[memoryview]]:
    """Split what one call sends into runs of at most :data:`RUN_BYTES`, each a list of chunks, without copying.

    Between runs the sender waits for room; within a run it does not.
    """
    run: list[memoryview] = []
    num_bytes = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            if num_bytes + len(chunk) > RUN_BYTES:
                yield run
                run, num_bytes = [], 0
            run.append(chunk)
            num_bytes += len(chunk)
    yield run
