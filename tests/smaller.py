"""Sizes and times of rounds that are smaller than in use: a small vector has several reducers, or many chunks.

All peers that average with each other need the same sizes, so a child process makes them smaller for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from manyhands.averaging.allreduce import partition
from manyhands.averaging.matchmaking import admission
from manyhands.averaging.round import times

CONSTANTS = {
    "reducing_clients": (admission, "MAX_REDUCING_CLIENTS"),
    "span_numel": (partition, "MIN_SPAN_NUMEL"),  # with 1, all members reduce
    "chunk_numel": (partition, "CHUNK_NUMEL"),
    "stream_s": (times, "TWO_DIALS_S"),  # of the wait for a partner's stream
    "in_doubt_s": (times, "LATE_ANSWER_S"),  # of the wait for the others' answers, once the leader is lost
}


def make_smaller(**sizes: float) -> None:
    """Set constants, by the names above, for all peers in this process."""
    for name, size in sizes.items():
        setattr(*CONSTANTS[name], size)


@contextmanager
def smaller(**sizes: float) -> Iterator[None]:
    """Like :func:`make_smaller`, until the end of the block."""
    before = {name: getattr(*CONSTANTS[name]) for name in sizes}
    make_smaller(**sizes)
    try:
        yield
    finally:
        make_smaller(**before)
